"""Raft as a black box that keeps its promise: a committed command is never lost, and all apply in the same order.

Everything it does not promise happens: proposals are lost, doubled, committed although the proposer was told that they
failed, committed late; the leader changes; a leader that was replaced believes in itself for a while; brokers apply
late and several commands at once; a broker that lags receives a snapshot instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zmqueue.core.cluster import Applied
from zmqueue.core.metadata import ClusterState
from zmqueue.model import NO_BROKER

if TYPE_CHECKING:
    from tests.sim.broker import SimBroker
    from tests.sim.world import World

BELIEF_MS = 400  # how long a broker that hears nobody keeps its idea of who leads


class SimRaft:
    def __init__(self, world: World) -> None:
        self._world = world
        self.entries: list[bytes] = []
        self.truth = ClusterState()  # everything committed, applied
        self.leader = NO_BROKER
        self.term = 0
        self.calm = False  # from now on it does what one hopes for
        self.stale: set[int] = set()  # brokers that apply late
        self.held_until: dict[int, int] = {}  # brokers whose proposals are committed late
        self.mute_until: dict[int, int] = {}  # brokers whose proposals are lost
        self._snapshot = (0, b"")
        self._lost_ms = -1_000  # one is chosen at once

    # -- who leads

    def _reaches_majority(self, broker: SimBroker) -> bool:
        world = self._world
        near = world.running
        if world.network.cuts:
            near = sum(other.alive and world.network.connected(broker.id, other.id) for other in world.brokers)
        return broker.alive and not broker.paused and near * 2 > len(world.brokers)

    def _has_majority(self) -> bool:
        """Whether somebody leads who can commit."""
        return self.leader != NO_BROKER and self._reaches_majority(self._world.brokers[self.leader])

    def depose(self) -> None:
        self.leader = NO_BROKER
        self._lost_ms = self._world.now

    def watch(self) -> None:
        """Now and then: a leader that lost its majority is replaced, after a while, by somebody who has one."""
        world = self._world
        if self.leader != NO_BROKER and not self._has_majority():
            self.depose()
        if self.leader == NO_BROKER and world.now - self._lost_ms >= 100:
            fit = [broker for broker in world.brokers if self._reaches_majority(broker)]
            if fit:
                self.leader = fit[int(world.random() * len(fit))].id
                self.term += 1
                world.note(None, "raft leader", self.leader)
        world.at(80 + int(world.random() * 80), None, None, self.watch, ())

    def view(self, broker: SimBroker) -> tuple[int, bool, int]:
        """Who leads, as this broker knows it: leader, whether it is that, term."""
        world = self._world
        if self.leader != NO_BROKER and world.network.connected(broker.id, self.leader):
            broker.raft_view = (self.leader, self.leader == broker.id, self.term)
            broker.raft_heard_ms = world.now
        elif world.now - broker.raft_heard_ms > BELIEF_MS:
            broker.raft_view = (NO_BROKER, False, broker.raft_view[2])
        return broker.raft_view

    # -- proposals

    def propose(self, broker: SimBroker, data: bytes) -> None:
        world = self._world
        random = world.random
        reaches = self.leader != NO_BROKER and world.network.connected(broker.id, self.leader)
        if self.mute_until.get(broker.id, 0) > world.now:
            return
        trouble = 0.0 if self.calm else world.plan.raft_trouble
        luck = random()
        if not reaches or luck < trouble:
            if random() < 0.7:
                broker.later(5 + int(random() * 100), broker.on_unsure, data)
            return
        delay_ms = 1 + int(random() * 6)
        if self.held_until:
            delay_ms += max(0, self.held_until.get(broker.id, 0) - world.now)
        world.at(delay_ms, None, None, self._commit, (broker, broker.life, data, self.term, luck > 2 * trouble))
        if luck > 1 - trouble:
            world.at(int(random() * 800), None, None, self._commit, (broker, broker.life, data, self.term, True))

    def _commit(self, broker: SimBroker, life: int, data: bytes, term: int, honest: bool) -> None:
        world = self._world
        if not self._has_majority() or (self.term != term and world.random() < 0.5):
            # A proposal under way when the leader changes may or may not have reached a majority.
            world.at(20, broker, life, broker.on_unsure, (data,))
            return
        self.entries.append(data)
        applied = self.truth.apply(data)
        world.checker.on_state(self.truth, "the truth")
        world.on_committed(applied)
        if not honest:
            world.at(1, broker, life, broker.on_unsure, (data,))
        for other in world.brokers:
            if other.alive:
                self.wake(other)

    # -- applying

    def wake(self, broker: SimBroker) -> None:
        if not broker.applying:
            broker.applying = True
            random = self._world.random
            late = broker.id in self.stale
            broker.later(int(100 + random() * 900) if late else 1 + int(random() * 5), self._apply, broker)

    def _apply(self, broker: SimBroker) -> None:
        world = self._world
        broker.applying = False
        state, end = broker.state, len(self.entries)
        if not self._reaches_majority(broker) or state.index >= end:
            return
        news: list[Applied | None] = []
        if end - state.index > 4 and world.random() < 0.1:
            self._become(broker, self.truth.encode())
            news.append(None)
        elif end - state.index > 1 and world.random() < 0.2:
            end = state.index + 1
        while state.index < end:
            news.append(state.apply(self.entries[state.index]))
            world.checker.on_state(state, broker)
        broker.on_news(news)
        if state.index < len(self.entries):
            self.wake(broker)

    def install(self, broker: SimBroker) -> None:
        """A snapshot instead of what it lacks."""
        if broker.state.index < len(self.entries):
            self._become(broker, self.truth.encode())
            broker.on_news([None])

    def restore(self, broker: SimBroker) -> None:
        """What a process finds in its Raft folder when it starts."""
        if len(self.entries) - self._snapshot[0] > 8:
            self._snapshot = len(self.entries), self.truth.encode()
        if self._snapshot[0]:
            self._become(broker, self._snapshot[1])

    def _become(self, broker: SimBroker, snapshot: bytes) -> None:
        broker.state.load(snapshot)
        self._world.checker.on_state(broker.state, broker)
