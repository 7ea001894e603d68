"""CBOR as we read it: plain values come through, everything else is refused."""

from __future__ import annotations

import math

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqueue.errors import BadFrame
from zmqueue.wire import cbor

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64 - 1) | st.binary(max_size=9) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


def depth(value: object) -> int:
    if isinstance(value, list | dict):
        inner = value.values() if isinstance(value, dict) else value
        return 1 + max(map(depth, inner), default=0)
    return 0


@settings(max_examples=200, deadline=None)
@given(PLAIN.filter(lambda value: depth(value) <= cbor.DEPTH_MAX))
def test_plain_values_read_back(value):
    assert cbor.loads(cbor.dumps(value)) == value


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview])
def test_any_buffer_can_be_read(form):
    assert cbor.loads(form(cbor.dumps([b"x" * 100_000, 1]))) == [b"x" * 100_000, 1]


@pytest.mark.parametrize("size", [0, 1, 4_095, 4_096, 65_535, 65_536, 65_537, 200_000])
def test_a_byte_after_the_value_is_seen_wherever_it_stands(size):
    data = cbor.dumps(b"x" * size)
    assert cbor.loads(data) == b"x" * size
    with pytest.raises(BadFrame, match="1 bytes follow"):
        cbor.loads(data + b"\0")


@pytest.mark.parametrize("tag", [*range(6), *range(21, 38), 100, 256, 258, 260, 261, 1004, 43000, 55799, 2**64 - 1])
@pytest.mark.parametrize("inner", [b"\x61\x31", b"\x01", b"\x80", b"\x41\x01", b"\x82\x01\x01"])
def test_every_tag_is_refused(tag, inner):
    with pytest.raises(BadFrame):
        cbor.loads(b"\xdb" + tag.to_bytes(8, "big") + inner)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x5f\x41\x01\xff",  # bytes of indefinite length
        b"\x7f\x61\x61\xff",
        b"\x9f\x01\xff",
        b"\xbf\xff",
        b"\xff",  # a break without a beginning
        b"\x1c",  # reserved lengths
        b"\xfc",
        b"\x61\xff",  # text that is not UTF-8
        b"\xa2\x61a\x01\x61a\x02",  # the same key twice
        b"\xa1\x01\x01",  # keys that are not strings
        b"\xa1\x80\x01",
        b"\xa1\xa0\x01",
        b"\xa1\xf6\x01",
        b"\x81" * (cbor.DEPTH_MAX + 1) + b"\x01",
        b"\x82\x01",
        b"\x44abc",
    ],
    ids=bytes.hex,
)
def test_what_is_not_one_plain_value_is_refused(data):
    with pytest.raises(BadFrame):
        cbor.loads(data)


def test_nesting_up_to_the_limit_is_read():
    assert cbor.loads(b"\x81" * cbor.DEPTH_MAX + b"\x01")


def test_what_is_neither_a_value_nor_dangerous_is_left_to_the_types():
    assert cbor.loads(b"\xf7") is cbor2.undefined
    assert cbor.loads(b"\xe0") == cbor2.CBORSimpleValue(0)
    assert math.isnan(cbor.loads(b"\xf9\x7e\x00"))


@given(st.lists(st.integers(-30, 300)) | st.lists(st.integers(0, 23), max_size=300))
def test_integers_are_written_as_cbor_writes_them(integers):
    assert cbor.dump_integers(integers) == cbor.dumps(integers)


@pytest.mark.parametrize("count", [0, 23, 24, 255, 256, 65_535, 65_536])
def test_arrays_begin_as_cbor_begins_them(count):
    assert cbor.dumps([0] * count).startswith(cbor.array_head(count))
    assert cbor.dump_integers([7] * count) == cbor.dumps([7] * count)
