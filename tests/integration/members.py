"""Members of a group by bare requests, as a client in another language would send them."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from zmqueue import Admin, errors
from zmqueue.client.network import Answer
from zmqueue.model import NO_BROKER
from zmqueue.wire import group_messages as g
from zmqueue.wire.frames import Operation

SESSION_MS = 3_000
WAIT_MS = 500
ANSWER_S = 5.0

Held = set[tuple[str, int]]


def until(holds: Callable[[], object], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.05)


class Member(threading.Thread):
    """Joins, stays, lets go at once of what it is told to let go of. `told` is every assignment that it heard."""

    def __init__(self, bootstrap_servers: str, group: str, *topics: str) -> None:
        super().__init__(daemon=True)
        self.group = group
        self.topics = list(topics)
        self.member_id = ""
        self.held: Held = set()
        self.fresh: Held = set()
        self.generation = -1
        self.told: list[Held] = []
        self.lives = 0
        self.failure: BaseException | None = None
        self._revision = 0
        self._rows: dict[tuple[str, int], g.CommitRow] = {}
        self._ended = threading.Event()
        self._leaving = False
        self._coordinator = NO_BROKER
        self._admin = Admin(bootstrap_servers=bootstrap_servers)
        self._rejoin()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end(leave=False)
        if self.failure is not None and error is None:
            raise self.failure

    def end(self, *, leave: bool) -> None:
        """Without leaving it is as if the process had been killed."""
        self._leaving = leave
        self._ended.set()
        self.join()
        self._admin.close()

    def commit(self, offset: int, number: int) -> list[int]:
        """The same offset for all that it holds; the code of each row."""
        rows = [g.CommitRow(row.topic_id, row.partition, offset, metadata="by a member") for row in self._rows.values()]
        request = g.CommitOffsetsRequest(self.group, rows, self.member_id, self.generation, number)
        _, told = self._admin._of_coordinator(self.group, Operation.COMMIT_OFFSETS, request, time.monotonic() + 30)
        return list(told.results)

    def run(self) -> None:
        try:
            while not self._ended.is_set():
                self._beat()
            if self._leaving:
                self._ask(g.GroupHeartbeatRequest(self.group, self.member_id, self._revision, 0, leaving=True))
        except BaseException as error:
            self.failure = error
            raise

    def _rejoin(self) -> None:
        self.member_id = secrets.token_hex(8)
        self.lives += 1
        self._revision = 0
        self.held, self._rows = set(), {}

    def _beat(self) -> None:
        joins = self._revision == 0
        request = g.GroupHeartbeatRequest(
            self.group,
            self.member_id,
            self._revision,
            WAIT_MS,
            client_id="bare",
            topics=self.topics if joins else None,
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=SESSION_MS,
        )
        answer = self._ask(request)
        if answer is None:
            return
        self._revision, self.generation = answer.revision, answer.generation
        if answer.assignment is not None:
            self._rows = {
                (topic.name, row.partition): g.CommitRow(topic.topic_id, row.partition, 0)
                for topic in answer.assignment
                for row in topic.partitions
            }
            self.held = set(self._rows)
            self.fresh = {
                (topic.name, row.partition) for topic in answer.assignment for row in topic.partitions if row.fresh
            }
            self.told.append(self.held)

    def _ask(self, request: g.GroupHeartbeatRequest) -> g.GroupHeartbeatResponse | None:
        try:
            if self._coordinator == NO_BROKER:
                self._coordinator = self._admin._coordinator(self.group, time.monotonic() + 30)
            answer = self._admin._router.call(self._coordinator, Operation.GROUP_HEARTBEAT, request, ANSWER_S)
            if isinstance(answer, Answer):
                return answer.message  # type: ignore[no-any-return]
            raise answer
        except errors.UnknownMember:
            self._rejoin()
        except errors.ZmqueueError as error:
            if not error.retriable:
                raise
            self._coordinator = NO_BROKER
            self._ended.wait(0.1)
        return None
