"""Mistakes that schedules found, put back."""

from __future__ import annotations

from typing import Any

from tests.sim.mutations.registry import Put, mutation
from zmqueue.broker.executor import Executor
from zmqueue.core import commands as c
from zmqueue.core import effects as e
from zmqueue.core.follower import Follower
from zmqueue.core.log_view import LogView
from zmqueue.core.metadata import ClusterState, LastCommand
from zmqueue.core.node import Node


@mutation("fixed")
def snapshot_leaves_leaders_an_old_table(put: Put) -> None:
    load = ClusterState.load

    def _load(self: Any, data: bytes) -> None:
        self.brokers = dict(self.brokers)
        load(self, data)

    put(ClusterState, "load", _load)


@mutation("fixed")
def follower_that_waited_fenced_is_forgotten(put: Put) -> None:
    unfence = ClusterState._unfence

    def _unfence(self: Any, command: c.Unfence) -> None:
        unfence(self, command)
        led = [key for key in self._applied.partitions if self.partition(key).leader != command.broker]
        for key in led:
            del self._applied.partitions[key]

    put(ClusterState, "_HANDLERS", {**ClusterState._HANDLERS, c.Unfence: _unfence})


@mutation("fixed")
def new_log_is_not_synced(put: Put) -> None:
    on_opened = Node.on_opened

    def _on_opened(self: Any, key: Any, log: LogView, now_ms: int) -> list[e.Effect]:
        return [effect for effect in on_opened(self, key, log, now_ms) if not isinstance(effect, e.Flush)]

    put(Node, "on_opened", _on_opened)


@mutation("fixed")
def appends_behind_a_failed_one(put: Put) -> None:
    append = Executor._append

    def _append(self: Any, effect: e.Append) -> Any:
        failed, self._failed = self._failed, set()
        try:
            return append(self, effect)
        finally:
            self._failed |= failed

    put(Executor, "_append", _append)


@mutation("fixed", among="held")
def late_registration_silences_the_broker(put: Put) -> None:
    apply = ClusterState.apply

    def _apply(self: Any, data: bytes) -> Any:
        applied = apply(self, data)
        envelope = applied.envelope
        if envelope is not None and isinstance(envelope.command, c.Register) and not applied.duplicate:
            last = LastCommand(envelope.broker, envelope.incarnation, envelope.number, applied.outcome)
            self.last_commands[envelope.broker] = last
        return applied

    put(ClusterState, "apply", _apply)


@mutation("fixed", among="deposed")
def truncated_log_is_not_flushed_again(put: Put) -> None:
    put(Follower, "on_truncated", lambda self, now_ms: self._fetch(now_ms))


@mutation("fixed")
def replica_let_go_keeps_its_epoch(put: Put) -> None:
    put(ClusterState, "_lead_anew", lambda self, key, topic, partition: None)
