"""From objects to the bytes of keys and values, and back.

A serializer is a name ("json", "string", "bytes", "cbor"), a callable, or an object (or its class) with the method
`serialize(topic, value)`, as kafka-python has them; a deserializer one with `deserialize(topic, data)`, or also "avro".
Objects may have more, which is used where it is there:

    serialize_many(topic, values)                a list as long as `values`
    deserialize_many(topic, column, headers)     (what was made before the first failure, that failure or None)
    headers                                      what goes along with every record, as [(name, bytes), …]
    attach(bootstrap_servers, what)              called by the client that uses it, as `what`: "key" or "value"
    close()                                      called when that client is closed

None is no value (a tombstone) to the serializers here, and stays None; a deserializer of any kind never sees one.
Whatever an application's own code raises arrives as SerializationError or DeserializationError, with it as the cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from io import BytesIO
from typing import Any

import cbor2
import msgspec

from zmqueue.errors import ConfigError, SerializationError, ZmqueueError
from zmqueue.model import KiB

CBOR_DEPTH_MAX = 64
# Text and epoch times, big numbers, decimals, UUIDs, IP addresses, dates, sets, and "this is CBOR". Left out are those
# that run something (35 patterns, 36 mail), make cycles (25, 28, 29), or cost more than they weigh (5, 30).
CBOR_TAGS = frozenset({0, 1, 2, 3, 4, 37, 52, 54, 100, 258, 260, 261, 1004, 55799})


class Serializer:
    """Made for kafka-python's users to derive from; anything with such a method does."""

    def serialize(self, topic: str, value: Any) -> bytes | None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Deserializer:
    def deserialize(self, topic: str, data: bytes) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass


class BytesSerializer(Serializer):
    def serialize(self, topic: str, value: Any) -> bytes | None:
        if value is None or type(value) is bytes:
            return value
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        raise TypeError(f"bytes are needed, not {type(value).__name__}")


class BytesDeserializer(Deserializer):
    def deserialize(self, topic: str, data: bytes) -> bytes:
        return data


class StringSerializer(Serializer):
    def __init__(self, encoding: str = "utf-8") -> None:
        self._encoding = encoding

    def serialize(self, topic: str, value: Any) -> bytes | None:
        if value is None:
            return None
        if not isinstance(value, str):
            raise TypeError(f"a str is needed, not {type(value).__name__}")
        return value.encode(self._encoding)


class StringDeserializer(Deserializer):
    def __init__(self, encoding: str = "utf-8") -> None:
        self._encoding = encoding

    def deserialize(self, topic: str, data: bytes) -> str:
        return data.decode(self._encoding)


class JsonSerializer(Serializer):
    """Whatever msgspec can write: plain values, dataclasses, datetimes (ISO 8601), bytes (base64), UUIDs, …"""

    def __init__(self) -> None:
        self._encode = msgspec.json.Encoder(enc_hook=_not_json).encode

    def serialize(self, topic: str, value: Any) -> bytes | None:
        return None if value is None else self._encode(value)

    def serialize_many(self, topic: str, values: Sequence[Any]) -> list[bytes | None]:
        encode = self._encode
        return [None if value is None else encode(value) for value in values]


class JsonDeserializer(Deserializer):
    """Plain values; or objects of a type (a dataclass, a TypedDict, a msgspec.Struct), with what they hold checked."""

    def __init__(self, type: Any = Any) -> None:
        self._decode = msgspec.json.Decoder(type).decode

    def deserialize(self, topic: str, data: bytes) -> Any:
        return self._decode(data)


class CborSerializer(Serializer):
    """CBOR with its ordinary types: also datetimes (with a timezone), dates, decimals, UUIDs, sets, big integers."""

    def serialize(self, topic: str, value: Any) -> bytes | None:
        return None if value is None else cbor2.dumps(value, encoders=_NOT_CBOR)


class CborDeserializer(Deserializer):
    """What CborSerializer writes, whoever wrote it. Every other tag is refused, as is whatever follows the value.

    `strict_keys` takes only text and bytes as keys of maps and members of sets. A record of a megabyte can be made so
    that its integers all collide in a dict, which then takes minutes to fill: set it where producers are not trusted.
    """

    def __init__(self, strict_keys: bool = False) -> None:
        self._strict_keys = strict_keys

    def deserialize(self, topic: str, data: bytes) -> Any:
        source = BytesIO(data)
        value = cbor2.CBORDecoder(
            source,
            read_size=4 * KiB,
            max_depth=CBOR_DEPTH_MAX,
            strict_hashable_types=self._strict_keys,
            semantic_decoders=_ORDINARY_TAGS,
        ).decode()
        if source.tell() != len(data):
            raise ValueError(f"{len(data) - source.tell()} bytes follow the CBOR value")
        return value


class _OrdinaryTags(dict[int, Any]):
    """A table of tag decoders that leaves the ordinary ones to cbor2, and has a refusal for each of the others."""

    def __missing__(self, tag: int) -> Any:
        if tag in CBOR_TAGS:
            raise KeyError(tag)

        def refuse(*_: object) -> None:
            raise ValueError(f"CBOR tag {tag} is not allowed")

        return refuse


