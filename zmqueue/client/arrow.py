"""Columns as Arrow has them, in and out, and pandas by way of Arrow.

In: `send_many` takes Arrow arrays and pandas Series for each of its columns. Text goes as UTF-8. Arrow itself makes the
bytes objects, one per record, of which the wire's columns consist; there is no other object per record.
Out: see `to_arrow`. pyarrow and pandas are extras, imported when somebody comes with their objects or asks for them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from zmqueue.errors import IllegalState, InvalidRecord

if TYPE_CHECKING:
    from zmqueue.client.records import RecordBatch

_FOREIGN = ("pyarrow", "pandas", "numpy")


def extra(module: str, name: str, call: str) -> Any:
    """A module of an optional dependency. Raises IllegalState, saying what to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise IllegalState(f"{call} needs {module}: pip install 'zmqueue[{name}]'") from None


def as_rows(
    values: Any, keys: Any, headers: Any, timestamps_ms: Any, text_as_bytes: tuple[bool, bool]
) -> tuple[Sequence[Any], Sequence[Any] | None, Sequence[Any] | None, Sequence[int] | int | None]:
    """The columns of a `send_many` as sequences. `text_as_bytes`: no serializer is waiting for text as (value, key)."""
    if type(values) is not list and _is_foreign(values):
        values = _bytes_or_objects(values, text_as_bytes[0])
    if keys is not None and _is_foreign(keys):
        keys = _bytes_or_objects(keys, text_as_bytes[1])
    if headers is not None and _is_foreign(headers):
        headers = _headers(headers)
    if timestamps_ms is not None and _is_foreign(timestamps_ms):
        timestamps_ms = _timestamps(timestamps_ms)
    return values, keys, headers, timestamps_ms


def _is_foreign(column: Any) -> bool:
    return type(column).__module__.partition(".")[0] in _FOREIGN and hasattr(column, "__len__")


def _array(column: Any) -> Any:
    """As an Arrow array, in one piece or in chunks. A value that pandas misses is null."""
    pyarrow = extra("pyarrow", "arrow", "a column that is no sequence")
    if isinstance(column, pyarrow.Array | pyarrow.ChunkedArray):
        found = column
    else:
        try:
            found = pyarrow.array(column, from_pandas=True)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
            raise InvalidRecord(f"a column that Arrow does not take: {error}") from error
    if pyarrow.types.is_dictionary(found.type):
        found = found.cast(found.type.value_type)
    return found


def _bytes_or_objects(column: Any, text_as_bytes: bool) -> Sequence[Any]:
    pyarrow = extra("pyarrow", "arrow", "a column that is no sequence")
    array = _array(column)
    types = pyarrow.types
    if text_as_bytes and (types.is_string(array.type) or types.is_large_string(array.type)):
        array = array.cast(pyarrow.large_binary() if types.is_large_string(array.type) else pyarrow.binary())
    rows: list[Any] = array.to_pylist()
    return rows


def _headers(column: Any) -> list[Any]:
    """Rows of (name, value): of a map, or of a list of structs with these two fields in this order."""
    rows: list[Any] = []
    for row in _array(column).to_pylist():
        if row is None:
            rows.append(None)
        else:
            rows.append([tuple(pair.values()) if isinstance(pair, dict) else tuple(pair) for pair in row])
    return rows


def _timestamps(column: Any) -> list[int]:
    pyarrow = extra("pyarrow", "arrow", "a column that is no sequence")
    array = _array(column)
    if array.null_count:
        raise InvalidRecord("timestamps_ms: some are null")
    if pyarrow.types.is_timestamp(array.type):
        array = array.cast(pyarrow.timestamp("ms", tz=array.type.tz), safe=False)
    try:
        found: list[int] = array.cast(pyarrow.int64()).to_pylist()
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
        raise InvalidRecord(f"timestamps_ms: {error}") from error
    return found


def to_arrow(batches: Iterable[RecordBatch]) -> Any:
    """The records of batches as one pyarrow.Table.

    Its columns: topic, partition, offset, timestamp, key, value, headers (null where a record has none). Keys and
    values are binary, or of the type that Arrow finds in what a deserializer made of them.
    """
    pyarrow = extra("pyarrow", "arrow", "to_arrow")
    pieces = [batch.to_arrow() for batch in batches]
    if not pieces:
        return _schema(pyarrow, pyarrow.binary(), pyarrow.binary()).empty_table()
    # Deserialized batches may differ: one has only nulls in a column, or whole numbers where another has fractions.
    return pyarrow.concat_tables(map(pyarrow.Table.from_batches, ([p] for p in pieces)), promote_options="permissive")


def to_pandas(batches: Iterable[RecordBatch]) -> Any:
    """The same as a pandas.DataFrame."""
    extra("pandas", "pandas", "to_pandas")
    return to_arrow(batches).to_pandas()


def batch_to_arrow(batch: RecordBatch) -> Any:
    pyarrow = extra("pyarrow", "arrow", "to_arrow")
    count = len(batch)
    keys = _column(pyarrow, batch.keys if batch.keys is not None else [None] * count, batch.keys_are_bytes)
    values = _column(pyarrow, batch.values, batch.values_are_bytes)
    schema = _schema(pyarrow, keys.type, values.type)
    headers = batch.headers if batch.headers is not None else [None] * count
    topics = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, pyarrow.int32()), [batch.topic])
    return pyarrow.record_batch(
        [
            topics,
            pyarrow.array([batch.partition] * count, pyarrow.int32()),
            pyarrow.array(batch.offsets, pyarrow.int64()),
            pyarrow.array(batch.timestamps, schema.field("timestamp").type),
            keys,
            values,
            pyarrow.array(
                [None if row is None else [{"name": name, "value": data} for name, data in row] for row in headers],
                schema.field("headers").type,
            ),
        ],
        schema=schema,
    )


def _column(pyarrow: Any, column: Sequence[Any], is_bytes: bool) -> Any:
    try:
        return pyarrow.array(column, pyarrow.binary()) if is_bytes else pyarrow.array(column)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError) as error:
        raise IllegalState(f"to_arrow: what the deserializer made has no common Arrow type: {error}") from error


def _schema(pyarrow: Any, key: Any, value: Any) -> Any:
    pair = pyarrow.struct([("name", pyarrow.string()), ("value", pyarrow.binary())])
    return pyarrow.schema(
        [
            ("topic", pyarrow.dictionary(pyarrow.int32(), pyarrow.string())),
            ("partition", pyarrow.int32()),
            ("offset", pyarrow.int64()),
            ("timestamp", pyarrow.timestamp("ms", tz="UTC")),
            ("key", key),
            ("value", value),
            ("headers", pyarrow.list_(pair)),
        ]
    )
