"""The settings of a topic, and the promises that follow when none is given."""

from __future__ import annotations

import pytest

from zmqueue.core import topic_config
from zmqueue.errors import InvalidConfig


@pytest.mark.parametrize(
    ("replication_factor", "storage", "minimum"),
    [
        (1, "disk", 1),
        (2, "disk", 1),
        (3, "disk", 2),
        (5, "disk", 2),
        (1, "memory", 1),
        (2, "memory", 2),
        (3, "memory", 2),
    ],
)
def test_one_disk_is_promise_enough_and_memory_needs_two(replication_factor: int, storage: str, minimum: int):
    assert topic_config.min_insync_replicas({}, replication_factor, storage) == minimum


def test_what_is_given_wins():
    config = {"min.insync.replicas": "3", "storage.mode": "memory"}
    topic_config.check(config)
    assert topic_config.min_insync_replicas(config, 2, "disk") == 3
    assert topic_config.storage(config, "disk") == "memory"
    assert topic_config.storage({}, "disk") == "disk"


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "1.5", "\u0661"])
def test_a_minimum_is_a_whole_number_from_one_up(text: str):
    with pytest.raises(InvalidConfig):
        topic_config.check({"min.insync.replicas": text})


def test_a_wrong_name_is_refused_with_the_nearest_right_one():
    with pytest.raises(InvalidConfig, match=r"did you mean 'min\.insync\.replicas'"):
        topic_config.check({"min.insync.replica": "1"})
    with pytest.raises(InvalidConfig, match="one of disk, memory"):
        topic_config.check({"storage.mode": "tape"})
