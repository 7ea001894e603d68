"""No input makes a decoder do anything but return or raise one of the errors it documents.

Two sources of input: hypothesis, and a seeded mutator over the golden bytes. The mutator runs a fixed number of cases
per decoder; ZMQUEUE_FUZZ_CASES asks for more and ZMQUEUE_FUZZ_SEED for others. Checksums would keep mutants out of what
lies behind them, so half of the batch mutants get theirs mended.
"""

from __future__ import annotations

import os
import random
import time
import tracemalloc
from collections.abc import Callable

import cramjam
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden import samples
from zmqueue.errors import (
    BadFrame,
    CorruptBatch,
    FutureFormat,
    InvalidRequest,
    UnknownOperation,
    UnsupportedVersion,
    ZmqueueError,
)
from zmqueue.model import MiB
from zmqueue.wire import batch, cbor, frames

CASES = int(os.environ.get("ZMQUEUE_FUZZ_CASES", "2000"))
SEED = int(os.environ.get("ZMQUEUE_FUZZ_SEED", "1"))

Errors = tuple[type[ZmqueueError], ...]
Decoder = tuple[Callable[[bytes], object], Errors]
BATCH_ERRORS: Errors = (CorruptBatch, FutureFormat)
HEAD_ERRORS: Errors = (BadFrame, UnsupportedVersion, UnknownOperation)


def open_batches(data: bytes) -> None:
    for found in batch.split(data):
        batch.decode(*found)


def read_message(data: bytes) -> None:
    """Head and body from one run of bytes, as a request and as a response."""
    parts = [data[:12], data[12:]]
    head = frames.parse_head(parts)
    for parse in (frames.parse_request, frames.parse_response):
        try:
            parse(head, parts)
        except InvalidRequest:
            continue


DECODERS: dict[str, Decoder] = {
    "cbor.loads": (cbor.loads, (BadFrame,)),
    "parse_header": (batch.parse_header, BATCH_ERRORS),
    "split and decode": (open_batches, BATCH_ERRORS),
    "parse_head, parse_request, parse_response": (read_message, HEAD_ERRORS),
    "parse_head of one frame": (lambda data: frames.parse_head([data]), HEAD_ERRORS),
    "echo": (lambda data: frames.echo([data]), ()),
    "parse_route": (frames.parse_route, (BadFrame,)),
    **{
        f"unpack {name}": (lambda data, cls=cls: frames.unpack(data, cls), (InvalidRequest,))
        for name, cls in samples.message_types().items()
    },
}


def attempt(decoder: Decoder, data: bytes) -> None:
    decode, errors = decoder
    try:
        decode(data)
    except errors:
        return


# -- arbitrary bytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=15, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes(name, data):
    attempt(DECODERS[name], data)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 4), st.binary(max_size=100), st.integers(0, 200), st.integers(0, 8), st.integers(0, 8))
def test_arbitrary_bodies_behind_honest_checksums(codec, body, raw_length, count, last):
    header = batch.encode([b"x"]).header
    header.attributes, header.body_length, header.body_crc = codec, len(body), batch.crc32c(body)
    header.raw_length, header.record_count, header.last_offset_delta = raw_length, count, last
    attempt(DECODERS["split and decode"], header.pack() + body)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=20), max_size=5))
def test_arbitrary_frames(parts):
    attempt((lambda _: frames.parse_head(parts), HEAD_ERRORS), b"")


# -- mutants of golden bytes -------------------------------------------------------------------------------------


