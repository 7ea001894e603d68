"""The bytes of every message, batch and number on the wire, against tests/golden.

An intended change is written with `python -m tests.golden.samples --write`, never by these tests.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.golden import samples
from zmqueue.wire import batch, frames

MESSAGES = samples.stored("messages.json")
FRAMES = samples.stored("frames.json")
BATCHES = samples.stored("batches.json")


def test_every_message_type_has_a_golden_entry():
    assert {name.split(",")[0] for name in MESSAGES} == set(samples.message_types())


def test_every_operation_has_golden_frames():
    requests = {f"{operation.name} request" for operation in frames.Operation}
    responses = {f"{operation.name} response" for operation in frames.Operation} - {"ACKS response"}
    assert requests | responses | {"PRODUCE failure", "push", "beacon"} == set(FRAMES)


def test_every_sample_is_stored_and_every_stored_entry_has_a_sample():
    for file, entries in samples.current().items():
        assert samples.stored(file).keys() == entries.keys(), file


def test_operation_numbers_are_frozen():
    assert samples.stored("operations.json") == {operation.name: int(operation) for operation in frames.Operation}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_has_its_golden_bytes_and_reads_back(name):
    message, golden = samples.MESSAGES[name], bytes.fromhex(MESSAGES[name])
    assert frames.pack(message) == golden
    assert frames.unpack(golden, type(message)) == message


@pytest.mark.parametrize("name", FRAMES)
def test_frames_have_their_golden_bytes(name):
    assert [frame.hex() for frame in samples.multiparts()[name]] == FRAMES[name]


@pytest.mark.parametrize("operation", frames.Operation)
def test_golden_requests_read_back(operation):
    parts = [bytes.fromhex(part) for part in FRAMES[f"{operation.name} request"]]
    head = frames.parse_head(parts)
    assert (head.kind, head.operation, head.correlation) == (frames.Kind.REQUEST, operation, samples.CORRELATION)
    assert frames.parse_request(head, parts) == samples.sample(frames.REQUESTS[operation])


@pytest.mark.parametrize("operation", frames.RESPONSES)
def test_golden_responses_read_back(operation):
    parts = [bytes.fromhex(part) for part in FRAMES[f"{operation.name} response"]]
    head = frames.parse_head(parts)
    assert (head.kind, head.operation, head.correlation) == (frames.Kind.RESPONSE, operation, samples.CORRELATION)
    assert frames.parse_response(head, parts) == samples.sample(frames.RESPONSES[operation])


def test_the_golden_failure_reads_back():
    parts = [bytes.fromhex(part) for part in FRAMES["PRODUCE failure"]]
    failure = frames.parse_response(frames.parse_head(parts), parts)
    assert (failure.code, failure.message) == (42, "malformed")


@pytest.mark.parametrize("name", BATCHES)
def test_a_golden_batch_reads_back(name):
    arguments = samples.batches()[name]
    [found] = batch.split(bytes.fromhex(BATCHES[name]))
    assert _without_body(found.header) == _without_body(samples.encode_batch(arguments).header)
    columns = batch.decode(found.header, found.body)
    assert columns._asdict() == {field: arguments.get(field) for field in batch.Columns._fields}


@pytest.mark.parametrize("name", [name for name, arguments in samples.batches().items() if not arguments.get("codec")])
def test_an_uncompressed_batch_has_its_golden_bytes(name):
    made = samples.encode_batch(samples.batches()[name])
    assert (made.header.pack() + made.body).hex() == BATCHES[name]


def _without_body(header: batch.BatchHeader) -> dict[str, int]:
    """Compressors may change from release to release, so a compressed body has no fixed length and checksum."""
    fields = msgspec.structs.asdict(header)
    return {name: value for name, value in fields.items() if name not in ("body_length", "body_crc")}
