"""Avro values, whose schema evolves: a record has its Avro body alone, and the fingerprint of its schema in a header.

The writer's schema comes from the topic of schemas (schemas.py says why it cannot be lost), once per schema and client.
A reader schema makes every record look as the consumer expects, whatever it was written with: fields that are missing
take the reader's defaults, those it does not know are dropped, aliases find renamed ones, and numbers are promoted.

fastavro is the extra `avro`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from io import BytesIO
from itertools import pairwise
from typing import Any

from zmqueue.client.arrow import extra
from zmqueue.client.avro_bounds import depth_of
from zmqueue.client.schemas import SCHEMAS_TOPIC, SchemaStore, canonical, fingerprint_of
from zmqueue.client.serializers import Deserializer, Serializer
from zmqueue.errors import ConfigError, IllegalState, UnknownSchema

DEPTH_MAX = 64
HEADERS = {"value": "avro", "key": "avro-key"}


class AvroSerializer(Serializer):
    """Writes values of one schema: JSON text, or the same as Python objects.

    The first record waits until the schema is stored; `store` does that beforehand. What a value has beyond the fields
    of the schema is an error.
    """

    def __init__(self, schema: Any, *, schemas_topic: str = SCHEMAS_TOPIC) -> None:
        fastavro = extra("fastavro", "avro", "AvroSerializer")
        plain = _schema(schema)
        self._text = canonical(plain)
        self.fingerprint = fingerprint_of(self._text)
        self._parsed = _parsed(plain)
        self._write = fastavro.schemaless_writer
        self._topic = schemas_topic
        self._store: SchemaStore | None = None
        self._stored = False
        self.headers: list[tuple[str, bytes]] = []

    def attach(self, bootstrap_servers: str, what: str) -> None:
        headers = [(HEADERS[what], self.fingerprint)]
        if self._store is None:
            self._store, self.headers = SchemaStore(bootstrap_servers, self._topic), headers
        elif (self._store.bootstrap_servers, self.headers) != (bootstrap_servers, headers):
            raise ConfigError("an AvroSerializer belongs to one cluster, and to keys or to values: make another one")

    def store(self) -> None:
        """Have the schema in the cluster, and wait until it is there to stay."""
        if self._store is None:
            raise IllegalState("an AvroSerializer works as a serializer of a Producer")
        self._store.store(self._text)
        self._stored = True

    def serialize(self, topic: str, value: Any) -> bytes | None:
        return self.serialize_many(topic, [value])[0]

    def serialize_many(self, topic: str, values: Sequence[Any]) -> list[bytes | None]:
        if not self._stored:
            self.store()
        out = BytesIO()
        ends = [0]
        for value in values:
            if value is not None:
                self._write(out, self._parsed, value, strict_allow_default=True)
            ends.append(out.tell())
        data = out.getvalue()
        return [
            None if value is None else data[at:end] for value, (at, end) in zip(values, pairwise(ends), strict=True)
        ]


class AvroDeserializer(Deserializer):
    """Reads values of whatever schema they were written with, as `reader_schema` has them where it is given.

    `writer_schema` is for records that name none: those that something else has written.
    """

    def __init__(
        self, reader_schema: Any = None, *, writer_schema: Any = None, schemas_topic: str = SCHEMAS_TOPIC
    ) -> None:
        extra("fastavro", "avro", "AvroDeserializer")
        self._reader_schema = None if reader_schema is None else _parsed(_schema(reader_schema))
        self._topic = schemas_topic
        self._store: SchemaStore | None = None
        self._header = HEADERS["value"]
        self._readers: dict[bytes | None, Callable[[bytes], Any]] = {}
        if writer_schema is not None:
            self._readers[None] = self._made(_parsed(_schema(writer_schema)))

    def attach(self, bootstrap_servers: str, what: str) -> None:
        if self._store is None:
            self._store, self._header = SchemaStore(bootstrap_servers, self._topic), HEADERS[what]
        elif (self._store.bootstrap_servers, self._header) != (bootstrap_servers, HEADERS[what]):
            raise ConfigError("an AvroDeserializer belongs to one cluster, and to keys or to values: make another one")

    def deserialize(self, topic: str, data: bytes) -> Any:
        """Without headers to look at: by `writer_schema`."""
        return self._reader(None)(data)

    def deserialize_many(
        self, topic: str, column: Sequence[bytes | None], headers: Sequence[Any] | None
    ) -> tuple[list[Any], Exception | None]:
        found: list[Any] = []
        try:
            for data, row in zip(column, headers or [None] * len(column), strict=True):
                found.append(None if data is None else self._reader(self._fingerprint(row))(data))
        except Exception as error:
            return found, error
        return found, None

    def _fingerprint(self, row: Any) -> bytes | None:
        """A header of this name that was there before stands before ours."""
        found = None
        for name, data in row or ():
            if name == self._header:
                found = data
        return found

    def _reader(self, fingerprint: bytes | None) -> Callable[[bytes], Any]:
        reader = self._readers.get(fingerprint)
        if reader is None:
            if fingerprint is None:
                raise UnknownSchema(f"no header {self._header!r} names a schema, and no writer_schema was given")
            if self._store is None:
                raise IllegalState("an AvroDeserializer works as a deserializer of a Consumer")
            text = self._store.find(fingerprint)
            reader = self._readers[fingerprint] = self._made(_parsed(json.loads(text)))
        return reader

    def _made(self, writer_schema: Any) -> Callable[[bytes], Any]:
        # What may nest deeply is read in Python, which ends that with an error and not with the process.
        name = "fastavro" if depth_of(writer_schema) <= DEPTH_MAX else "fastavro._read_py"
        read = extra(name, "avro", "AvroDeserializer").schemaless_reader
        # Resolving a schema with itself would only cost time.
        reader_schema = None if canonical(self._reader_schema) == canonical(writer_schema) else self._reader_schema

        def reader(data: bytes) -> Any:
            source = BytesIO(data)
            value = read(source, writer_schema, reader_schema)
            if source.tell() != len(data):
                raise ValueError(f"{len(data) - source.tell()} bytes follow the Avro value")
            return value

        return reader


def _schema(schema: Any) -> Any:
    """As Python objects. A text is JSON, but for the name of a primitive type."""
    if isinstance(schema, str) and schema[:1] in ("{", "[", '"'):
        try:
            return json.loads(schema)
        except ValueError as error:
            raise ConfigError(f"an Avro schema that is not JSON: {error}") from error
    return schema


def _parsed(schema: Any) -> Any:
    fastavro = extra("fastavro", "avro", "Avro")
    try:
        return fastavro.parse_schema(schema)
    except Exception as error:
        raise ConfigError(f"not an Avro schema: {type(error).__name__}: {error}") from error
