"""What a schedule is made of: the cluster, the load, the faults. A pure function of the seed.

A plan is plain data, so that a failing one can be made smaller (fewer faults, fewer clients, a shorter time) and run
again. Everything that happens during a run but is not in the plan (delays, losses) is drawn from a generator that is
seeded by the plan's seed too.
"""

from __future__ import annotations

from random import Random

from msgspec import Struct

FAULTS: dict[str, int] = {
    # name: weight
    "kill": 10,
    "power": 8,
    "power_all": 3,
    "kill_leader": 10,
    "power_leader": 6,
    "crash": 8,  # in the middle of writing
    "pause": 7,
    "pause_leader": 5,
    "cut": 8,  # a partition of the network
    "cut_leader": 4,
    "full": 5,
    "slow": 5,
    "broken": 2,  # an fsync fails
    "wipe": 6,
    "rollback": 4,
    "stale": 6,  # metadata arrives late
    "raft": 4,  # the Raft leader loses its office
    "leave": 3,  # a stop by its own will
    "prefer": 3,
    "reassign": 2,
    "snapshot": 2,
}


class Topic(Struct):
    partitions: int
    replication_factor: int
    min_insync: int
    storage: str
    config: dict[str, str] = {}


class Producer(Struct):
    topic: int
    partition: int
    acks: int
    batches: int
    window: int
    pace_ms: int


class Consumer(Struct):
    topic: int
    partition: int


class Fault(Struct):
    at_ms: int
    kind: str
    broker: int
    for_ms: int
    detail: int


class Plan(Struct):
    seed: int
    brokers: int
    fsync: str
    segment_bytes: int
    drop: float
    duplicate: float
    straggle: float  # how many messages take long
    raft_trouble: float  # how many proposals are lost, how many doubled
    duration_ms: int
    heal_after_ms: int
    topics: list[Topic]
    producers: list[Producer]
    consumers: list[Consumer]
    faults: list[Fault]


# Few brokers, many short faults, bad connections: an ISR that never comes to rest.
CHURN: dict[str, int] = {
    "wipe": 8,
    "kill": 4,
    "kill_leader": 4,
    "power_leader": 4,
    "pause": 4,
    "pause_leader": 6,
    "stale": 8,
    "slow": 8,
    "cut": 6,
    "full": 6,
    "prefer": 4,
    "raft": 4,
    "snapshot": 2,
}


def make(seed: int) -> Plan:
    chance = Random(seed * 2 + 1)
    plan = _make(seed, chance)
    if seed % 3 == 0:
        _churn(plan, chance)
    if seed % 5 in (1, 4):
        _forget(plan, Random(seed * 2 + 7))
    return plan


def _forget(plan: Plan, chance: Random) -> None:
    """Topics that do not keep everything: retention, segments that end by age, records deleted on demand."""
    for topic in plan.topics:
        topic.config = {
            "retention.bytes": chance.choice(("-1", "0", "300", "900")),
            "segment.ms": chance.choice(("100", "400", "1000000")),
        }
    for _ in range(chance.choice((0, 1, 3))):
        at_ms = chance.randint(50, plan.duration_ms)
        plan.faults.append(Fault(at_ms, "delete", 0, 0, chance.getrandbits(30)))
    plan.faults.sort(key=lambda fault: fault.at_ms)


def _churn(plan: Plan, chance: Random) -> None:
    plan.brokers = max(3, plan.topics[0].replication_factor)
    plan.drop, plan.duplicate, plan.straggle = chance.choice((0.0, 0.1)), 0.1, 0.15
    plan.raft_trouble = 0.25
    plan.faults = _faults(chance, CHURN, chance.randint(3, 8), plan, (30, 80, 200, 500))


def _faults(chance: Random, kinds: dict[str, int], count: int, plan: Plan, lengths: tuple[int, ...]) -> list[Fault]:
    faults = []
    names, weights = list(kinds), list(kinds.values())
    for _ in range(count):
        kind = chance.choices(names, weights)[0]
        at_ms = chance.randint(50, plan.duration_ms)
        broker = chance.randrange(plan.brokers)
        faults.append(Fault(at_ms, kind, broker, chance.choice(lengths), chance.getrandbits(30)))
    return sorted(faults, key=lambda fault: fault.at_ms)


def _make(seed: int, chance: Random) -> Plan:
    factor = chance.choice((2, 2, 2, 3, 3, 4, 5))
    brokers = 5 if chance.random() < 0.4 else max(3, factor)
    topics = []
    for _ in range(2 if chance.random() < 0.2 else 1):
        storage = "memory" if chance.random() < 0.15 else "disk"
        floor = 2 if storage == "memory" or (factor > 2 and chance.random() < 0.7) else 1
        if chance.random() < 0.2:
            floor = min(2, factor)
        topics.append(Topic(chance.choice((1, 1, 1, 2)), factor, floor, storage))
    duration_ms = chance.choice((1_200, 1_800, 2_500))
    producers = []
    for _ in range(chance.choice((1, 2, 2, 3))):
        at = chance.randrange(len(topics))
        acks = 1 if chance.random() < 0.15 else -1
        partition = chance.randrange(topics[at].partitions)
        batches, window = chance.randint(6, 16), chance.randint(1, 5)
        producers.append(Producer(at, partition, acks, batches, window, chance.choice((5, 20, 60, 120))))
    consumers = [Consumer(p.topic, p.partition) for p in producers[:1]]
    plan = Plan(
        seed=seed,
        brokers=brokers,
        fsync=chance.choices(("always", "interval", "os"), (8, 1, 1))[0],
        segment_bytes=chance.choice((300, 1_000, 100_000)),
        drop=chance.choice((0.0, 0.0, 0.02, 0.08, 0.2)),
        duplicate=chance.choice((0.0, 0.02, 0.08)),
        straggle=chance.choice((0.0, 0.02, 0.1)),
        raft_trouble=0.05,
        duration_ms=duration_ms,
        heal_after_ms=chance.choice((700, 10_000, 10_000)),
        topics=topics,
        producers=producers,
        consumers=consumers,
        faults=[],
    )
    plan.faults = _faults(chance, FAULTS, chance.randint(1, 6), plan, (60, 150, 400, 900, 1_500))
    return plan
