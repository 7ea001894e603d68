"""Small worlds for the tests of core: a cluster made by commands, a leader, a follower, a whole node, their messages.

Broker 1 leads and broker 2 is the first follower unless a test says otherwise; every broker is in its first life.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from zmqueue.config import Config, ReplicationConfig
from zmqueue.core import commands as c
from zmqueue.core.cluster import Applied, BrokerState, PartitionState, TopicState
from zmqueue.core.effects import Effect, Propose
from zmqueue.core.epochs import Epochs
from zmqueue.core.follower import Follower
from zmqueue.core.leader import Leader
from zmqueue.core.lease import Lease
from zmqueue.core.log_view import LogView
from zmqueue.core.metadata import ClusterState
from zmqueue.core.node import Node
from zmqueue.core.producers import Producers
from zmqueue.model import PartitionKey
from zmqueue.wire.batch import Batch, encode
from zmqueue.wire.messages import AckRow, Acks, Heartbeat, Push, ReplicaFetchRequest, ReplicaFetchResponse

CLUSTER_ID = "c"
TOPIC_ID = b"t" * 16
KEY = PartitionKey(TOPIC_ID, 0)
REF = c.PartitionRef(TOPIC_ID, 0)
EPOCH = 5
CONFIG = ReplicationConfig()
LATER_MS = 1 << 40  # a deadline that no test reaches

E = TypeVar("E", bound=Effect)


def of(kind: type[E], effects: Iterable[Effect]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def kinds(effects: Iterable[Effect]) -> list[type[Effect]]:
    return [type(effect) for effect in effects]


# -- batches and logs --------------------------------------------------------------------------------------------


def batch(
    offset: int = -1, records: int = 1, epoch: int = -1, *, pid: int = -1, pepoch: int | None = None, sequence: int = -1
) -> Batch:
    """As a producer sends it, or, with offset and epoch, as it stands in a log."""
    producer_epoch = pepoch if pepoch is not None else (0 if pid >= 0 else -1)
    made = encode([b"v"] * records, producer_id=pid, producer_epoch=producer_epoch, base_sequence=sequence)
    made.header.base_offset, made.header.leader_epoch = offset, epoch
    return made


def records(first: int, end: int, epoch: int = EPOCH) -> list[Batch]:
    return [batch(offset, 1, epoch) for offset in range(first, end)]


def log_of(*ends: tuple[int, int], log_start: int = 0, durable_end: int | None = None, hw: int = 0) -> LogView:
    """A log from (epoch, exclusive end of that epoch) pairs; durable as a whole unless told."""
    entries, at = [], log_start
    for epoch, end in ends:
        entries.append((epoch, at))
        at = end
    return LogView(log_start, at, at if durable_end is None else durable_end, Epochs(entries), Producers(), hw)


# -- metadata ----------------------------------------------------------------------------------------------------


def registration(broker: int, life: int = 1, **changes: Any) -> c.Register:
    """The n-th life of a broker, whose data folder remembers all the lives before."""
    fields: dict[str, Any] = {
        "broker": broker,
        "incarnation": broker * 1000 + life,
        "previous": [broker * 1000 + n for n in range(1, life)],
        "dir_id": b"dir%d" % broker,
        "host": "127.0.0.1",
        "client_port": 9000 + broker,
        "push_port": 9100 + broker,
        "peer_port": 9200 + broker,
        "unclean": False,
    }
    return c.Register(**(fields | changes))


class Cluster:
    """A ClusterState that is fed commands as their brokers would propose them."""

    def __init__(self, brokers: Sequence[int] = (1, 2, 3)) -> None:
        self.state = ClusterState()
        self.numbers: dict[int, int] = {}
        self.incarnations: dict[int, int] = {}
        for broker in brokers:
            self.start(broker)

    def envelope(self, command: Any, by: int) -> bytes:
        if isinstance(command, c.Register) and command.broker == by:
            self.incarnations[by] = command.incarnation
        self.numbers[by] = self.numbers.get(by, 0) + 1
        return c.encode(c.Envelope(by, self.incarnations.get(by, 0), self.numbers[by], command))

    def do(self, command: Any, by: int | None = None) -> Applied:
        return self.state.apply(self.envelope(command, self.proposer(command) if by is None else by))

    def proposer(self, command: Any) -> int:
        """The broker that a command is about, else any."""
        broker = getattr(command, "broker", None)
        return next(iter(self.incarnations)) if broker is None else broker

    def register(self, broker: int, life: int = 1, **changes: Any) -> Applied:
        return self.do(registration(broker, life, **changes))

    def unfence(self, broker: int) -> Applied:
        return self.do(c.Unfence(broker, self.state.brokers[broker].epoch))

    def start(self, broker: int, life: int = 1, **changes: Any) -> None:
        self.register(broker, life, **changes)
        self.unfence(broker)

    def fence(self, *brokers: int) -> Applied:
        proposer = next(b for b in self.incarnations if b not in brokers or len(brokers) == len(self.incarnations))
        return self.do(c.Fence([c.BrokerRef(b, self.state.brokers[b].epoch) for b in brokers]), proposer)

    def topic(
        self,
        replicas: Sequence[int] = (1, 2, 3),
        *,
        min_insync: int = 1,
        storage: str = "disk",
        isr: Sequence[int] | None = None,
        elr: Sequence[int] = (),
    ) -> PartitionState:
        """One topic of one partition on these brokers, the first of them leading in EPOCH."""
        partition = PartitionState(list(replicas), replicas[0], EPOCH, 0, list(isr or replicas), list(elr))
        topic = TopicState("t", TOPIC_ID, len(replicas), min_insync, storage, {}, [partition])
        self.state.topics[TOPIC_ID] = topic
        self.state.names["t"] = TOPIC_ID
        return partition

    @property
    def partition(self) -> PartitionState:
        found = self.state.partition(KEY)
        assert found is not None
        return found

    def refs(self, *brokers: int) -> list[c.BrokerRef]:
        return [c.BrokerRef(b, self.state.brokers[b].epoch) for b in brokers]

    def change(self, *isr: int) -> c.IsrChange:
        p = self.partition
        return c.IsrChange(TOPIC_ID, 0, p.leader_epoch, p.partition_epoch, self.refs(*isr))

    def alter_isr(self, *isr: int, by: int | None = None) -> Applied:
        leader = self.partition.leader if by is None else by
        return self.do(c.AlterIsr(leader, self.state.brokers[leader].epoch, [self.change(*isr)]))


def check_invariants(state: ClusterState) -> None:
    """Those of metadata.py's docstring that one state can show."""
    for broker in state.brokers.values():
        assert broker.id >= 0
    for key, topic, p in state.all_partitions():
        where = (topic.name, key.partition, p)
        assert len(set(p.replicas)) == len(p.replicas), where
        assert p.replicas, where
        assert set(p.isr) <= set(p.replicas), where
        assert set(p.elr) <= set(p.replicas), where
        assert set(p.isr).isdisjoint(p.elr), where
        assert len(set(p.isr)) == len(p.isr), where
        assert p.leader == -1 or p.leader in p.isr, where
        assert all(state.is_live(b) for b in p.isr), where
        assert not p.elr or len(p.isr) < topic.min_insync_replicas, where
        assert p.leader != -1 or not p.isr, where
        assert p.leader != -1 or not any(state.is_live(b) for b in p.elr), where
        assert set(p.lost).isdisjoint([*p.isr, *p.elr]), where
        assert set(p.adding) <= set(p.replicas), where
        assert set(p.removing) <= set(p.replicas), where
    assert {t.name: t.topic_id for t in state.topics.values()} == state.names


