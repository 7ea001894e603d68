"""Requests of clients: each checked, dispatched to whoever answers it, and always answered."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from zmqueue import errors
from zmqueue.broker.group_host import Writing
from zmqueue.broker.groups import Groups
from zmqueue.broker.logs import Logs
from zmqueue.broker.records import Produce, RecordRequests
from zmqueue.broker.replies import Replies, Table
from zmqueue.broker.topics import ClusterRequests
from zmqueue.config import Config
from zmqueue.core import commands as c
from zmqueue.core.effects import Effect
from zmqueue.core.node import Node
from zmqueue.errors import ZmqueueError
from zmqueue.model import NO_BROKER, PartitionKey
from zmqueue.transport import Frames, Socket
from zmqueue.wire import frames as f
from zmqueue.wire import messages as m
from zmqueue.wire.frames import Operation

_logger = logging.getLogger(__name__)

MESSAGES_PER_TURN = 100
# Answered whatever state this broker is in.
ALWAYS = frozenset((Operation.STATUS, Operation.METADATA))


class Handlers:
    def __init__(
        self,
        node: Node,
        logs: Logs,
        config: Config,
        storage: str,
        status: Callable[[], m.StatusResponse],
        low_disk: Callable[[], bool],
        run: Callable[[list[Effect]], None],
        clock: Callable[[], int],
        wall_clock: Callable[[], int],
    ) -> None:
        self.bad_frames = 0
        self._node = node
        self._status = status
        self._socket: Socket | None = None
        self._replies = Replies(config.broker)
        self.records = RecordRequests(node, logs, config, self._replies, run, clock)
        self.fetches = self.records.fetches
        self._cluster = ClusterRequests(node, config.topics, storage, self._replies, low_disk, run, clock)
        self.groups = Groups(node, logs, config, self._replies, low_disk, run, clock, wall_clock)
        self._clock = clock
        self._table: Table = {
            Operation.STATUS: lambda token, request, raw: self._replies.answer(token, self._status()),
            **self.records.table,
            **self._cluster.table,
            **self.groups.table,
        }

    def bind(self, socket: Socket) -> None:
        self._socket = socket
        self._replies.bind(socket)

    @property
    def waiting(self) -> int:
        """Requests that have no answer yet."""
        return self._replies.waiting

    def on_ready(self) -> None:
        assert self._socket is not None
        for _ in range(MESSAGES_PER_TURN):
            frames = self._socket.receive()
            if frames is None:
                return
            self._on_message(frames)

    def _on_message(self, frames: Frames) -> None:
        identity, *message = frames
        head = None
        try:
            head = f.parse_head(message)
            request = f.parse_request(head, message)
            if head.operation not in self._table:
                raise errors.UnknownOperation(f"operation {head.operation.name} is for brokers among themselves")
        except ZmqueueError as error:
            self.bad_frames += 1
            head = head or f.echo(message)
            if head is not None:
                self._replies.send(identity, f.failure(head, error.code, str(error)))
            return
        token = (identity, head)
        try:
            self._replies.expect(token)
            if not self._node.is_registered and head.operation not in ALWAYS:
                raise errors.BrokerFenced("this broker is starting")
            self._table[head.operation](token, request, message[2:])
        except ZmqueueError as error:
            self._replies.fail(token, error.code, str(error))
        except Exception:
            # A mistake of ours must not take the broker down, nor leave the client without an answer.
            _logger.exception("request %s failed", head.operation.name)
            self._replies.fail(token, errors.UnknownServerError.code, "the broker failed; see its log")

    # -- what the core answers -------------------------------------------------------------------------------------

    def on_produced(self, token: tuple[Produce, int] | Writing, result: m.ProduceResult) -> None:
        if type(token) is Writing:
            self.groups.on_produced(token, result)
        else:
            self.records.on_produced(token, result)

    def on_command(self, done: Callable[[c.Outcome], None], outcome: c.Outcome) -> None:
        done(outcome)

    def on_leading(self, key: PartitionKey) -> None:
        self.groups.on_leading(key)

    def on_moved(self, key: PartitionKey) -> None:
        self.fetches.on_moved(key, self._clock())
        self.groups.on_moved(key)

    def on_topics(self) -> None:
        self.records.on_topics()
        self.groups.on_topics()


def own_status(node: Node, uptime_ms: int, term: int, voting: bool, bad_frames: int) -> m.StatusResponse:
    """How this broker is doing, and how the partitions that it leads or replicates are."""
    leading = [r.leading for r in node.replicas.values() if r.leading]
    offline = sum(1 for r in node.replicas.values() if r.leader == NO_BROKER)
    return m.StatusResponse(
        broker=node.broker,
        epoch=node.epoch,
        fenced=not node.is_live,
        pid=os.getpid(),
        uptime_ms=uptime_ms,
        controller=node.controller_id,
        term=term,
        index=node.state.index,
        voting=voting,
        partitions=len(node.replicas),
        leading=len(leading),
        under_replicated=sum(1 for leader in leading if len(leader.isr) < len(leader.replicas)),
        offline=offline,
        bad_frames=bad_frames,
    )