def _not_json(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _not_cbor(_: Any, value: Any) -> None:
    raise TypeError(f"{type(value).__name__} is refused by those who read it")


_ORDINARY_TAGS = _OrdinaryTags()
_NOT_CBOR: dict[type, Any] = dict.fromkeys((Fraction, re.Pattern, cbor2.CBORTag), _not_cbor)

SERIALIZERS: dict[str, Callable[[], Serializer]] = {
    "bytes": BytesSerializer,
    "cbor": CborSerializer,
    "json": JsonSerializer,
    "string": StringSerializer,
}


def _avro() -> Deserializer:
    from zmqueue.client.avro import AvroDeserializer  # which itself needs a consumer

    return AvroDeserializer()


DESERIALIZERS: dict[str, Callable[[], Deserializer]] = {
    "avro": _avro,
    "bytes": BytesDeserializer,
    "cbor": CborDeserializer,
    "json": JsonDeserializer,
    "string": StringDeserializer,
}


class Serializing:
    """A serializer as the producer calls it: of any kind, and with typed errors."""

    __slots__ = ("_many", "_one", "headers", "source", "what")

    def __init__(self, what: str, source: Any) -> None:
        """`what` is "key" or "value"."""
        source = _found(source, SERIALIZERS, f"{what}_serializer", "serialize")
        self.what, self.source = what, source
        # An object's methods take the topic, a plain callable only the value.
        method = getattr(source, "serialize", None)
        self._one: Callable[[str, Any], Any] = method if method is not None else lambda topic, value: source(value)
        self._many: Callable[[str, Sequence[Any]], Any] | None = getattr(source, "serialize_many", None)
        self.headers: Sequence[tuple[str, bytes | None]] = ()

    def attach(self, bootstrap_servers: str) -> None:
        _attach(self.source, bootstrap_servers, self.what)
        self.headers = tuple(getattr(self.source, "headers", ()))

    def one(self, topic: str, value: Any) -> Any:
        try:
            return self._one(topic, value)
        except Exception as error:
            raise self._failure(topic, error) from error

    def many(self, topic: str, values: Sequence[Any]) -> Sequence[Any]:
        """Raises SerializationError if one of them cannot be serialized; then nothing is sent."""
        one = self._one
        try:
            if self._many is None:
                return [one(topic, value) for value in values]
            found = self._many(topic, values)
        except Exception as error:
            raise self._failure(topic, error) from error
        if len(found) != len(values):
            raise SerializationError(f"serialize_many made {len(found)} of {len(values)} {self.what}s for {topic}")
        return found

    def _failure(self, topic: str, error: Exception) -> ZmqueueError:
        # What passes with time (no broker to ask for a schema) is no fault of the value.
        if isinstance(error, ZmqueueError) and not isinstance(error, SerializationError):
            return error
        return SerializationError(f"a {self.what} for {topic}: {error}")

    def close(self) -> None:
        _close(self.source)


class Deserializing:
    """A deserializer as the consumer calls it: of any kind, by the column."""

    __slots__ = ("_many", "_one", "source", "what")

    def __init__(self, what: str, source: Any) -> None:
        source = _found(source, DESERIALIZERS, f"{what}_deserializer", "deserialize")
        self.what, self.source = what, source
        method = getattr(source, "deserialize", None)
        self._one: Callable[[str, bytes], Any] = method if method is not None else lambda topic, data: source(data)
        self._many: Callable[..., tuple[list[Any], Exception | None]] | None = getattr(source, "deserialize_many", None)

    def attach(self, bootstrap_servers: str) -> None:
        _attach(self.source, bootstrap_servers, self.what)

    def many(
        self, topic: str, column: Sequence[bytes | None], headers: Sequence[Any] | None
    ) -> tuple[list[Any], Exception | None]:
        """The objects up to the first entry that cannot be made into one, and what it failed with."""
        if self._many is not None:
            return self._many(topic, column, headers)
        found: list[Any] = []
        one, take = self._one, found.append
        try:
            for data in column:
                take(None if data is None else one(topic, data))
        except Exception as error:
            return found, error
        return found, None

    def close(self) -> None:
        _close(self.source)


def serializing(what: str, source: Any) -> Serializing | None:
    return None if source is None else Serializing(what, source)


def deserializing(what: str, source: Any) -> Deserializing | None:
    return None if source is None else Deserializing(what, source)


def deserializers(bootstrap_servers: str, key: Any, value: Any) -> tuple[Deserializing | None, Deserializing | None]:
    """A consumer's two, ready for use."""
    found = deserializing("key", key), deserializing("value", value)
    for each in found:
        if each is not None:
            each.attach(bootstrap_servers)
    return found


def _found(source: Any, named: dict[str, Callable[[], Any]], option: str, method: str) -> Any:
    if isinstance(source, str):
        if source not in named:
            raise ConfigError(f"{option}: {source!r} is not one of {', '.join(named)}")
        return named[source]()
    if isinstance(source, type) and hasattr(source, method):
        return source()
    if not hasattr(source, method) and not callable(source):
        raise ConfigError(f"{option}: neither a name, nor callable, nor an object with a method {method!r}")
    return source


def _attach(source: Any, bootstrap_servers: str, what: str) -> None:
    attach = getattr(source, "attach", None)
    if attach is not None:
        attach(bootstrap_servers, what)


def _close(source: Any) -> None:
    close = getattr(source, "close", None)
    if callable(close):
        close()
