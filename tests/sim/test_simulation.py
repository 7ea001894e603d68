"""The promise of replication, on whole clusters in virtual time. More schedules: tools/simulate."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim import plan as plans
from tests.sim import report
from tests.sim.faults import Faults
from tests.sim.mutations import DIRECTED, MUTATIONS, mutated
from tests.sim.proof import prove
from tests.sim.runner import measure, minimise, run_chunk
from tests.sim.world import run

ROOT = Path(__file__).parents[2]
CHUNKS, SCHEDULES = 8, 100

# Mistakes that were found here and corrected, each with a seed that fails when it is put back.
FIXED = {
    "snapshot-leaves-leaders-an-old-table": 1_000_881,
    "follower-that-waited-fenced-is-forgotten": 1_000_003,
    "new-log-is-not-synced": 1_000_352,
    "appends-behind-a-failed-one": 1_000_058,
    "late-registration-silences-the-broker": 1_050_355,
    "truncated-log-is-not-flushed-again": 1_006_430,
    "replica-let-go-keeps-its-epoch": 110_126,
}


@pytest.mark.parametrize("nth", range(CHUNKS))
def test_no_schedule_breaks_a_promise(nth: int):
    total = run_chunk(range(nth * SCHEDULES, (nth + 1) * SCHEDULES))
    assert [(f.seed, f.violation, f.text) for f in total.failures] == []
    assert total.acknowledged > SCHEDULES, "schedules do something"
    assert total.faults > SCHEDULES, "faults happen"


@pytest.mark.parametrize("name", FIXED)
def test_what_schedules_once_found_would_be_found_again(name: str):
    with mutated(name):
        assert run(plans.make(FIXED[name])).violation
    assert not run(plans.make(FIXED[name])).violation


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_seed_is_a_schedule(seed: int):
    first, second = run(plans.make(seed), tracing=True), run(plans.make(seed), tracing=True)
    assert first.trace == second.trace
    assert first.digest == second.digest == run(plans.make(seed)).digest


def test_a_seed_means_the_same_in_every_process():
    code = "from tests.sim import plan, world; print([world.run(plan.make(s)).digest for s in range(20)])"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
        ).stdout
        for salt in ("0", "1")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize(
    "name",
    [
        "unclean-election",
        "elr-is-never-emptied",
        "new-leader-truncates-to-watermark",
        "watermark-ignores-own-disk",
        "eager-shrink",
        "follower-truncates-to-watermark",
        "ack-over-gap",
        "ack-before-fsync",
        "producer-state-not-rebuilt",
        "duplicate-acknowledged-early",
        "sequences-are-not-checked",
    ],
)
def test_a_missing_rule_is_noticed(name: str):
    assert measure(name, range(1_000_000, 1_000_400), enough=1).found == 1


def test_a_mutation_leaves_nothing_behind():
    before = {name: vars(owner).copy() for name, owner in _owners().items()}
    for name in MUTATIONS:
        with mutated(name):
            pass
    assert before == {name: vars(owner).copy() for name, owner in _owners().items()}


def _owners() -> dict[str, type]:
    from zmqueue.core.follower import Follower
    from zmqueue.core.leader import Leader
    from zmqueue.core.metadata import ClusterState
    from zmqueue.core.node import Node

    return {owner.__name__: owner for owner in (Follower, Leader, ClusterState, Node)}


def test_a_failure_is_made_smaller():
    name = "new-leader-truncates-to-watermark"
    failing = plans.make(measure(name, range(1_000_000, 1_000_400), enough=1).seeds[0])
    small = minimise(failing, name)
    assert len(small.faults) <= len(failing.faults)
    assert len(small.producers) == 1
    with mutated(name):
        assert run(small).violation
    assert not run(small).violation


def test_a_directed_test_fails_without_its_rule_and_only_then():
    assert DIRECTED.keys() <= MUTATIONS.keys()
    assert [name for name, proof in prove(DIRECTED).items() if not proof.holds] == []


def test_every_profile_has_its_schedules_and_every_kind_of_fault_its_way_to_happen():
    seeds = range(1_000_000, 1_000_048)
    assert {plans.profile_of(seed) for seed in seeds} >= {m.among for m in MUTATIONS.values() if m.among}
    kinds = {fault.kind for seed in range(1_000_000, 1_001_000) for fault in plans.make(seed).faults}
    assert kinds >= plans.FAULTS.keys()
    assert [kind for kind in kinds if not hasattr(Faults, f"_{kind.removesuffix('_leader')}")] == []


def test_every_mutation_is_in_the_table():
    page = (ROOT / "docs" / "simulation.md").read_text()
    for name, (rule, _, _) in MUTATIONS.items():
        assert f"| {rule} | {name.replace('-', ' ')} |" in page, f"{name}: run tools/simulate --mutations --write"
    assert "nothing finds it" not in page
    assert report.mutations_table([])