# -- one partition -----------------------------------------------------------------------------------------------


def broker_state(broker: int, epoch: int = 1, fenced: bool = False) -> BrokerState:
    return BrokerState(broker, epoch, fenced, False, b"", broker, [], "h", 1, 2, 3, 0)


def partition_state(
    isr: Iterable[int], replicas: Iterable[int] | None = None, *, leader: int = 1, epoch: int = EPOCH, version: int = 7
) -> PartitionState:
    members = sorted(isr)
    return PartitionState(sorted(replicas or members), leader, epoch, version, members)


def leading(
    isr: Iterable[int] = (1, 2, 3),
    log_end: int = 0,
    *,
    replicas: Iterable[int] | None = None,
    min_insync: int = 1,
    log: LogView | None = None,
    brokers: dict[int, BrokerState] | None = None,
    now_ms: int = 0,
) -> Leader:
    """Broker 1 as leader in EPOCH, with a lease from now on; its log was written in earlier epochs."""
    partition = partition_state(isr, replicas)
    lease = Lease(CONFIG)
    lease.grant(now_ms)
    if log is None:
        log = log_of((EPOCH - 1, log_end)) if log_end else log_of()
    known = brokers if brokers is not None else {b: broker_state(b) for b in partition.replicas}
    return Leader(KEY, 1, log, partition, min_insync, known, lease, CONFIG, now_ms)


def produce(
    leader: Leader, count: int = 1, *, acks: int = -1, token: Any = "p", now_ms: int = 0, **header: Any
) -> list[Effect]:
    return leader.on_produce(token, batch(records=count, **header), acks, LATER_MS, now_ms)


def flush(leader: Leader, now_ms: int = 0) -> list[Effect]:
    """All that is appended is durable now."""
    leader.log.durable_end = leader.log.log_end
    return leader.on_flushed(now_ms)


def fetch(
    replica: int = 2,
    log_end: int = 0,
    last_epoch: int = -1,
    *,
    durable_end: int | None = None,
    broker_epoch: int = 1,
    leader_epoch: int = EPOCH,
    fetch_id: int = 1,
) -> ReplicaFetchRequest:
    durable = log_end if durable_end is None else durable_end
    return ReplicaFetchRequest(
        CLUSTER_ID, replica, broker_epoch, *KEY, leader_epoch, fetch_id, log_end, last_epoch, durable, 1 << 20
    )


