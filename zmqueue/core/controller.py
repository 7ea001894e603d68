"""What the broker that leads the Raft group does for the cluster: who is alive, and what to heal.

It only asks; what follows is decided when its commands are applied. It holds no truth, so it can be replaced at any
moment. On taking over it first commits a barrier, so that it has seen everything decided before, and then gives every
broker a full session before it calls one dead; only a broker whose connection is closed is called dead sooner. Mostly
that is the one that was the controller before: how long its connection has been closed then counts as its silence.

Fencing a healthy broker is always safe for committed records; it costs an election.
"""

from __future__ import annotations

from zmqueue.config import RaftConfig, ReplicationConfig
from zmqueue.core.commands import AnyCommand, Barrier, BrokerRef, Command, Digest, Fence, Heal, PartitionRef, Unfence
from zmqueue.core.metadata import ClusterState
from zmqueue.model import PartitionKey
from zmqueue.wire.messages import Heartbeat

HEAL_SCAN_MS = 1_000


class Controller:
    def __init__(self, broker: int, state: ClusterState, config: ReplicationConfig, raft: RaftConfig) -> None:
        self.broker = broker
        self._state = state
        self._config = config
        self._raft = raft
        self._term: int | None = None  # the Raft term we lead in
        self._settled = False  # the barrier of this term is applied
        self._heard_ms: dict[int, int] = {}
        self._down_ms: dict[int, int] = {}  # brokers to which no connection stands, since when
        self._short_since: dict[PartitionKey, int] = {}
        self._heal_scan_ms = 0
        self._digest_ms = 0

    @property
    def is_active(self) -> bool:
        return self._term is not None and self._settled

    def on_raft(self, leads: bool, term: int, now_ms: int) -> list[AnyCommand]:
        """Called when Raft leadership or term may have changed."""
        if not leads:
            self._term = None
            self._settled = False
            return []
        if self._term == term:
            return []
        self._term = term
        self._settled = False
        self._restart_timers(now_ms)
        return [Barrier(term)]

    def on_own_command(self, command: Command, now_ms: int) -> None:
        """A command of this broker was applied here."""
        if isinstance(command, Barrier) and command.term == self._term and not self._settled:
            self._settled = True
            self._restart_timers(now_ms)

    def _restart_timers(self, now_ms: int) -> None:
        self._heard_ms = {broker: self._down_ms.get(broker, now_ms) for broker in self._state.brokers}
        self._short_since.clear()
        self._digest_ms = now_ms + self._raft.digest_ms

    def on_link(self, broker: int, up: bool, now_ms: int) -> None:
        """The connection to a broker was made or lost."""
        if up:
            self._down_ms.pop(broker, None)
        else:
            self._down_ms.setdefault(broker, now_ms)

    def on_heartbeat(self, heartbeat: Heartbeat, now_ms: int) -> tuple[bool, list[AnyCommand]]:
        """Whether the sender may go on believing what it believes; and what to ask for on its behalf."""
        known = self._state.brokers.get(heartbeat.broker)
        if known is None or known.epoch != heartbeat.broker_epoch:
            return False, []
        # One that is heard only now may have been under way when its sender died. A later one came from a broker that
        # lives, and reaches us although we do not reach it.
        if now_ms - self._down_ms.get(known.id, now_ms) > self._config.silence_ms:
            del self._down_ms[known.id]
        if not self.is_active:
            return False, []
        self._heard_ms[known.id] = now_ms
        if heartbeat.index < known.registered_index:
            # It was fenced and does not know it yet: with a lease it would go on as the leader it no longer is.
            return False, []
        return True, [Unfence(known.id, known.epoch)] if known.fenced and not known.leaving else []

    def on_stall(self, now_ms: int) -> None:
        """This process did not run for a while: nobody is late on account of that."""
        self._heard_ms = dict.fromkeys(self._heard_ms, now_ms)

    def tick(self, now_ms: int) -> list[AnyCommand]:
        if not self.is_active:
            return []
        return [*self._fence(now_ms), *self._heal(now_ms), *self._digest(now_ms)]

    def _fence(self, now_ms: int) -> list[AnyCommand]:
        dead = []
        for broker in self._state.brokers.values():
            if broker.fenced:
                continue
            limit_ms = self._config.silence_ms if broker.id in self._down_ms else self._config.session_ms
            if now_ms - self._heard_ms.setdefault(broker.id, now_ms) > limit_ms:
                dead.append(BrokerRef(broker.id, broker.epoch))
        return [Fence(dead)] if dead else []

    def _heal(self, now_ms: int) -> list[AnyCommand]:
        """A partition that has missed a live replica for long gets another one, if there is a broker to spare."""
        if now_ms < self._heal_scan_ms:
            return []
        self._heal_scan_ms = now_ms + HEAL_SCAN_MS
        state = self._state
        short: dict[PartitionKey, int] = {}
        asks: list[AnyCommand] = []
        live = set(state.live_brokers())
        for key, topic, partition in state.all_partitions():
            if not state.is_short(topic, partition):
                continue
            since = short[key] = self._short_since.get(key, now_ms)
            if now_ms - since > self._config.heal_after_ms and not live.issubset(partition.replicas):
                asks.append(Heal(PartitionRef(*key), partition.partition_epoch))
        self._short_since = short
        return asks

    def _digest(self, now_ms: int) -> list[AnyCommand]:
        if now_ms < self._digest_ms:
            return []
        self._digest_ms = now_ms + self._raft.digest_ms
        return [Digest(*self._state.mark())]
