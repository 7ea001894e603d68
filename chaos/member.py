"""`python -m chaos.member BOOTSTRAP GROUP TOPIC FOLDER BEGAN`: members of a consumer group, a process each.

This process is their nursery: it has imported what a member needs, and forks one for each number on its stdin, whose
pid it prints. A fork costs milliseconds where an interpreter's start would cost a core for a second. It starts no
thread and makes no socket itself, so children inherit nothing that a fork breaks. They die with it, and it ends with
its stdin.

A member reads, and commits what it has read, until SIGTERM, on which it leaves. What it saw goes to
FOLDER/NUMBER.jsonl, a line a write, so a kill tears one line at most. Times are seconds since BEGAN of the monotonic
clock that all processes of a machine share, which goes on while one is suspended. By it a member finds out that it was,
and commits, as a zombie would, what it held before under the membership that it had then. The consumer itself knows
better; so this is a bare request.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from chaos.history import FAIL, INFO, INVOKE, OK, Event
from chaos.workload import key
from zmqueue import Admin, Consumer, TopicPartition
from zmqueue.client.group import ConsumerRebalanceListener
from zmqueue.errors import ZmqueueError, from_code
from zmqueue.model import GroupMetadata
from zmqueue.wire.frames import Operation
from zmqueue.wire.group_messages import CommitOffsetsRequest, CommitRow

SESSION_MS = 3_000
HEARTBEAT_MS = 500
POLL_MS = 100
COMMIT_S = 0.3
SUSPENDED_S = 2.0
COMMIT_MS_MAX = 10_000
PR_SET_PDEATHSIG = 1


class Journal:
    def __init__(self, path: Path, p: int, began: float) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._p = p
        self._began = began

    def add(self, e: str, f: str, **more: Any) -> None:
        at = round(time.monotonic() - self._began, 6)
        os.write(self._file, msgspec.json.encode(Event(at, self._p, e, f, **more)) + b"\n")


class Member(ConsumerRebalanceListener):
    def __init__(self, bootstrap: str, group: str, topic: str, p: int, journal: Journal) -> None:
        self._journal = journal
        self._bootstrap = bootstrap
        self._topic = topic
        self._next: dict[TopicPartition, int] = {}  # what was read of each that is held
        self._committed: dict[TopicPartition, int] = {}
        self._commits = 0
        self._ending = False
        self._consumer = Consumer(
            bootstrap_servers=bootstrap,
            client_id=f"member-{p}",
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
        )

    def live(self) -> None:
        signal.signal(signal.SIGTERM, self._end)
        self._journal.add(INVOKE, "join")
        self._consumer.subscribe([self._topic], listener=self)
        commit_at = time.monotonic() + COMMIT_S
        held, known, looked_at = dict(self._next), self._consumer.group_metadata(), time.monotonic()
        while not self._ending:
            self._poll()
            if time.monotonic() - looked_at > SUSPENDED_S and held and known.member_id:
                self._commit_as(known, held)
            held, known, looked_at = dict(self._next), self._consumer.group_metadata(), time.monotonic()
            if looked_at >= commit_at:
                self._commit(self._next)
                commit_at = looked_at + COMMIT_S
        self._journal.add(INVOKE, "leave")
        self._consumer.close()
        self._journal.add(OK, "leave")

    def _end(self, *_: object) -> None:
        self._ending = True

    def _poll(self) -> None:
        found = self._consumer.poll(POLL_MS)
        if not found:
            return
        rows = []
        for partition, records in found.items():
            row = []
            for record in records:
                row += [record.offset, int(record.value)]
            rows.append((key(partition.topic, partition.partition), row))
            self._next[partition] = records[-1].offset + 1
        known = self._consumer.group_metadata()
        self._journal.add(OK, "poll", rows=rows, v=known.generation_id, x=known.member_id)

    def _commit(self, positions: dict[TopicPartition, int]) -> None:
        """What is committed already is left out."""
        fresh = {partition: at for partition, at in positions.items() if self._committed.get(partition) != at}
        if not fresh:
            return
        self._commits += 1
        rows = [(key(partition.topic, partition.partition), [at]) for partition, at in fresh.items()]
        number, life = self._commits, self._consumer.group_metadata().member_id
        self._journal.add(INVOKE, "commit", o=number, x=life, rows=rows)
        try:
            self._consumer.commit(fresh, timeout_ms=COMMIT_MS_MAX)
        except ZmqueueError as error:
            self._journal.add(INFO if error.indeterminate else FAIL, "commit", o=number, x=error.name)
        else:
            self._journal.add(OK, "commit", o=number)
            self._committed |= fresh

    def _commit_as(self, known: GroupMetadata, positions: dict[TopicPartition, int]) -> None:
        """What was accepted is `ok` with those rows."""
        self._commits += 1
        rows = [(key(partition.topic, partition.partition), [at]) for partition, at in positions.items()]
        self._journal.add(INVOKE, "commit", o=self._commits, x=known.member_id, rows=rows)
        deadline = time.monotonic() + COMMIT_MS_MAX / 1000
        try:
            with Admin(bootstrap_servers=self._bootstrap) as admin:
                topic_id = admin.describe_topic(self._topic).topic_id
                request = CommitOffsetsRequest(
                    known.group_id,
                    [CommitRow(topic_id, partition.partition, at) for partition, at in positions.items()],
                    known.member_id,
                    known.generation_id,
                )
                _, told = admin._of_coordinator(known.group_id, Operation.COMMIT_OFFSETS, request, deadline)
        except ZmqueueError as error:
            self._journal.add(INFO if error.indeterminate else FAIL, "commit", o=self._commits, x=error.name)
            return
        accepted = [row for row, code in zip(rows, told.results, strict=True) if code == 0]
        if accepted:
            self._journal.add(OK, "commit", o=self._commits, rows=accepted)
        else:
            self._journal.add(FAIL, "commit", o=self._commits, x=from_code(told.results[0]).name)

    # -- what the group decides ------------------------------------------------------------------------------------

    def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
        self._note("assigned", assigned)

    def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        self._commit({partition: self._next[partition] for partition in revoked if partition in self._next})
        self._drop(revoked)
        self._note("revoked", revoked)

    def on_partitions_lost(self, lost: list[TopicPartition]) -> None:
        self._drop(lost)
        self._note("lost", lost)

    def _drop(self, gone: list[TopicPartition]) -> None:
        for partition in gone:
            self._next.pop(partition, None)
            self._committed.pop(partition, None)

    def _note(self, what: str, partitions: list[TopicPartition]) -> None:
        if partitions:
            known = self._consumer.group_metadata()
            names = [key(partition.topic, partition.partition) for partition in partitions]
            self._journal.add(OK, what, ks=names, v=known.generation_id, x=known.member_id)


def main(bootstrap: str, group: str, topic: str, folder: str, began: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for children
    nursery = os.getpid()
    for line in iter(sys.stdin.readline, ""):
        p = int(line)
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != nursery:
                os._exit(1)
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            Member(bootstrap, group, topic, p, Journal(Path(folder) / f"{p}.jsonl", p, float(began))).live()
            sys.exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
