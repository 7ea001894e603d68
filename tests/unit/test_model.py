"""Names of topics, and the shapes that users unpack."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqueue.errors import InvalidTopic, ReservedName
from zmqueue.model import ConsumerRecord, OffsetAndMetadata, PartitionKey, TopicPartition, check_topic_name


@pytest.mark.parametrize("name", ["a", "events", "A.b_c-9", "_one", "...", "-", "x" * 249])
def test_allowed_names_come_back(name):
    assert check_topic_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "x" * 250, "a b", "a/b", "../a", "a\n", "\n", "a\0", "größe", "a\u0660", "a:b", "%00"],
    ids=repr,
)
def test_other_names_are_refused(name):
    with pytest.raises(InvalidTopic):
        check_topic_name(name)


def test_names_with_two_underscores_are_ours():
    with pytest.raises(ReservedName):
        check_topic_name("__consumer_offsets")
    assert check_topic_name("__consumer_offsets", internal=True) == "__consumer_offsets"


def test_internal_names_keep_to_the_rules_too():
    with pytest.raises(InvalidTopic):
        check_topic_name("__/", internal=True)


@given(st.text(max_size=300))
def test_any_text_is_a_name_or_refused(name):
    try:
        assert check_topic_name(name) == name
    except (InvalidTopic, ReservedName):
        return
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def test_the_fields_of_records_stand_in_the_order_users_know():
    assert ConsumerRecord.__struct_fields__ == (
        "topic",
        "partition",
        "offset",
        "timestamp",
        "timestamp_type",
        "key",
        "value",
        "headers",
    )
    assert TopicPartition._fields == ("topic", "partition")
    assert OffsetAndMetadata._fields[:2] == ("offset", "metadata")


def test_a_partition_key_prints_short():
    assert str(PartitionKey(bytes(range(16)), 3)) == "00010203-3"
