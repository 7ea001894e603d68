"""Custom assignors are found by their configured names when the broker starts, or the broker says why not."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from zmqueue.broker.assignors import load
from zmqueue.config import GroupsConfig
from zmqueue.core.assignors import BUILT_IN
from zmqueue.errors import ConfigError


def mine(members, partitions, owned):
    return {}


@pytest.fixture(autouse=True)
def module(monkeypatch):
    made = ModuleType("our_assignors")
    made.mine, made.number = mine, 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "our_assignors", made)


def test_built_in_assignors_are_always_there():
    assert load(GroupsConfig()) == BUILT_IN


def test_a_custom_assignor_stands_beside_them_and_may_be_the_default():
    found = load(GroupsConfig(assignors={"mine": "our_assignors:mine"}, assignor="mine"))
    assert found == {**BUILT_IN, "mine": mine}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"assignors": {"sticky": "our_assignors:mine"}}, "groups.assignors: 'sticky' is the name of a built-in"),
        ({"assignors": {"mine": "no_such_module:mine"}}, "mine = 'no_such_module:mine' cannot be loaded: No module"),
        ({"assignors": {"mine": "our_assignors:yours"}}, "mine = 'our_assignors:yours' cannot be loaded: "),
        ({"assignors": {"mine": "our_assignors:number"}}, "mine = 'our_assignors:number' cannot be called"),
        ({"assignor": "mine"}, "groups.assignor: 'mine' is none of range, roundrobin, sticky"),
    ],
)
def test_one_that_cannot_be_used_is_refused_by_its_setting(config, message):
    with pytest.raises(ConfigError, match=message):
        load(GroupsConfig(**config))
