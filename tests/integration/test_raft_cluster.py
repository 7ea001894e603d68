"""The Raft group as real processes that are killed under load: what was acknowledged stays, once and in order.

Run as a script this file is one member: it proposes numbered commands one after the other, notes each acknowledged one
in a file, and answers its parent on standard output. It ends when its standard input does, so none outlives the test.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zmqueue.broker.raft import Outcome, ProposalOutcome, RaftNode, format_folder
from zmqueue.config import RaftConfig

ROOT = Path(__file__).parents[2]
SECRET = b"a secret of thirty-two bytes ..."
WAIT_S = 20.0

pytestmark = [pytest.mark.integration, pytest.mark.timeout(100)]


# -- one member ----------------------------------------------------------------------------------------------------


class ListMachine:
    def __init__(self) -> None:
        self.commands: list[bytes] = []

    def apply(self, command: bytes) -> bytes:
        self.commands.append(command)
        return str(len(self.commands)).encode()

    def snapshot(self) -> bytes:
        return b"\n".join(self.commands)

    def restore(self, data: bytes) -> None:
        self.commands = data.split(b"\n") if data else []


class Member:
    def __init__(self, broker_id: int, members: dict[int, tuple[str, int]], folder: Path, compact_at: int) -> None:
        self.machine = ListMachine()
        self.node = RaftNode(
            broker_id=broker_id,
            members=members,
            folder=folder / str(broker_id),
            secret=SECRET,
            config=RaftConfig(compaction_entries_min=compact_at, disk_reserve_bytes=4096),
            machine=self.machine,
        )
        self.folder = folder
        self.name = f"{broker_id}-{os.getpid()}"
        self.proposed = 0
        self.loaded = self.busy = False
        self.latencies: list[float] = []
        self.acked = os.open(folder / f"acked-{broker_id}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def run(self) -> None:
        poll = select.poll()
        poll.register(self.node.fileno(), select.POLLIN)
        poll.register(sys.stdin.fileno(), select.POLLIN)
        while True:
            for fd, _ in poll.poll(50):
                if fd == sys.stdin.fileno():
                    data = os.read(fd, 65536).decode()
                    if not data:
                        return
                    for line in data.splitlines():
                        print(json.dumps(self.answer(line)), flush=True)
            self.node.tick()
            if self.loaded and not self.busy and self.node.leader is not None:
                self.propose()

    def propose(self) -> None:
        self.busy = True
        self.proposed += 1
        command = f"{self.name} {self.proposed}".encode()
        began = time.monotonic()

        def done(outcome: ProposalOutcome) -> None:
            self.busy = False
            if outcome.kind is Outcome.COMMITTED:
                self.latencies.append(time.monotonic() - began)
                os.write(self.acked, command + b"\n")

        self.node.propose(command, done)
        self.node.tick()

    def answer(self, line: str) -> dict[str, Any]:
        if line == "compact":
            self.node.compact()
        elif line in ("load", "rest"):
            self.loaded = line == "load"
        elif line == "dump":
            (self.folder / f"dump-{self.node.status()['broker_id']}").write_bytes(b"\n".join(self.machine.commands))
        status = self.node.status()
        status["busy"] = self.busy
        status["acked"] = len(self.latencies)
        status["hash"] = hashlib.sha256(b"\n".join(self.machine.commands)).hexdigest()
        status["cpu_s"] = time.process_time()
        quantiles = sorted(self.latencies)
        status["latency_ms"] = [quantiles[int(len(quantiles) * q)] * 1000 for q in (0.5, 0.99)] if quantiles else []
        return status


# -- the group as the test sees it ---------------------------------------------------------------------------------


class Cluster:
    def __init__(self, folder: Path, size: int, compact_at: int = 5_000) -> None:
        self.folder = folder
        self.compact_at = compact_at
        self.members = dict(enumerate(free_addresses(size), start=1))
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        for member in self.members:
            format_folder(folder / str(member), "test", member)

    def start(self, *members: int) -> None:
        for member in members or self.members:
            arguments = json.dumps([member, self.members, str(self.folder), self.compact_at])
            with (self.folder / f"log-{member}").open("ab") as errors:
                self.processes[member] = subprocess.Popen(
                    [sys.executable, __file__, arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                )

    def kill(self, *members: int) -> None:
        for member in members or list(self.processes):
            self.processes[member].kill()
        for member in members or list(self.processes):
            process = self.processes.pop(member)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def ask(self, member: int, line: str = "status") -> dict[str, Any]:
        process = self.processes[member]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
        readable, _, _ = select.select([process.stdout], [], [], WAIT_S)
        answer = process.stdout.readline() if readable else b""
        assert answer, f"member {member}: {self.log(member)}"
        return json.loads(answer)

    def ask_all(self, line: str = "status") -> dict[int, dict[str, Any]]:
        return {member: self.ask(member, line) for member in self.processes}

    def until(self, condition: Callable[[dict[int, dict[str, Any]]], Any], what: str) -> Any:
        end = time.monotonic() + WAIT_S
        while not (found := condition(statuses := self.ask_all())):
            logs = "\n".join(f"-- {member}\n{self.log(member)}" for member in self.members)
            assert time.monotonic() < end, f"{what} did not come: {json.dumps(statuses, indent=1)}\n{logs}"
            time.sleep(0.02)
        return found

    def leader(self) -> int:
        def agreed(statuses: dict[int, dict[str, Any]]) -> int | None:
            leaders = {status["leader"] for status in statuses.values()}
            return leaders.pop() if len(leaders) == 1 else None

        return self.until(agreed, "a leader")

    def progress(self, more: int) -> None:
        """Wait until members that run have acknowledged that many more."""
        before = sum(status["acked"] for status in self.ask_all("load").values())
        self.until(lambda statuses: sum(s["acked"] for s in statuses.values()) >= before + more, f"{more} commits")

    def settle(self) -> dict[int, dict[str, Any]]:
        """Wait until nobody proposes and all have applied the same."""
        self.ask_all("rest")

        def same(statuses: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]] | None:
            quiet = not any(status["busy"] for status in statuses.values())
            applied = {(status["applied_index"], status["log_last_index"]) for status in statuses.values()}
            done = quiet and len(applied) == 1 and len(set(applied.pop())) == 1
            return statuses if done and all(s["leader"] for s in statuses.values()) else None

        return self.until(same, "agreement")

    def log(self, member: int) -> str:
        path = self.folder / f"log-{member}"
        return path.read_text()[-3000:] if path.exists() else ""

    def check(self) -> int:
        """Every acknowledged command is in every state once, in the order of its proposer. Returns how many."""
        statuses = self.settle()
        assert len({status["hash"] for status in statuses.values()}) == 1
        assert all(status["failed"] is None and status["tick_errors"] == 0 for status in statuses.values()), statuses
        self.ask_all("dump")
        applied = (self.folder / f"dump-{min(self.processes)}").read_bytes().split(b"\n")
        place = {command: i for i, command in enumerate(applied)}
        assert len(place) == len(applied), "a command was applied twice"
        acked = 0
        for member in self.members:
            lines = (self.folder / f"acked-{member}").read_bytes().splitlines()
            places = [place.get(line) for line in lines]
            assert None not in places, f"lost: {[line for line in lines if line not in place]}"
            assert places == sorted(places)
            acked += len(lines)
        return acked


def free_addresses(count: int) -> list[tuple[str, int]]:
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    addresses = [sock.getsockname() for sock in sockets]
    for sock in sockets:
        sock.close()
    return addresses


@contextlib.contextmanager
def running(folder: Path, size: int, compact_at: int = 5_000) -> Iterator[Cluster]:
    cluster = Cluster(folder, size, compact_at)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


def test_killing_one_two_and_all_five_loses_nothing_acknowledged(tmp_path):
    with running(tmp_path, 5, compact_at=150) as cluster:
        cluster.leader()
        cluster.progress(100)
        for round_number in range(2):
            leader = cluster.leader()
            followers = [member for member in cluster.members if member != leader]
            one, two, everyone = [leader], [leader, followers[round_number]], list(cluster.members)
            for victims in (one, two, everyone):
                victims = [v for v in victims if v in cluster.processes]
                cluster.kill(*victims)
                if len(victims) < 5:
                    cluster.progress(40)  # the others go on without them
                cluster.start(*victims)
                cluster.progress(40)
        assert cluster.check() > 400
        assert any(status["snapshot_index"] > 0 for status in cluster.ask_all().values())


def test_state_is_the_same_after_compaction_and_restart_of_all(tmp_path):
    with running(tmp_path, 3) as cluster:
        cluster.leader()
        cluster.progress(100)
        before = cluster.settle()
        cluster.ask_all("compact")
        cluster.until(lambda statuses: all(s["snapshot_index"] > 0 for s in statuses.values()), "snapshots")
        cluster.until(lambda statuses: all(s["log_first_index"] > 1 for s in statuses.values()), "compaction")
        cluster.kill()
        cluster.start()
        after = cluster.settle()
        assert {status["hash"] for status in after.values()} == {status["hash"] for status in before.values()}
        cluster.progress(20)
        assert cluster.check() > 100


def test_a_member_whose_folder_was_wiped_does_not_vote_but_follows(tmp_path):
    with running(tmp_path, 3, compact_at=60) as cluster:
        cluster.leader()
        cluster.progress(80)
        cluster.settle()
        cluster.kill(2, 3)
        shutil.rmtree(tmp_path / "3")
        # A leader that has not missed its followers yet would go on as if nothing had happened.
        cluster.until(lambda statuses: not statuses[1]["is_leader"], "a leader without followers that steps down")
        cluster.start(3)
        term = cluster.ask(1)["term"]
        # Two of three are up, which would be a majority, had the second not forgotten what it promised.
        cluster.until(lambda statuses: statuses[1]["term"] >= term + 2, "fruitless elections")
        statuses = cluster.ask_all()
        assert [status["is_leader"] for status in statuses.values()] == [False, False]
        assert (statuses[1]["voting"], statuses[3]["voting"]) == (True, False)
        cluster.start(2)
        cluster.progress(20)
        assert cluster.check() > 100
        # Caught up, with all others present, an operator may admit it.
        cluster.kill(3)
        format_folder(tmp_path / "3", "test", 3, admit=True)
        cluster.start(3)
        cluster.until(lambda statuses: statuses[3]["voting"], "admission")
        cluster.kill(2)
        cluster.progress(20)
        cluster.start(2)
        assert cluster.check() > 120


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    member, members, folder, compact_at = json.loads(sys.argv[1])
    addresses = {int(key): (host, port) for key, (host, port) in members.items()}
    Member(member, addresses, Path(folder), compact_at).run()


if __name__ == "__main__":
    main()
