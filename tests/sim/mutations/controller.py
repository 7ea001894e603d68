"""Without the rules of the controller and of the metadata (A)."""

from __future__ import annotations

from typing import Any

from tests.sim.mutations.registry import Put, mutation
from zmqueue.core import commands as c
from zmqueue.core import effects as e
from zmqueue.core.controller import Controller
from zmqueue.core.follower import Follower
from zmqueue.core.metadata import ClusterState
from zmqueue.core.replica import Replica
from zmqueue.model import NO_BROKER


@mutation("A2")
def no_barrier_on_take_over(put: Put) -> None:
    """A new controller acts at once, on what it happens to know."""
    put(Controller, "is_active", property(lambda self: self._term is not None))


@mutation("A3")
def restart_keeps_isr_memory(put: Put) -> None:
    _restart_keeps_isr(put, "memory")


@mutation("A3")
def restart_keeps_isr_disk(put: Put) -> None:
    _restart_keeps_isr(put, "disk")


def _restart_keeps_isr(put: Put, storage: str) -> None:
    register, remove = ClusterState._register, ClusterState._remove

    def keeping(self: Any, key: Any, topic: Any, partition: Any, gone: set[int], *, lost: bool = False) -> None:
        if topic.storage != storage or not getattr(self, "registering", False):
            remove(self, key, topic, partition, gone, lost=lost)

    def registering(self: Any, command: c.Register) -> int:
        self.registering = True
        try:
            return register(self, command)
        finally:
            self.registering = False

    put(ClusterState, "_remove", keeping)
    put(ClusterState, "_HANDLERS", {**ClusterState._HANDLERS, c.Register: registering})


@mutation("A3")
def unclean_stays_in_elr(put: Put) -> None:
    remove = ClusterState._remove
    put(ClusterState, "_remove", lambda *args, lost=False: remove(*args))


@mutation("A5", among="churn")
def no_epoch_check_on_the_wire(put: Put) -> None:
    fetched, push = Follower.on_fetched, Follower.on_push

    def on_ack(self: Any, broker: int, broker_epoch: int, row: Any, now_ms: int) -> list[e.Effect]:
        return self.part.on_ack(broker, broker_epoch, row.durable_end, now_ms) if self.leading else []

    def on_follower_fetch(self: Any, token: Any, fetch: Any, now_ms: int) -> list[e.Effect]:
        if self.leading:
            return self.part.on_fetch(token, fetch, now_ms)
        return [self._reject(token, fetch, 6)]

    def on_fetched(self: Any, response: Any, batches: Any, now_ms: int) -> list[e.Effect]:
        response.leader_epoch = self.epoch
        return fetched(self, response, batches, now_ms)

    def on_push(self: Any, sent: Any, batches: Any, now_ms: int) -> list[e.Effect]:
        sent.leader_epoch, sent.broker = self.epoch, self.leader
        return push(self, sent, batches, now_ms)

    put(Replica, "on_ack", on_ack)
    put(Replica, "on_follower_fetch", on_follower_fetch)
    put(Follower, "on_fetched", on_fetched)
    put(Follower, "on_push", on_push)


@mutation("A6")
def unclean_election(put: Put) -> None:
    elect = ClusterState._elect

    def _elect(self: Any, key: Any, topic: Any, partition: Any) -> None:
        elect(self, key, topic, partition)
        live = [b for b in partition.replicas if self.is_live(b)]
        if partition.leader == NO_BROKER and live:
            partition.isr = live[:1]
            partition.elr = [b for b in partition.elr if b != live[0]]
            self._lead(key, topic, partition, live[0])

    put(ClusterState, "_elect", _elect)


@mutation("A7")
def elr_is_never_emptied(put: Put) -> None:
    def _update_elr(self: Any, topic: Any, partition: Any, removed: Any) -> None:
        complete = (set(partition.elr) | set(removed)) - set(partition.isr)
        partition.elr = [b for b in partition.replicas if b in complete]

    put(ClusterState, "_update_elr", _update_elr)


@mutation("A7")
def no_elr(put: Put) -> None:
    def _update_elr(self: Any, topic: Any, partition: Any, removed: Any) -> None:
        partition.elr = []

    put(ClusterState, "_update_elr", _update_elr)
