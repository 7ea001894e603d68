"""What values a record has in a field, for every kind of field and every kind of value."""

from __future__ import annotations

import json
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqueue.wire.batch import Columns
from zmqueue.wire.fields import Field, canonical

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary())


def values(kind: str, path: str, value: bytes | None, headers: Any = None) -> set[bytes]:
    columns = Columns(None, None, [b"before", value], [None, headers] if headers is not None else None, None)
    field = Field(kind, path)
    found = field.of(columns, 1)
    assert {form for nth, form in field.each(columns) if nth == 1} == found
    return found


@pytest.mark.parametrize(
    ("value", "form"),
    [
        ("größe", "größe".encode()),
        (b"\xff\x00", b"\xff\x00"),
        (42, b"42"),
        (42.0, b"42"),
        (-0.0, b"0"),
        (0.1, b"0.1"),
        (1e300, b"1e+300"),
        (float("inf"), b"inf"),
        (2**80, b"1208925819614629174706176"),
        (True, b"true"),
        (False, b"false"),
        (None, b"null"),
        ([1], None),
        ({}, None),
        ("\ud800", None),
        (1 << 5000, None),
    ],
)
def test_a_scalar_has_one_form(value, form):
    assert canonical(value) == form


@given(scalars)
def test_every_scalar_is_found_by_itself_in_cbor(value):
    form = canonical(value)
    assert values("cbor", "a.b", cbor2.dumps({"a": {"b": value, "c": [1]}})) == ({form} if form is not None else set())


@given(st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text()))
def test_every_scalar_is_found_by_itself_in_json(value):
    form = canonical(value)
    if value in (float("inf"), float("-inf")):
        form = None  # JSON has no such numbers
    text = json.dumps({"x": [1, {"b": 2}], "a": {"b": value, "c": {}}}, ensure_ascii=True).encode()
    assert values("json", "a.b", text) == ({form} if form is not None else set())


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        ("a", b'{"a": "x"}', {b"x"}),
        ("a.b.c", b'{"a": {"b": {"c": 7}}}', {b"7"}),
        ("/a.b/c", b'{"a.b": {"c": 7}}', {b"7"}),
        ('quo"ted', b'{"quo\\"ted": 1}', {b"1"}),
        ("a.b", b'{"a": null}', set()),
        ("a.b", b'{"a": "text"}', set()),
        ("a.b", b'{"a": {"c": 1}}', set()),
        ("a", b'{"a": [1]}', set()),
        ("a", b'{"a": {"b": 1}}', set()),
        ("a", b'{"a": 1, "a": 2}', {b"2"}),
        ("a", b"[1, 2]", set()),
        ("a", b'"a"', set()),
        ("a", b'{"a": 1', set()),
        ("a", b'{"a": 1} and more', set()),
        ("a", b"\xff\xfe", set()),
        ("a", b"", set()),
        ("a", b"[" * 100_000, set()),
        ("a", b'{"a": 1e999}', set()),
    ],
)
def test_json_paths(path, text, found):
    assert values("json", path, text) == found


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (cbor2.dumps({"a": cbor2.CBORTag(1, 5)}), set()),
        (cbor2.dumps({"when": cbor2.CBORTag(0, "2025-01-31T12:00:00Z"), "a": 1}), {b"1"}),
        (bytes.fromhex("bf61610500") + b"\xff", set()),
        (bytes.fromhex("bf616105ff"), {b"5"}),
        (cbor2.dumps({"a": cbor2.CBORTag(2, "text")}), set()),
        (cbor2.dumps({"a": -(2**70)}), {b"-1180591620717411303424"}),
        (b"\x9f" * 1000, set()),
        (b"", set()),
        (b"\xff", set()),
        (cbor2.dumps([1]), set()),
    ],
)
def test_cbor_that_is_not_plain(data, found):
    assert values("cbor", "a", data) == found


def test_a_record_has_all_values_of_its_headers_of_that_name():
    headers = [["k", b"1"], ["other", b"2"], ["k", b"\xff"], ["k", b"1"], ["k", None]]
    assert values("header", "k", b"", headers) == {b"1", b"\xff"}
    assert values("header", "absent", b"", headers) == set()
    assert values("header", "k", b"", []) == set()
    assert values("header", "k", b"") == set()
    assert values("json", "a", None) == set()
