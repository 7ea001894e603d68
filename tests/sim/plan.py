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
    "hold": 2,  # what a broker proposes is committed late
    "mute": 2,  # what a broker proposes is lost
    "fence": 3,  # a healthy broker is taken for dead
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
    "hold_leader": 4,
    "fence": 4,
    "fence_leader": 4,
}

# Leaders that are replaced and do not hear of it for long, while clients go on asking them.
ZOMBIES: dict[str, int] = {"cut_leader": 6, "stale_leader": 4, "pause_leader": 2, "fence_leader": 2, "raft": 1}

# Machines that lose what they acknowledged: syncs come late or never, and the power fails.
FORGETFUL: dict[str, int] = {"power": 8, "power_leader": 8, "crash": 2, "kill": 2, "fence": 2, "slow": 2}

# Proposals under way for long, while the brokers that they name are fenced, come back, or lose their disks.
HELD: dict[str, int] = {
    "hold_leader": 4,
    "mute_leader": 8,
    "hold": 2,
    "fence": 5,
    "wipe": 8,
    "kill": 2,
    "slow": 8,
    "cut": 1,
    "raft": 1,
}

# Leaders that are deposed in the middle of a slow sync: what they hold alone is cut away while it is being synced.
DEPOSED: dict[str, int] = {"slow_leader": 8, "fence_leader": 8, "prefer": 4, "cut_leader": 4, "power": 2}


# Which schedules have a character of their own, by the last part of their seed. The others have a bit of everything.
PROFILES: dict[int, str] = {
    **dict.fromkeys(range(0, 24, 3), "churn"),
    1: "zombies",
    7: "forgetful",
    10: "held",
    13: "deposed",
    19: "held",
}


def profile_of(seed: int) -> str:
    return PROFILES.get(seed % 24, "mixed")


def make(seed: int) -> Plan:
    chance = Random(seed * 2 + 1)
    plan = _make(seed, chance)
    shape = _SHAPES.get(profile_of(seed))
    if shape is not None:
        shape(plan, chance)
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


def _zombies(plan: Plan, chance: Random) -> None:
    """Long enough for a lease to end, with clients to whom that matters."""
    plan.duration_ms = 3_200
    plan.drop = 0.0
    for producer in plan.producers:
        producer.acks, producer.pace_ms, producer.batches = 1, 120, 24
    plan.faults = _faults(chance, ZOMBIES, chance.randint(1, 2), plan, (2_000, 3_000))
    for fault in plan.faults:
        fault.at_ms //= 4


def _forgetful(plan: Plan, chance: Random) -> None:
    plan.fsync = chance.choice(("interval", "os", "os"))
    for topic in plan.topics:
        topic.storage, topic.min_insync = "disk", min(2, topic.replication_factor)
    plan.faults = _faults(chance, FORGETFUL, chance.randint(1, 4), plan, (60, 150, 400))


def _held(plan: Plan, chance: Random) -> None:
    plan.brokers = max(3, plan.topics[0].replication_factor)
    for topic in plan.topics:
        topic.storage = "disk"
    for producer in plan.producers:
        producer.pace_ms = chance.choice((20, 60))
    plan.faults = _faults(chance, HELD, chance.randint(4, 8), plan, (30, 80, 300, 700))


def _deposed(plan: Plan, chance: Random) -> None:
    plan.fsync = "always"
    plan.brokers = max(3, plan.topics[0].replication_factor)
    for topic in plan.topics:
        topic.storage = "disk"
    for producer in plan.producers:
        producer.window, producer.pace_ms, producer.batches = 5, chance.choice((5, 20)), 24
    plan.faults = _faults(chance, DEPOSED, chance.randint(4, 8), plan, (150, 400, 900))


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


_SHAPES = {"churn": _churn, "zombies": _zombies, "forgetful": _forgetful, "held": _held, "deposed": _deposed}
