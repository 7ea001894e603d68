"""Messages as frames: round trips, heads, failures, and the routing prefixes of publications."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden import samples
from zmqueue.errors import BadFrame, InvalidRequest, UnknownOperation, UnsupportedVersion
from zmqueue.model import PartitionKey
from zmqueue.wire import cbor, frames, messages
from zmqueue.wire.frames import Head, Kind, Operation

CORRELATION = st.integers(0, 2**64 - 1)
KEYS = st.builds(PartitionKey, st.binary(min_size=16, max_size=16), st.integers(0, 99_999))
ROW = st.builds(
    messages.AckRow,
    st.binary(min_size=16, max_size=16),
    st.integers(0, 99_999),
    st.integers(-1, 2**31 - 1),
    st.integers(-(2**62), 2**62),
)


def request(
    operation: Operation = Operation.FETCH, correlation: int = 1, raw: list[bytes] | None = None
) -> list[bytes]:
    return frames.request(operation, correlation, samples.sample(frames.REQUESTS[operation]), raw)


# -- messages ----------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=249), st.lists(ROW, max_size=20))
def test_a_message_reads_back(cluster_id, rows):
    acks = messages.Acks(cluster_id, 1, 2, rows)
    assert frames.unpack(frames.pack(acks), messages.Acks) == acks


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        b"",
        {},
        {"name": 1},
        {"name": b"events"},
        {"name": None},
        {"name": "x" * 250},
        {"name": "events", "extra": 1},
        {b"name": "events"},
    ],
    ids=repr,
)
def test_what_does_not_fit_the_type_is_an_invalid_request(value):
    with pytest.raises(InvalidRequest):
        frames.unpack(cbor.dumps(value), messages.DeleteTopicRequest)


@pytest.mark.parametrize(
    "entry",
    [
        [],
        [samples.TOPIC],
        [samples.TOPIC, 0, 0],
        [samples.TOPIC[:15], 0],
        [samples.TOPIC, -1],
        [samples.TOPIC, 100_000],
        [samples.TOPIC, True],
        [samples.TOPIC, 0.0],
        [samples.TOPIC.hex(), 0],
        {"topic_id": samples.TOPIC, "partition": 0},
    ],
    ids=repr,
)
def test_a_row_has_exactly_its_fields_in_their_ranges(entry):
    with pytest.raises(InvalidRequest):
        frames.unpack(cbor.dumps({"entries": [entry]}), messages.DescribePartitionsRequest)


def test_a_request_names_no_more_partitions_than_its_limit():
    entries = [messages.ProduceEntry(samples.TOPIC, 0)] * 1025
    with pytest.raises(InvalidRequest):
        frames.unpack(frames.pack(messages.ProduceRequest(1, 1, entries)), messages.ProduceRequest)


def test_a_body_that_is_not_cbor_is_an_invalid_request_because_its_head_says_whom_to_answer():
    parts = [request()[0], b"\xff"]
    with pytest.raises(InvalidRequest):
        frames.parse_request(frames.parse_head(parts), parts)


# -- heads -------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(Operation), CORRELATION, st.lists(st.binary(max_size=4), max_size=4))
def test_a_request_reads_back_with_its_raw_frames(operation, correlation, raw):
    parts = request(operation, correlation, raw)
    head = frames.parse_head(parts)
    assert head == Head(Kind.REQUEST, operation, correlation)
    assert frames.parse_request(head, parts) == samples.sample(frames.REQUESTS[operation])
    assert parts[2:] == raw


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(frames.RESPONSES)), CORRELATION, st.lists(st.binary(max_size=4), max_size=4))
def test_a_response_carries_the_correlation_back(operation, correlation, raw):
    asked = frames.parse_head(request(operation, correlation))
    parts = frames.response(asked, samples.sample(frames.RESPONSES[operation]), raw)
    head = frames.parse_head(parts)
    assert head == Head(Kind.RESPONSE, operation, correlation)
    assert frames.parse_response(head, parts) == samples.sample(frames.RESPONSES[operation])
    assert parts[2:] == raw


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(Operation), CORRELATION, st.integers(-1, 9999), st.text(max_size=100))
def test_any_operation_can_fail(operation, correlation, code, text):
    parts = frames.failure(frames.parse_head(request(operation, correlation)), code, text)
    head = frames.parse_head(parts)
    assert head == Head(Kind.FAILURE, operation, correlation)
    assert frames.parse_response(head, parts) == messages.Failure(code, text)


@pytest.mark.parametrize(
    "text", ["x" * 10_000, "\N{SNOWMAN}" * 10_000, "file \udcff"], ids=["long", "wide", "undecodable"]
)
def test_whatever_the_text_of_an_error_its_failure_can_be_sent_and_read(text):
    parts = frames.failure(samples.head(Operation.FETCH), 56, text)
    assert frames.parse_response(frames.parse_head(parts), parts).code == 56


@pytest.mark.parametrize("parts", [[], [b""], [b"", b""], [b"x" * 12], [b"x" * 11, b""], [b"x" * 13, b""]], ids=repr)
def test_without_a_head_there_is_nobody_to_answer(parts):
    with pytest.raises(BadFrame):
        frames.parse_head(parts)


def test_the_largest_produce_and_the_largest_fetch_have_few_enough_frames():
    assert frames.parse_head(request(raw=[b""] * 2 * 1024))
    assert frames.parse_head(request(raw=[b""] * 4096))


def test_more_frames_than_any_message_has_are_refused():
    with pytest.raises(BadFrame):
        frames.parse_head(request(raw=[b""] * 4097))


def test_another_protocol_version_is_named():
    first, *rest = request()
    with pytest.raises(UnsupportedVersion, match="version 9"):
        frames.parse_head([b"\x09" + first[1:], *rest])


def test_an_unknown_operation_is_named():
    first, *rest = request()
    with pytest.raises(UnknownOperation, match="operation 999"):
        frames.parse_head([first[:2] + (999).to_bytes(2, "little") + first[4:], *rest])


def test_an_unknown_kind_is_refused():
    first, *rest = request()
    with pytest.raises(UnknownOperation, match="kind 3"):
        frames.parse_head([first[:1] + b"\x03" + first[2:], *rest])


def test_a_refused_head_can_still_be_answered():
    first, *rest = request(correlation=77)
    unknown = [first[:2] + (999).to_bytes(2, "little") + first[4:], *rest]
    answered = frames.failure(frames.echo(unknown), UnknownOperation.code, "no operation 999")
    assert answered[0] == first[:1] + bytes([Kind.FAILURE]) + unknown[0][2:]
    assert frames.echo([b"short", b""]) is None
    assert frames.echo([]) is None


def test_a_response_is_not_a_request():
    parts = frames.response(samples.head(Operation.FETCH), samples.sample(messages.FetchResponse))
    with pytest.raises(InvalidRequest):
        frames.parse_request(frames.parse_head(parts), parts)


def test_a_request_is_not_a_response():
    parts = request()
    with pytest.raises(InvalidRequest):
        frames.parse_response(frames.parse_head(parts), parts)


def test_acknowledgements_have_no_response():
    parts = frames.response(samples.head(Operation.ACKS), messages.Done())
    with pytest.raises(InvalidRequest):
        frames.parse_response(frames.parse_head(parts), parts)


# -- routing prefixes --------------------------------------------------------------------------------------------


@given(KEYS)
def test_a_route_reads_back(key):
    assert frames.parse_route(frames.route(key)) == key


@given(KEYS, KEYS)
def test_no_route_is_a_prefix_of_another_partitions_route(one, other):
    assert frames.route(one).startswith(frames.route(other)) == (one == other)


@given(st.binary(min_size=16, max_size=16), st.integers(0, 9_999))
def test_partition_1_does_not_receive_what_is_published_for_partition_10(topic_id, partition):
    longer = frames.route(PartitionKey(topic_id, partition * 10))
    assert longer.startswith(frames.route(PartitionKey(topic_id, partition))) == (partition == 0)


@given(KEYS)
def test_no_partition_has_the_route_of_beacons(key):
    assert frames.route(key) != frames.BEACON_ROUTE
    assert len(frames.route(key)) == len(frames.BEACON_ROUTE)


@pytest.mark.parametrize("length", [0, 19, 21])
def test_a_route_of_another_length_is_a_bad_frame(length):
    with pytest.raises(BadFrame):
        frames.parse_route(b"x" * length)
