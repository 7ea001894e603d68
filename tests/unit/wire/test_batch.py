"""The record batch: what is encoded reads back, what is damaged is refused, and what a broker demands of producers."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqueue.errors import CorruptBatch, FutureFormat, InvalidRecord
from zmqueue.wire import batch, cbor
from zmqueue.wire.batch import CODECS, HEADER_BYTES, BatchHeader, check_body, check_produced, decode, encode, split

I64 = st.integers(-(2**63), 2**63 - 1)
U32 = st.integers(0, 2**32 - 1)
DATA = st.none() | st.binary(max_size=20)
RECORD_HEADERS = st.none() | st.lists(st.tuples(st.text(max_size=5), DATA).map(list), max_size=3)


@st.composite
def columns(draw: st.DrawFn) -> dict:
    """Arguments of `encode`: arbitrary columns of one length, some of them absent."""
    count = draw(st.integers(1, 8))

    def column(entries: st.SearchStrategy) -> st.SearchStrategy:
        return st.lists(entries, min_size=count, max_size=count)

    steps = draw(st.none() | column(st.integers(1, 1000)))
    return {
        "values": draw(column(DATA)),
        "keys": draw(st.none() | column(DATA)),
        "headers": draw(st.none() | column(RECORD_HEADERS)),
        "timestamp_deltas": draw(st.none() | column(st.integers(-(2**40), 2**40))),
        "offset_deltas": steps and [sum(steps[: i + 1]) - 1 for i in range(count)],
        "base_timestamp": draw(st.integers(0, 2**45)),
        "codec": draw(st.sampled_from(sorted(CODECS.values()))),
        "attributes": draw(st.sampled_from([0, batch.TIMESTAMP_TYPE, batch.TRANSACTIONAL, batch.CONTROL])),
        "producer_id": draw(st.integers(-1, 2**62)),
        "producer_epoch": draw(st.integers(-1, 2**15 - 1)),
        "base_sequence": draw(st.integers(-1, 2**62)),
    }


def packed(made: batch.Batch) -> bytes:
    return made.header.pack() + made.body


def closed(body: object, **changes: int) -> batch.Batch:
    """A batch whose checksums are right and whose body is anything at all."""
    raw = cbor.dumps(body)
    header = encode([b"x"]).header
    header.body_length = header.raw_length = len(raw)
    header.body_crc = batch.crc32c(raw)
    return batch.Batch(msgspec.structs.replace(header, **changes), raw)


# -- round trips -------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(columns())
def test_what_is_encoded_reads_back(arguments):
    made = encode(**arguments)
    [found] = split(packed(made))
    assert found == made
    assert decode(*found)._asdict() == {field: arguments[field] for field in batch.Columns._fields}


@settings(max_examples=100, deadline=None)
@given(columns())
def test_the_header_tells_what_the_body_holds(arguments):
    header = encode(**arguments).header
    values, offsets, stamps = (arguments[name] for name in ("values", "offset_deltas", "timestamp_deltas"))
    assert header.record_count == len(values)
    assert header.last_offset_delta == (offsets[-1] if offsets else len(values) - 1)
    assert header.max_timestamp == header.base_timestamp + (max(stamps) if stamps else 0)
    assert header.codec == arguments["codec"]
    assert (header.base_offset, header.leader_epoch) == (-1, -1)


@settings(max_examples=200, deadline=None)
@given(
    attributes=st.sampled_from([0, 8, 16, 32, 56]),
    producer_epoch=st.integers(-(2**15), 2**15 - 1),
    length=U32,
    delta=U32,
    numbers=st.tuples(I64, I64, I64, I64, I64),
    leader_epoch=st.integers(-(2**31), 2**31 - 1),
    crc=U32,
    before=st.binary(max_size=3),
)
def test_a_header_reads_back_from_any_position(
    attributes, producer_epoch, length, delta, numbers, leader_epoch, crc, before
):
    header = BatchHeader(attributes, producer_epoch, length, length, delta, delta, *numbers, leader_epoch, crc)
    data = header.pack()
    assert len(data) == HEADER_BYTES
    assert batch.parse_header(before + data + b"body", len(before)) == header


@settings(max_examples=50, deadline=None)
@given(st.lists(columns(), max_size=4))
def test_a_range_of_batches_splits_into_them(several):
    made = [encode(**arguments) for arguments in several]
    assert list(split(b"".join(map(packed, made)))) == made


@settings(max_examples=50, deadline=None)
@given(columns(), st.data())
def test_a_range_that_ends_within_a_batch_yields_the_whole_ones_and_raises(arguments, data):
    whole = packed(encode(**arguments))
    cut = data.draw(st.integers(1, len(whole) - 1))
    found = split(whole + whole[:cut])
    assert packed(next(found)) == whole
    with pytest.raises(CorruptBatch):
        next(found)


def test_the_leader_rewrites_only_the_header():
    made = encode([b"a", b"b"])
    made.header.base_offset, made.header.leader_epoch = 500, 7
    [found] = split(packed(made))
    assert (found.header.base_offset, found.header.next_offset, found.header.leader_epoch) == (500, 502, 7)
    assert found.body == made.body


def test_sequences_count_records():
    assert encode([b"a"] * 3, producer_id=1, producer_epoch=0, base_sequence=10).header.last_sequence == 12


def test_an_empty_batch_is_our_own_mistake():
    with pytest.raises(AssertionError):
        encode([])


# -- damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_every_single_bit_flip_is_detected(codec):
    whole = packed(encode([b"hello", None], keys=[b"k", b"l"], codec=CODECS[codec]))
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptBatch):
            list(split(bytes(damaged)))


def test_every_shortened_batch_is_detected():
    whole = packed(encode([b"hello"]))
    for end in range(1, len(whole)):
        with pytest.raises(CorruptBatch):
            list(split(whole[:end]))


def test_a_batch_of_a_newer_version_is_not_called_corrupt():
    data = bytearray(encode([b"x"]).header.pack())
    data[2] = batch.VERSION + 1
    data[-4:] = batch.crc32c(bytes(data[:-4])).to_bytes(4, "little")
    with pytest.raises(FutureFormat):
        batch.parse_header(bytes(data))


@pytest.mark.parametrize(
    "changes",
    [
        {"attributes": 1 << 6},
        {"attributes": 1 << 15},
        {"attributes": 5},
        {"attributes": 7},
        {"record_count": 2},
        {"raw_length": 1},
    ],
    ids=str,
)
def test_a_header_that_contradicts_itself_is_corrupt(changes):
    header = msgspec.structs.replace(encode([b"x"]).header, **changes)
    with pytest.raises(CorruptBatch):
        batch.parse_header(header.pack())


def test_a_body_of_another_length_is_corrupt():
    made = encode([b"x"])
    with pytest.raises(CorruptBatch, match="its header says"):
        check_body(made.header, made.body + b"x")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({}, "five columns"),
        ([], "five columns"),
        ([None, None, [b"x"], None], "five columns"),
        ([None, None, None, None, None], "values"),
        ([None, None, b"x", None, None], "1 entries"),
        ([None, None, [b"x", b"y"], None, None], "1 entries"),
        ([None, [], [b"x"], None, None], "1 entries"),
        ([None, None, ["x"], None, None], "values"),
        ([None, None, [1], None, None], "values"),
        ([None, ["k"], [b"x"], None, None], "keys"),
        ([["0"], None, [b"x"], None, None], "integers"),
        ([[True], None, [b"x"], None, None], "integers"),
        ([[0.0], None, [b"x"], None, None], "integers"),
        ([[None], None, [b"x"], None, None], "integers"),
        ([[2**62], None, [b"x"], None, None], "timestamp deltas"),
        ([[-(2**62)], None, [b"x"], None, None], "timestamp deltas"),
        ([None, None, [b"x"], None, [-1]], "do not increase"),
        ([None, None, [b"x"], None, [1]], "beyond"),
        ([None, None, [b"x"], None, [False]], "integers"),
        ([None, None, [b"x"], [{}], None], "list of at most"),
        ([None, None, [b"x"], [[["a", b""]] * 65], None], "list of at most"),
        ([None, None, [b"x"], [["ab"]], None], "name and bytes"),
        ([None, None, [b"x"], [[["a"]]], None], "name and bytes"),
        ([None, None, [b"x"], [[[b"a", b"b"]]], None], "name and bytes"),
        ([None, None, [b"x"], [[["a", "b"]]], None], "name and bytes"),
    ],
    ids=repr,
)
def test_a_body_that_is_not_what_its_header_says_is_corrupt(body, why):
    with pytest.raises(CorruptBatch, match=why):
        decode(*closed(body))


def test_offset_deltas_that_repeat_are_corrupt():
    with pytest.raises(CorruptBatch, match="do not increase"):
        decode(*closed([None, None, [b"x", b"y"], None, [3, 3]], record_count=2, last_offset_delta=9))


def test_records_of_a_batch_with_gaps_must_say_their_offsets():
    with pytest.raises(CorruptBatch, match="which offsets"):
        decode(*closed([None, None, [b"x"], None, None], last_offset_delta=3))


def test_a_batch_keeps_its_span_when_its_last_records_are_compacted_away():
    columns = decode(*closed([None, None, [b"x"], None, [1]], last_offset_delta=3))
    assert columns.offset_deltas == [1]


def test_bytes_after_the_columns_are_corrupt():
    made = encode([b"x"])
    header = msgspec.structs.replace(made.header, body_length=made.header.body_length + 1)
    with pytest.raises(CorruptBatch, match="follow"):
        decode(header, made.body + b"\0")


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("announced", [-1, 1], ids=["less", "more"])
def test_a_compressed_body_opens_into_exactly_what_it_announces(codec, announced):
    made = encode([b"hello" * 10], codec=CODECS[codec])
    header = msgspec.structs.replace(made.header, raw_length=made.header.raw_length + announced)
    with pytest.raises(CorruptBatch, match=r"decompress|shorter"):
        decode(header, made.body)


# -- what a broker demands ---------------------------------------------------------------------------------------


def produced(**changes: int) -> BatchHeader:
    made = encode([b"a", b"b"], base_timestamp=1000, producer_id=5, producer_epoch=0, base_sequence=0)
    return msgspec.structs.replace(made.header, **changes)


def refused(header: BatchHeader, why: str, batch_bytes_max: int = 1000) -> None:
    with pytest.raises(InvalidRecord, match=why):
        check_produced(header, batch_bytes_max)


def test_a_batch_as_the_client_makes_it_is_accepted():
    check_produced(produced(), 1000)
    check_produced(encode([b"a"]).header, 1000)
    check_produced(encode([b"a"], base_timestamp=-1).header, 1000)
    check_produced(encode([b"a"], attributes=batch.TRANSACTIONAL, codec=CODECS["zstd"]).header, 1000)


def test_a_producer_may_not_choose_offsets():
    refused(produced(base_offset=0), "given by the leader")


def test_a_producer_may_not_choose_the_leader_epoch():
    refused(produced(leader_epoch=0), "given by the leader")


def test_a_produced_batch_has_records():
    refused(produced(record_count=0, last_offset_delta=0), "0 records")


def test_a_produced_batch_has_no_gaps():
    refused(produced(last_offset_delta=2), "2 records spans 3")


def test_a_produced_batch_keeps_to_the_size_limit():
    header = produced()
    check_produced(header, header.total_bytes)
    refused(header, "larger than", header.total_bytes - 1)


def test_a_produced_batch_does_not_open_into_much_more_than_the_limit():
    check_produced(produced(raw_length=4_000), 1_000)
    refused(produced(raw_length=4_001), "opens into")


def test_control_batches_are_not_produced():
    refused(produced(attributes=batch.CONTROL), "control")


@pytest.mark.parametrize("base", [-2, -(2**63)])
def test_timestamps_before_the_epoch_are_refused(base):
    refused(produced(base_timestamp=base), "timestamps")


@pytest.mark.parametrize("largest", [2**62, 2**63 - 1])
def test_timestamps_beyond_the_range_are_refused(largest):
    refused(produced(max_timestamp=largest), "timestamps")


def test_the_largest_timestamp_is_not_below_the_first():
    refused(produced(max_timestamp=999), "timestamps")


@pytest.mark.parametrize(
    "changes", [{"producer_id": -1}, {"producer_id": -2, "producer_epoch": -1, "base_sequence": -1}], ids=str
)
def test_producer_id_epoch_and_sequence_come_together(changes):
    refused(produced(**changes), "come together")


@pytest.mark.parametrize("field", ["producer_epoch", "base_sequence"])
def test_epoch_and_sequence_of_a_producer_are_not_negative(field):
    refused(produced(**{field: -1}), "not negative")


# -- without some of its records ---------------------------------------------------------------------------------


@settings(deadline=None)
@given(columns(), st.data())
def test_a_thinned_batch_holds_the_records_kept_at_their_offsets(made: dict, data: st.DataObject):
    header, body = encode(**made)
    before = decode(header, body)
    count = header.record_count
    keep = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    thin, body = batch.thinned(header, before, keep)
    check_body(thin, body)
    after = decode(batch.parse_header(thin.pack()), body)
    deltas = before.offset_deltas if before.offset_deltas is not None else list(range(count))
    assert after.offset_deltas == [deltas[at] for at in keep]
    for name in ("timestamp_deltas", "keys", "values", "headers"):
        column = getattr(before, name)
        assert getattr(after, name) == (None if column is None else [column[at] for at in keep])
    same = {"body_length": 0, "raw_length": 0, "record_count": 0, "body_crc": 0}
    assert msgspec.structs.replace(thin, **same) == msgspec.structs.replace(header, **same)


def test_an_emptied_batch_still_tells_its_offsets_and_its_producer():
    header, _ = encode([b"a", b"b"], codec=CODECS["zstd"], producer_id=7, producer_epoch=1, base_sequence=5)
    empty, body = batch.emptied(header)
    assert decode(batch.parse_header(empty.pack()), body) == (None, None, [], None, [])
    assert (empty.record_count, empty.next_offset, empty.last_sequence) == (0, header.next_offset, 6)
    void, body = batch.void(header)
    assert decode(batch.parse_header(void.pack()), body).values == []
    assert (void.next_offset, void.producer_id) == (header.next_offset, -1)
