"""Records as columns on their way into batches: checked, measured and cut without an object per record.

Sizes are upper bounds of what a record takes in an encoded batch, so that a batch never turns out larger than planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from zmqueue.client.buffer import BYTES_OVERHEAD, HEADER_OVERHEAD, RECORD_OVERHEAD
from zmqueue.errors import InvalidRecord
from zmqueue.wire.batch import HEADERS_PER_RECORD_MAX

Header = tuple[str, bytes | None]


class Same(list[int]):
    """The sizes of records that all have the same: sums and maxima need no look at each."""


class Columns:
    """The columns of one `send_many`, or of those of its records that go to one partition."""

    __slots__ = ("headers", "keys", "sizes", "timestamps", "values")

    def __init__(
        self,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None,
        headers: Sequence[Any] | None,
        timestamps: Sequence[int] | int,
        sizes: Sequence[int],
    ) -> None:
        self.values, self.keys, self.headers, self.timestamps, self.sizes = values, keys, headers, timestamps, sizes

    def ends(self) -> Sequence[int]:
        """The size of everything before each record, and of everything at the end."""
        if isinstance(self.sizes, Same):
            return range(0, self.sizes[0] * (len(self.sizes) + 1), self.sizes[0])
        return list(accumulate(self.sizes, initial=0))

    def cut(self, at: int, end: int) -> tuple[Any, Any, Any, Any]:
        return (
            self.values[at:end],
            self.keys[at:end] if self.keys is not None else None,
            self.headers[at:end] if self.headers is not None else None,
            self.timestamps if isinstance(self.timestamps, int) else self.timestamps[at:end],
        )

    def picked(self, positions: Sequence[int]) -> Columns:
        def pick(column: Any) -> Any:
            return column if column is None or isinstance(column, int) else [column[at] for at in positions]

        return Columns(pick(self.values), pick(self.keys), pick(self.headers), pick(self.timestamps), pick(self.sizes))


def as_bytes(what: str, data: Any) -> bytes:
    if isinstance(data, bytearray | memoryview | bytes):
        return bytes(data)
    raise InvalidRecord(f"a {what} is bytes, not {type(data).__name__}: set {what}_serializer")


def as_headers(headers: Sequence[Header]) -> tuple[list[list[Any]], int]:
    """Headers as the wire has them, and their size."""
    if len(headers) > HEADERS_PER_RECORD_MAX:
        raise InvalidRecord(f"{len(headers)} headers: at most {HEADERS_PER_RECORD_MAX} are allowed")
    pairs: list[list[Any]] = []
    size = BYTES_OVERHEAD
    for name, value in headers:
        if type(name) is not str:
            raise InvalidRecord(f"the name of a header is a str, not {type(name).__name__}")
        data = None if value is None else as_bytes("header", value)
        try:
            size += len(name.encode()) + len(data or b"") + HEADER_OVERHEAD
        except UnicodeEncodeError:
            raise InvalidRecord("the name of a header is not Unicode text") from None
        pairs.append([name, data])
    return pairs, size


def bytes_column(what: str, column: Sequence[Any]) -> Sequence[bytes | None]:
    kinds = set(map(type, column))
    if kinds <= {bytes}:
        return column
    return [None if entry is None else as_bytes(what, entry) for entry in column]


def sizes_of(values: Sequence[bytes | None], keys: Sequence[bytes | None] | None) -> Sequence[int]:
    """An upper bound of what each record takes in a batch."""
    sizes: Sequence[int]
    try:
        lengths = set(map(len, values))  # type: ignore[arg-type]
    except TypeError:
        sizes = [RECORD_OVERHEAD + len(value or b"") for value in values]
    else:
        # Values of one length are common enough to be worth a short cut.
        if len(lengths) == 1:
            sizes = Same([RECORD_OVERHEAD + lengths.pop()] * len(values))
        else:
            sizes = list(map(RECORD_OVERHEAD.__add__, map(len, values)))  # type: ignore[arg-type]
    if keys is None:
        return sizes
    return [size + len(key or b"") + BYTES_OVERHEAD for size, key in zip(sizes, keys, strict=True)]


def largest(sizes: Sequence[int]) -> int:
    return sizes[0] if isinstance(sizes, Same) else max(sizes, default=0)
