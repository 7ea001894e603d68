"""Random schedules of a group, its clients and its coordinators; and that they would find mistakes."""

from __future__ import annotations

import pytest

from tests.unit.core import test_groups, test_groups_offsets
from tests.unit.core.groups_mistakes import DIRECTED, MISTAKES, made
from tests.unit.core.groups_model import Broken, run

SEEDS = 80
SEEDS_TO_FIND_MAX = 200


@pytest.mark.parametrize("first", range(0, SEEDS, 20))
def test_no_schedule_breaks_an_invariant(first):
    for seed in range(first, first + 20):
        try:
            run(seed)
        except Broken as broken:
            pytest.fail(f"seed {seed}: {broken}")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name):
    with made(name):
        for seed in range(SEEDS_TO_FIND_MAX):
            try:
                run(seed)
            except (Broken, AssertionError, KeyError):
                return
    pytest.fail(f"{SEEDS_TO_FIND_MAX} schedules do not notice that {name}")


@pytest.mark.parametrize("name", DIRECTED)
def test_a_mistake_that_needs_a_rare_schedule_is_found_by_the_test_made_for_it(name):
    test = getattr(test_groups, DIRECTED[name], None) or getattr(test_groups_offsets, DIRECTED[name])
    test()
    with made(name), pytest.raises(AssertionError):
        test()
