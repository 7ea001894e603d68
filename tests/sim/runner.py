"""Many schedules: search for violations, make a failing one small, measure what each mutation costs to find.

A failing plan is made smaller by leaving things out (faults, clients, batches, losses, time) as long as it still fails.
Every change shifts what chance decides afterwards, so each candidate is tried under a few seeds of its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from msgspec.structs import replace

from tests.sim import plan as plans
from tests.sim.mutations import MUTATIONS, mutated
from tests.sim.world import Result, run

CHUNK = 50
COLLECT_EVERY = 5  # schedules: memory that is used again soon is still in the cache
SEEDS_PER_CANDIDATE = 6


class Total(NamedTuple):
    """What a chunk of schedules came to."""

    schedules: int
    events: int
    acknowledged: int
    faults: int
    offline: int
    cpu_s: float
    failures: list[Result]


@contextmanager
def collecting() -> Iterator[Callable[[], None]]:
    """No garbage is collected in the middle of a schedule; what is given is called after each.

    What was there before is not looked through each time.
    """
    schedules = 0

    def after_schedule() -> None:
        nonlocal schedules
        schedules += 1
        if schedules % COLLECT_EVERY == 0:
            gc.collect()

    gc.disable()
    gc.freeze()
    try:
        yield after_schedule
    finally:
        gc.collect()
        gc.unfreeze()
        gc.enable()


def run_chunk(seeds: range, mutation: str | None = None) -> Total:
    events = acknowledged = faults = offline = 0
    failures = []
    began = time.process_time()
    with mutated(mutation), collecting() as after_schedule:
        for seed in seeds:
            result = run(plans.make(seed))
            events += result.events
            acknowledged += result.acknowledged
            faults += result.faults
            offline += result.offline
            if result.violation:
                failures.append(result)
            after_schedule()
    return Total(len(seeds), events, acknowledged, faults, offline, time.process_time() - began, failures)


def chunks(seeds: range) -> list[range]:
    return [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]


def search(seeds: range, jobs: int = 1, mutation: str | None = None) -> Iterator[Total]:
    """The chunks of these seeds as they are done."""
    parts = chunks(seeds)
    if jobs == 1:
        for part in parts:
            yield run_chunk(part, mutation)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run_chunk, parts, [mutation] * len(parts))


# -- making a failure small --------------------------------------------------------------------------------------


def minimise(plan: plans.Plan, mutation: str | None = None, tell: Callable[[str], None] = lambda _: None) -> plans.Plan:
    """A smaller plan that fails too, if there is one."""
    with mutated(mutation):
        wanted = run(plan).violation
        assert wanted, "only what fails can be made smaller"
        smaller = True
        while smaller:
            smaller = False
            for what, candidate in _candidates(plan):
                failing = _still_fails(candidate, wanted)
                if failing is not None:
                    plan, smaller = failing, True
                    tell(what)
                    break
    return plan


def _still_fails(plan: plans.Plan, wanted: str) -> plans.Plan | None:
    for nth in range(SEEDS_PER_CANDIDATE):
        attempt = replace(plan, seed=plan.seed % 1_000_000 + nth * 1_000_000)
        if run(attempt).violation == wanted:
            return attempt
    return None


def _candidates(plan: plans.Plan) -> Iterable[tuple[str, plans.Plan]]:
    """Each a little less than the plan, the largest savings first."""
    for at in range(len(plan.faults)):
        faults = [*plan.faults[:at], *plan.faults[at + 1 :]]
        yield f"without {plan.faults[at].kind} at {plan.faults[at].at_ms} ms", replace(plan, faults=faults)
    if len(plan.producers) > 1:
        for at in range(len(plan.producers)):
            yield "one producer less", replace(plan, producers=[*plan.producers[:at], *plan.producers[at + 1 :]])
    if plan.consumers:
        yield "no consumer", replace(plan, consumers=[])
    for name in ("drop", "duplicate", "straggle"):
        if getattr(plan, name):
            yield f"no {name}", replace(plan, **{name: 0.0})
    for at, producer in enumerate(plan.producers):
        if producer.batches > 1:
            fewer = replace(producer, batches=producer.batches // 2)
            yield "fewer batches", replace(plan, producers=[*plan.producers[:at], fewer, *plan.producers[at + 1 :]])
    if plan.duration_ms > 300:
        yield "a shorter time", replace(plan, duration_ms=plan.duration_ms * 3 // 4)
    if plan.brokers > 3 and plan.brokers > max(topic.replication_factor for topic in plan.topics):
        faults = [fault for fault in plan.faults if fault.broker < plan.brokers - 1]
        yield "one broker less", replace(plan, brokers=plan.brokers - 1, faults=faults)
    if len(plan.topics) > 1 and all(client.topic == 0 for client in (*plan.producers, *plan.consumers)):
        yield "one topic less", replace(plan, topics=plan.topics[:1])


# -- mutations ---------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """How hard it was to see that a rule is missing."""

    name: str
    found: int
    schedules: int
    names: dict[str, int]
    seeds: list[int]
    proved: bool = False  # its directed test fails without the rule


def measure(name: str, seeds: range, enough: int = 20, seconds: float = 60.0) -> Measured:
    """Run until so many violations are found, or the seeds or the seconds are used up.

    Only schedules of the mutation's own profile are run, if it has one.
    """
    names: dict[str, int] = {}
    failing: list[int] = []
    schedules = 0
    among = MUTATIONS[name].among
    until = time.process_time() + seconds
    with mutated(name), collecting() as after_schedule:
        for seed in seeds:
            if among is not None and plans.profile_of(seed) != among:
                continue
            result = run(plans.make(seed))
            schedules += 1
            if result.violation:
                failing.append(seed)
                names[result.violation] = names.get(result.violation, 0) + 1
            if len(failing) >= enough or time.process_time() > until:
                break
            after_schedule()
    return Measured(name, len(failing), schedules, names, failing)