def following(log: LogView | None = None, *, broker_epoch: int = 1, epoch: int = EPOCH, now_ms: int = 0) -> Follower:
    """Broker 2, which follows broker 1 and has just sent its first fetch."""
    follower = Follower(KEY, 2, broker_epoch, CLUSTER_ID, log or log_of(), 1, epoch, CONFIG)
    follower.begin(now_ms)
    return follower


def answer(
    follower: Follower,
    batches: Sequence[Batch] = (),
    *,
    log_end: int | None = None,
    hw: int = 0,
    log_start: int = 0,
    first_offset: int | None = None,
    before: tuple[int, bytes] = (-1, b""),
    diverged: tuple[int, int] | None = None,
    error: int = 0,
    fetch_id: int | None = None,
    epoch: int | None = None,
    now_ms: int = 0,
) -> list[Effect]:
    """The leader's answer to the newest fetch (or to another one) reaches the follower."""
    end = log_end if log_end is not None else (batches[-1].header.next_offset if batches else follower.log.log_end)
    response = ReplicaFetchResponse(
        *KEY,
        fetch_id=follower._fetch_id if fetch_id is None else fetch_id,
        leader_epoch=follower.epoch if epoch is None else epoch,
        error=error,
        high_watermark=hw,
        log_start=log_start,
        log_end=end,
        first_offset=log_start if first_offset is None else first_offset,
        start_epoch=before[0],
        producers=before[1],
    )
    if diverged is not None:
        response.diverged_epoch, response.diverged_end = diverged
    return follower.on_fetched(response, list(batches), now_ms)


def established(log: LogView | None = None, **options: Any) -> Follower:
    """A follower whose first fetch found both logs in agreement."""
    follower = following(log, **options)
    answer(follower)
    assert follower.established
    return follower


def push(
    batches: Sequence[Batch],
    prev_epoch: int,
    *,
    hw: int = 0,
    epoch: int = EPOCH,
    leader: int = 1,
    base: int | None = None,
) -> Push:
    base_offset = batches[0].header.base_offset if base is None else base
    return Push(CLUSTER_ID, leader, 1, epoch, base_offset, prev_epoch, hw, batches[-1].header.next_offset)


# -- a node ------------------------------------------------------------------------------------------------------


class World:
    """One node, the cluster's state and the commands of everybody; what the node proposes is committed at once."""

    def __init__(self, broker: int = 1, others: Sequence[int] = (2, 3), **changes: Any) -> None:
        self.cluster = Cluster(others)
        self.node = Node(CLUSTER_ID, registration(broker, **changes), self.cluster.state, Config())
        self.now_ms = 0
        self.proposed: list[bytes] = []

    def apply(self, data: bytes) -> list[Effect]:
        return self.node.on_applied(self.cluster.state.apply(data), self.now_ms)

    def do(self, command: Any, by: int | None = None) -> list[Effect]:
        """A command of another broker is committed, and the node hears of it."""
        return self.apply(self.cluster.envelope(command, self.cluster.proposer(command) if by is None else by))

    def step(self, after_ms: int = 0) -> list[Effect]:
        """One turn. What it proposes is kept, not committed."""
        self.now_ms += after_ms
        effects = self.node.step(self.now_ms)
        self.proposed += [effect.data for effect in of(Propose, effects)]
        return effects

    def commit(self) -> list[Effect]:
        """Commit all that is proposed, and what follows from it, until nothing is left."""
        effects: list[Effect] = []
        while self.proposed:
            effects += self.apply(self.proposed.pop(0))
            effects += self.step()
        return effects

    def turn(self, after_ms: int = 0) -> list[Effect]:
        return self.step(after_ms) + self.commit()

    def wishes(self) -> list[Any]:
        """The commands proposed and not yet committed."""
        return [c.decode(data).command for data in self.proposed]

    def live(self) -> list[Effect]:
        """Register and be unfenced by the controller, broker 2."""
        self.node.on_raft(2, False, 1, self.now_ms)
        effects = self.turn()
        return effects + self.do(c.Unfence(self.node.broker, self.node.epoch), by=2)

    def heartbeat(self, broker: int, *, epoch: int | None = None, index: int | None = None) -> bool:
        """A heartbeat of another broker reaches the node; whether it is answered with ok."""
        state = self.cluster.state
        known = state.brokers[broker].epoch if epoch is None else epoch
        applied = state.index if index is None else index
        return self.node.on_heartbeat(Heartbeat(CLUSTER_ID, broker, known, applied, 0), self.now_ms).ok

    def ack(self, broker: int, end: int, *, leader_epoch: int | None = None) -> list[Effect]:
        epoch = self.cluster.partition.leader_epoch if leader_epoch is None else leader_epoch
        known = self.cluster.state.brokers[broker].epoch
        return self.node.on_acks(Acks(CLUSTER_ID, broker, known, [AckRow(*KEY, epoch, end)]), self.now_ms)
