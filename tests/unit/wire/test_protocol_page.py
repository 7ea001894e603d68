"""docs/protocol.md says what the code does, where that can be checked."""

from __future__ import annotations

from tests.golden import samples, tables
from zmqueue import errors
from zmqueue.wire import batch, cbor, frames

PAGE = tables.PAGE.read_text()


def test_the_tables_are_those_of_the_code():
    """After an intended change: python -m tests.golden.tables --write"""
    assert tables.rewritten(PAGE) == PAGE


def test_every_operation_is_documented():
    for operation in frames.Operation:
        assert f"| {int(operation)} | {operation.name} |" in PAGE


def test_every_error_is_documented():
    for code, cls in errors.BY_CODE.items():
        assert f"| {code} | {errors.error_name(cls)} |" in PAGE


def test_every_message_is_documented():
    for name in samples.message_types():
        assert f"| `{name}` |" in PAGE


def test_the_fields_of_the_batch_header_stand_where_the_page_says():
    rows = [
        line.split("|")[1:4]
        for line in PAGE.partition("## The record batch")[2].splitlines()
        if line[:3].strip("| ").isdigit()
    ]
    at = 0
    for position, size, _ in rows[:17]:
        assert int(position) == at
        at += int(size)
    assert at == batch.HEADER_BYTES
    names = [name.strip() for _, _, name in rows[:17]]
    assert set(batch.BatchHeader.__struct_fields__) <= set(names)


def test_limits_are_documented():
    assert f"at most\n{frames.FRAMES_MAX:,} frames" in PAGE
    assert f"nesting deeper than {cbor.DEPTH_MAX}" in PAGE
    assert f"at most {batch.HEADERS_PER_RECORD_MAX} pairs" in PAGE
    for name, number in batch.CODECS.items():
        assert f"{number} {name}" in PAGE
