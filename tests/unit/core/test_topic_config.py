"""The settings of a topic, and the promises that follow when none is given."""

from __future__ import annotations

import pytest

from zmqueue.config import LogConfig
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


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("cleanup.policy", ["delete", "compact", "compact,delete"], ["", "none", "compact,", "Delete"]),
        ("retention.ms", ["-1", "0", "604800000"], ["-2", "x", "1e3", ""]),
        ("retention.bytes", ["-1", "1073741824"], ["-2", "1G"]),
        ("quota.bytes", ["-1", "5"], ["-5"]),
        ("segment.bytes", ["1024", "4294967295"], ["1023", "4294967296", "0"]),
        ("segment.ms", ["1"], ["0", "-1"]),
        ("index.type", ["sparse", "dense"], ["btree"]),
        ("index.interval.bytes", ["1", "65536"], ["0"]),
        ("index.secondary", ["header:trace", "json:user.id", "cbor:a"], ["trace", "header:", "xml:a", ""]),
        ("min.cleanable.dirty.ratio", ["0", "0.5", "1", "1.0"], ["1.5", "-0.1", "half", "nan"]),
        ("delete.retention.ms", ["0", "5"], ["-1"]),
    ],
)
def test_values_are_checked(name: str, good: list[str], bad: list[str]):
    for text in good:
        topic_config.check({name: text})
    for text in bad:
        with pytest.raises(InvalidConfig, match=name):
            topic_config.check({name: text})


def test_a_topic_that_says_nothing_has_the_defaults_of_the_broker():
    settings = topic_config.settings_of({}, LogConfig(retention_ms=5, segment_bytes_max=2**21, index_interval_bytes=7))
    assert (settings.deletes, settings.compacts, settings.secondary) == (True, False, None)
    assert (settings.retention_ms, settings.segment_bytes, settings.index_interval_bytes) == (5, 2**21, 7)


def test_a_topic_may_say_otherwise():
    config = {"cleanup.policy": "compact", "retention.ms": "-1", "index.type": "dense", "index.secondary": "json:a.b"}
    settings = topic_config.settings_of(config, LogConfig())
    assert (settings.deletes, settings.compacts, settings.retention_ms) == (False, True, -1)
    assert (settings.index_interval_bytes, settings.secondary) == (0, ("json", "a.b"))


def test_settings_are_changed_and_taken_back():
    present = {"retention.ms": "5", "cleanup.policy": "compact"}
    assert topic_config.altered(present, {"retention.ms": None, "segment.ms": "9"}) == {
        "cleanup.policy": "compact",
        "segment.ms": "9",
    }
    with pytest.raises(InvalidConfig, match="did you mean"):
        topic_config.altered(present, {"retention.mss": None})
    with pytest.raises(InvalidConfig, match="fixed"):
        topic_config.altered(present, {"storage.mode": "memory"})
