"""What faults share: how victims are chosen, what is noted, and when damage to disks is allowed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from chaos.cluster import Cluster
from chaos.history import INVOKE, Recorder
from chaos.workload import key

HARNESS = 900  # the process that faults have in the history


def nothing() -> None:
    """For faults that take themselves back."""


class Hit(NamedTuple):
    text: str
    keys: list[str]
    undo: Callable[[], None]
    repetitions: int = 1  # of what is done by the dozen: bits flipped, inputs sent


class Window(NamedTuple):
    """A time whose latencies are compared: those under pressure with those of calm."""

    calm: bool
    begin_s: float
    end_s: float
    keys: frozenset[str] = frozenset()  # empty: all


class Plan(NamedTuple):
    """What faults must know of the run that they are part of."""

    topics: list[str]
    seconds: float = 60.0
    loses_unsynced: bool = False  # fsync does not precede acknowledgements: a power cut ends an era
    fsync_delay_ms: int = 0


class FaultBase:
    def __init__(self, cluster: Cluster, recorder: Recorder, rng: random.Random, plan: Plan) -> None:
        self.cluster = cluster
        self.rng = rng
        self.topics = plan.topics
        self.measures: dict[str, float] = {}
        self.windows: list[Window] = []
        self._recorder = recorder
        self._plan = plan
        for broker in range(cluster.brokers):
            cluster.delay_fsync(broker, plan.fsync_delay_ms)

    def _begin(self, text: str, keys: list[str]) -> None:
        self._recorder.add(HARNESS, INVOKE, "fault", x=text, ks=keys)

    def _measure(self, name: str, value: float) -> None:
        """The worst of a run is what counts."""
        self.measures[name] = max(value, self.measures.get(name, value))

    def _start_all(self, keys: list[str]) -> None:
        """Availability is counted from the last start."""
        self.cluster.start_all()
        self._begin("all started", keys)

    # -- choosing --------------------------------------------------------------------------------------------------

    def _leaders(self) -> dict[str, int]:
        found = {}
        for topic in self.topics:
            for partition in self.cluster.describe(topic).partitions:
                found[key(topic, partition.partition)] = partition.leader
        return found

    def _led_by(self, broker: int, leaders: dict[str, int] | None = None) -> list[str]:
        leaders = self._leaders() if leaders is None else leaders
        return [name for name, leader in leaders.items() if leader == broker]

    def _all_keys(self) -> list[str]:
        return list(self._leaders())

    def _alive(self, candidates: list[int]) -> int:
        """One of those that run; where another fault got all of them before, any that runs."""
        running = self.cluster.running()
        return self.rng.choice([broker for broker in candidates if broker in running] or running)

    def _some_leader(self, leaders: dict[str, int] | None = None) -> int:
        return self._alive(list((self._leaders() if leaders is None else leaders).values()))

    def _controller(self) -> int:
        return self._alive([self.cluster.controller()])

    def _some_follower(self) -> tuple[int, list[str]]:
        """A broker, and the keys that it follows."""
        follows: dict[int, list[str]] = {}
        for topic in self.topics:
            for partition in self.cluster.describe(topic).partitions:
                for broker in partition.isr:
                    if broker != partition.leader:
                        follows.setdefault(broker, []).append(key(topic, partition.partition))
        broker = self._alive(sorted(follows))
        return broker, follows.get(broker, [])

    def _some_broker(self) -> int:
        return self._alive([])

    def _others(self, broker: int) -> list[int]:
        return [other for other in range(self.cluster.brokers) if other != broker]
