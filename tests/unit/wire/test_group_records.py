"""Records of `__consumer_offsets`: their bytes, and what happens to bytes that are none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.golden import samples
from zmqueue.errors import FutureFormat, InvalidRecord
from zmqueue.wire import cbor
from zmqueue.wire import group_records as r
from zmqueue.wire.group_messages import group_partition

GOLDEN = samples.stored("group_records.json")
STATE: Any = samples.RECORDS["GroupState"]


def decode(name: str, data: bytes) -> Any:
    if "Key" in name:
        return r.decode_key(data)
    return r.decode_group(data) if "GroupState" in name else r.decode_offset(data)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_record_has_its_golden_bytes_and_reads_back(name):
    golden = bytes.fromhex(GOLDEN[name])
    assert r.encode(samples.RECORDS[name]) == golden
    assert decode(name, golden) == samples.RECORDS[name]


@pytest.mark.parametrize("read", [r.decode_key, r.decode_offset, r.decode_group])
@given(data=st.binary(max_size=60))
def test_foreign_bytes_are_refused_by_a_typed_error(read, data):
    try:
        record = read(data)
    except (InvalidRecord, FutureFormat):
        return
    assert read(r.encode(record)) == record


@pytest.mark.parametrize("name", GOLDEN)
def test_a_record_that_was_cut_or_continued_is_refused(name):
    golden = bytes.fromhex(GOLDEN[name])
    for damaged in (*(golden[:end] for end in range(len(golden))), golden + b"\0"):
        with pytest.raises(InvalidRecord):
            decode(name, damaged)


@pytest.mark.parametrize(
    ("name", "known"), [("GroupKey", 1), ("CommittedOffset", r.VERSION), ("GroupState", r.VERSION)]
)
def test_a_record_of_a_newer_build_is_not_taken_for_damage(name, known):
    with pytest.raises(FutureFormat, match=rf"of form {known + 1}; this build reads {known}"):
        decode(name, cbor.dumps([known + 1, "whatever", {"it": "is"}]))


def without_topic(state: r.GroupState) -> r.GroupState:
    return replace(state, topics=[replace(state.topics[0], topic_id=None), *state.topics[1:]])


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (replace(STATE, topics=STATE.topics[:1]), "'m-2' names topic 1 of 1"),
        (replace(STATE, topics=[]), "names topic"),
        (without_topic(STATE), "holds partitions of a topic that is not there"),
    ],
)
def test_a_group_that_points_to_topics_it_does_not_have_is_refused(state, problem):
    with pytest.raises(InvalidRecord, match=problem):
        r.decode_group(r.encode(state))


def test_a_partition_takes_no_more_room_than_is_counted_for_it():
    most = 2**31 - 1
    run = r.Run(r.GROUP_TOPICS_MAX - 1, most, most, most, [99_999])
    member = replace(STATE.members[0], held=[run] * 30, waiting=[])
    room = len(r.encode(replace(STATE, members=[replace(member, held=[run] * 31)]))) - len(
        r.encode(replace(STATE, members=[member]))
    )
    waits = r.Waiting(r.GROUP_TOPICS_MAX - 1, [99_999])
    room += len(r.encode(replace(STATE, members=[replace(member, waiting=[waits])]))) - len(
        r.encode(replace(STATE, members=[member]))
    )
    assert room <= r.PARTITION_BYTES_MAX


@pytest.mark.parametrize(("group", "partition"), [("readers", 6), ("g", 3), ("größe", 4)])
def test_the_partition_of_a_group_is_frozen(group, partition):
    assert group_partition(group, 10) == partition
