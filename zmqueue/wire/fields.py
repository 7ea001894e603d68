"""The field of a record that a topic is indexed by: what it is called, and what values a record has in it.

    header:NAME   the values of the record's headers of that name, as they are; a record may have several
    json:PATH     one scalar of a JSON value
    cbor:PATH     one scalar of a CBOR value

A path names the keys of nested objects, joined by dots (`order.customer.id`); one that begins with a slash is cut at
slashes instead (`/order/customer.id`), for keys with dots in them.

Values are compared as bytes, in one form for each: text as UTF-8, bytes as they are, numbers as shortest text (`42` for
42 and 42.0), and `true`, `false`, `null`. So the number 42 and the text "42" are the same value. A record has no value
where the field is absent, an object or an array, or where its value is not JSON or CBOR at all.

An index is built by one process and its answers are checked by another: both come here, so both see the same values.
The form of values is therefore part of the format of index files (log/keys.py): whoever changes one raises the other's
version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import cbor2
import msgspec
from msgspec import UNSET, UnsetType

from zmqueue.wire.batch import Columns

KINDS = ("header", "json", "cbor")
_CBOR_DEPTH_MAX = 64
_EXACT_MAX = 1 << 53  # whole numbers that a float holds exactly

Scalar = str | bytes | int | float | bool | None


def canonical(value: Any) -> bytes | None:
    """The one form of a scalar; None for what is none."""
    match value:
        case str():
            try:
                return value.encode()
            except UnicodeEncodeError:
                return None
        case bytes():
            return value
        case None:
            return b"null"
        case bool():
            return b"true" if value else b"false"
        case int():
            # Longer numbers would be turned into text in quadratic time, if at all.
            return b"%d" % value if value.bit_length() <= 1024 else None
        case float():
            return b"%d" % value if value.is_integer() and abs(value) <= _EXACT_MAX else repr(value).encode()
    return None


class Field:
    """What is indexed. `of` gives the values of one record, `each` those of a whole batch."""

    def __init__(self, kind: str, path: str) -> None:
        assert kind in KINDS, kind
        self.kind = kind
        self.path = path
        self._open: Callable[[bytes], Any] | None = None
        if kind != "header":
            keys = path[1:].split("/") if path.startswith("/") else path.split(".")
            self._open = _json(keys) if kind == "json" else _cbor(keys)

    @property
    def definition(self) -> tuple[str, str]:
        return self.kind, self.path

    def of(self, columns: Columns, nth: int) -> set[bytes]:
        if self._open is None:
            pairs = columns.headers[nth] if columns.headers is not None else None
            return {value for name, value in pairs or () if name == self.path and value is not None}
        value = columns.values[nth]
        form = None if value is None else self._open(value)
        return set() if form is None else {form}

    def each(self, columns: Columns) -> Iterator[tuple[int, bytes]]:
        """Position in the batch and value; a record's values differ from each other."""
        if self._open is not None:
            look = self._open
            for nth, value in enumerate(columns.values):
                if value is not None and (form := look(value)) is not None:
                    yield nth, form
            return
        path = self.path
        for nth, pairs in enumerate(columns.headers or ()):
            if not pairs:
                continue
            if len(pairs) == 1:
                name, value = pairs[0]
                if name == path and value is not None:
                    yield nth, value
            else:
                for value in self.of(columns, nth):
                    yield nth, value


def _json(keys: list[str]) -> Callable[[bytes], bytes | None]:
    try:
        decode = msgspec.json.Decoder(_shape(keys)).decode
    except ValueError:
        # A key that cannot be the name of a field: everything is decoded then.
        return _walked(msgspec.json.decode, keys)
    depth = len(keys)

    def look(value: bytes) -> bytes | None:
        try:
            found = decode(value)
        except (ValueError, RecursionError):
            return None
        for _ in range(depth):
            if found is UNSET:
                return None
            found = found.x
        return None if found is UNSET else canonical(found)

    return look


def _shape(keys: list[str]) -> Any:
    """A type with nothing but the path in it: what lies beside it is skipped without being made."""
    inner: Any = Any
    for key in reversed(keys):
        inner = msgspec.defstruct(
            "Shape", [("x", inner | UnsetType if inner is not Any else Any, UNSET)], rename={"x": key}
        )
    return inner


def _cbor(keys: list[str]) -> Callable[[bytes], bytes | None]:
    return _walked(_decode_cbor, keys)


def _walked(decode: Callable[[bytes], Any], keys: list[str]) -> Callable[[bytes], bytes | None]:
    def look(value: bytes) -> bytes | None:
        try:
            found = decode(value)
        except (ValueError, RecursionError, OverflowError, MemoryError, TypeError):
            return None
        for key in keys:
            if type(found) is not dict or key not in found:
                return None
            found = found[key]
        return canonical(found)

    return look


class _Opaque:
    """What a tag means is not our business, and some meanings are dangerous to make."""


def _opaque(*_: object) -> _Opaque:
    return _Opaque()


def _large(value: object, *_: object) -> object:
    """A number of more than 64 bits; how long a number may be is said in `canonical`."""
    return int.from_bytes(value, "big") if isinstance(value, bytes) else _Opaque()


def _large_negative(value: object, *_: object) -> object:
    return -1 - int.from_bytes(value, "big") if isinstance(value, bytes) else _Opaque()


class _AnyTag(dict[int, Any]):
    def __contains__(self, tag: object) -> bool:
        return True

    def __missing__(self, tag: int) -> Any:
        return {2: _large, 3: _large_negative}.get(tag, _opaque)

    def get(self, tag: int, default: Any = None) -> Any:
        return self[tag]


_ANY_TAG = _AnyTag()


def _decode_cbor(value: bytes) -> Any:
    source = BytesIO(value)
    try:
        found = cbor2.CBORDecoder(source, max_depth=_CBOR_DEPTH_MAX, semantic_decoders=_ANY_TAG).decode()
    except cbor2.CBORError as error:
        raise ValueError(str(error)) from error
    return found
