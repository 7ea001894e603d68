"""Without the rules of disk and restart (D)."""

from __future__ import annotations

from typing import Any

from tests.sim.mutations.registry import Put, mutation
from zmqueue.broker.executor import Executor
from zmqueue.core import commands as c
from zmqueue.core import effects as e
from zmqueue.core.metadata import ClusterState
from zmqueue.core.node import Node
from zmqueue.log.partition_log import PartitionLog
from zmqueue.log.session import DataFolder
from zmqueue.log.ticket import FlushTicket


@mutation("D1", among="forgetful")
def unclean_session_not_told(put: Put) -> None:
    read_session = DataFolder._read_session

    def _read_session(self: Any) -> None:
        read_session(self)
        self.unclean = False

    put(DataFolder, "_read_session", _read_session)
    put(Node, "_on_registered", _without_reports(Node._on_registered))


def _without_reports(on_registered: Any) -> Any:
    def _on_registered(self: Any, epoch: int, now_ms: int) -> list[e.Effect]:
        lost, self.on_lost = self.on_lost, lambda key: None
        try:
            return list(on_registered(self, epoch, now_ms))
        finally:
            self.on_lost = lost
            self._reporting.clear()

    return _on_registered


@mutation("D1")
def rolled_back_folder_not_noticed(put: Put) -> None:
    register = ClusterState._register

    def _register(self: Any, command: c.Register) -> int:
        known = self.brokers.get(command.broker)
        if known is not None and known.incarnation not in command.previous and command.previous:
            fields = {name: getattr(command, name) for name in command.__struct_fields__}
            command = c.Register(**{**fields, "previous": [*command.previous, known.incarnation]})
        return register(self, command)

    put(ClusterState, "_HANDLERS", {**ClusterState._HANDLERS, c.Register: _register})


@mutation("D3")
def failed_append_goes_on(put: Put) -> None:
    """What could not be written is published all the same, and acknowledged by whoever could."""

    def _publish(self: Any, effect: e.Publish) -> None:
        self._peers.publish(effect, self._node.epoch)

    put(Executor, "_publish", _publish)


@mutation("D4", among="deposed")
def flush_of_another_generation_counts(put: Put) -> None:
    flushed = PartitionLog.flushed

    def _flushed(self: Any, ticket: FlushTicket) -> bool:
        ticket.generation = self.generation
        ticket.end = min(ticket.end, self.log_end)
        return flushed(self, ticket)

    put(PartitionLog, "flushed", _flushed)


@mutation("D4")
def folders_are_not_synced(put: Put) -> None:
    def sync(self: Any) -> None:
        for file in self.files:
            file.sync()
        self.synced = True

    put(FlushTicket, "sync", sync)