def mutate(rng: random.Random, data: bytes, corpus: list[bytes]) -> bytes:
    mutant = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(mutant) + 1)
        match rng.randrange(6):
            case 0 if mutant:
                mutant[at % len(mutant)] ^= 1 << rng.randrange(8)
            case 1 if mutant:
                mutant[at % len(mutant)] = rng.choice(
                    (0, 1, 0x1B, 0x5B, 0x7F, 0x80, 0x9B, 0xBB, 0xC0, 0xD8, 0xF6, 0xFF)
                )
            case 2:
                del mutant[at : at + rng.randrange(1, 9)]
            case 3:
                mutant[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 4:
                mutant[at:at] = mutant[at : at + rng.randrange(1, 17)]
            case _:
                other = rng.choice(corpus)
                start = rng.randrange(len(other) + 1)
                mutant[at:] = other[start:]
    return bytes(mutant)


def mend(data: bytes) -> bytes:
    """The same bytes, with lengths and checksums of a first batch that are right again."""
    if len(data) < batch.HEADER_BYTES:
        return data
    head, body = bytearray(data[: batch.HEADER_BYTES]), data[batch.HEADER_BYTES :]
    head[:4] = batch.MAGIC + bytes((batch.VERSION, 0))
    head[8:12] = len(body).to_bytes(4, "little")
    if head[4] & 7 == 0:
        head[12:16] = head[8:12]
    head[68:72] = batch.crc32c(body).to_bytes(4, "little")
    head[72:76] = batch.crc32c(bytes(head[:72])).to_bytes(4, "little")
    return bytes(head) + body


def fuzz(decoder: Decoder, corpus: list[bytes], cases: int, name: str, mended: bool = False) -> None:
    rng = random.Random(f"{SEED} {name}")
    for case in range(cases):
        data = mutate(rng, rng.choice(corpus), corpus)
        if mended and rng.random() < 0.5:
            data = mend(data)
        try:
            attempt(decoder, data)
        except Exception as error:
            pytest.fail(f"{name}, seed {SEED}, case {case}: {type(error).__name__}: {error} on {data.hex()}")


BATCHES = [bytes.fromhex(entry) for entry in samples.stored("batches.json").values()]
MESSAGES = {name: bytes.fromhex(entry) for name, entry in samples.stored("messages.json").items()}
FRAMES = [[bytes.fromhex(part) for part in parts] for parts in samples.stored("frames.json").values()]


def test_mutants_of_batches():
    fuzz(DECODERS["split and decode"], BATCHES, CASES * 4, "batches", mended=True)


def test_mutants_of_cbor():
    bodies = [*MESSAGES.values(), *(data[batch.HEADER_BYTES :] for data in BATCHES)]
    fuzz(DECODERS["cbor.loads"], bodies, CASES * 2, "cbor")


def test_mutants_of_messages_as_frames():
    whole = [parts[0] + parts[1] for parts in FRAMES]
    fuzz(DECODERS["parse_head, parse_request, parse_response"], whole, CASES * 2, "frames")


@pytest.mark.parametrize("name", samples.message_types())
def test_mutants_of_each_message(name):
    own = [data for entry, data in MESSAGES.items() if entry.split(",")[0] == name]
    fuzz(DECODERS[f"unpack {name}"], [*own * 8, *MESSAGES.values()], CASES // 8, name)


# -- bombs: small inputs that ask for much -----------------------------------------------------------------------

HUGE = (2**60).to_bytes(8, "big")
CBOR_BOMBS = {
    "array of 2^60": b"\x9b" + HUGE,
    "array of 2^64-1": b"\x9b" + b"\xff" * 8,
    "array of 2^28": b"\x9a\x10\0\0\0" + b"\x01" * 100,
    "map of 2^60": b"\xbb" + HUGE,
    "bytes of 2^60": b"\x5b" + HUGE,
    "bytes of 2^31": b"\x5a\x80\0\0\0",
    "text of 2^60": b"\x7b" + HUGE,
    "nested arrays of 2^60": (b"\x9b" + HUGE) * 8,
    "nesting of 100,000": b"\x81" * 100_000,
    "nested maps": b"\xa1\x61a" * 100_000,
    "nested tags": b"\xc1" * 100_000,
    "big number of 1 MiB": b"\xc2\x5a\0\x10\0\0" + bytes(MiB),
    "shared value that holds itself": b"\xd8\x1c\x81\xd8\x1d\0",
    "regular expression": b"\xd8\x23\x66(a+)+b",
    "many keys of one hash": b"\xba\0\1\0\0"
    + b"".join(b"\x1b" + (n * (2**61 - 1)).to_bytes(8, "big") for n in range(8)),
}


def cost(work: Callable[[], object]) -> tuple[float, int]:
    """Seconds and peak bytes."""
    tracemalloc.start()
    begun = time.monotonic()
    try:
        work()
    finally:
        seconds = time.monotonic() - begun
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return seconds, peak


def refused(decode: Callable[[], object], error: type[ZmqueueError]) -> Callable[[], None]:
    def work() -> None:
        with pytest.raises(error):
            decode()

    return work


@pytest.mark.parametrize("name", CBOR_BOMBS)
def test_a_cbor_bomb_costs_no_more_than_its_own_size(name):
    data = CBOR_BOMBS[name]
    seconds, peak = cost(refused(lambda: cbor.loads(data), BadFrame))
    assert peak < 4 * len(data) + MiB // 2
    assert seconds < 2


@pytest.mark.parametrize("name", CBOR_BOMBS)
def test_a_cbor_bomb_in_a_batch_costs_no_more_than_its_own_size(name):
    body = CBOR_BOMBS[name]
    header = batch.encode([b"x"]).header
    header.body_length, header.raw_length, header.body_crc = len(body), len(body), batch.crc32c(body)
    seconds, peak = cost(refused(lambda: open_batches(header.pack() + body), CorruptBatch))
    assert peak < 8 * len(body) + MiB // 2
    assert seconds < 2


def compressed(codec: str, raw: bytes, announced: int) -> tuple[batch.BatchHeader, bytes]:
    body = batch._compress(batch.CODECS[codec], raw)
    header = batch.encode([b"x"]).header
    header.attributes, header.raw_length = batch.CODECS[codec], announced
    header.body_length, header.body_crc = len(body), batch.crc32c(body)
    return header, body


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_a_compressed_bomb_opens_no_further_than_its_header_announces(codec):
    header, body = compressed(codec, bytes(64 * MiB), announced=1000)
    seconds, peak = cost(refused(lambda: batch.decode(header, body), CorruptBatch))
    assert peak < MiB
    assert seconds < 2


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_a_compressed_bomb_that_announces_itself_is_not_even_opened(codec):
    header, body = compressed(codec, b"", announced=batch.RAW_BYTES_MAX + 1)
    seconds, peak = cost(refused(lambda: batch.decode(header, body), CorruptBatch))
    assert peak < MiB
    assert seconds < 2


def test_a_frame_that_announces_a_larger_content_than_its_own_is_refused():
    """zstd's own header may claim any size; only ours decides what is allocated."""
    claim = b"\x28\xb5\x2f\xfd\xe0" + (2**50).to_bytes(8, "little") + b"\x01\0\0"
    header, _ = compressed("zstd", b"", announced=1000)
    header.body_length, header.body_crc = len(claim), batch.crc32c(claim)
    seconds, peak = cost(refused(lambda: batch.decode(header, claim), CorruptBatch))
    assert peak < MiB
    assert seconds < 2


def test_the_compressors_know_the_formats_that_others_write():
    """What goes to disk must be readable without this library: these are the standard framed formats."""
    assert bytes(cramjam.gzip.compress(b"x"))[:2] == b"\x1f\x8b"
    assert bytes(cramjam.zstd.compress(b"x"))[:4] == b"\x28\xb5\x2f\xfd"
    assert bytes(cramjam.lz4.compress(b"x"))[:4] == b"\x04\x22\x4d\x18"
    assert bytes(cramjam.snappy.compress(b"x"))[:10] == b"\xff\x06\0\0sNaPpY"
