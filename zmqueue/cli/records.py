"""Records as JSON and back: text where it is UTF-8, else {"base64": …}, so that nothing is lost."""

from __future__ import annotations

import base64
import json
from typing import Any, NamedTuple, Protocol


class Rec(Protocol):
    """What a record has, whether it came from a consumer or from a file."""

    @property
    def offset(self) -> int: ...
    @property
    def timestamp(self) -> int: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Any: ...


def record_fields(record: Rec) -> dict[str, Any]:
    return {
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": readable(record.key),
        "value": readable(record.value),
        "headers": [[name, readable(value)] for name, value in record.headers or ()],
    }


def as_line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


def readable(raw: bytes | None) -> Any:
    if raw is None:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw).decode()}


class Line(NamedTuple):
    """A record as an exported line gives it."""

    partition: int | None
    timestamp: int | None
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


def parse_line(line: bytes) -> Line:
    """Raises ValueError, whose text says what is wrong with the line."""
    try:
        fields = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(fields, dict):
        raise ValueError("not an object")
    if "value" not in fields:
        raise ValueError("no value")
    headers = fields.get("headers") or []
    if not isinstance(headers, list):
        raise ValueError("headers: not a list")
    return Line(
        _whole(fields, "partition"),
        _whole(fields, "timestamp"),
        _raw(fields.get("key"), "key"),
        _raw(fields["value"], "value"),
        [_header(pair) for pair in headers],
    )


def _whole(fields: dict[str, Any], name: str) -> int | None:
    number = fields.get(name)
    if number is None:
        return None
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise ValueError(f"{name}: not a whole number")
    return number


def _raw(value: Any, name: str) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and list(value) == ["base64"] and isinstance(value["base64"], str):
        return base64.b64decode(value["base64"], validate=True)
    raise ValueError(f'{name}: neither text, null nor {{"base64": …}}')


def _header(pair: Any) -> tuple[str, bytes | None]:
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
        raise ValueError("headers: not pairs of a name and a value")
    return pair[0], _raw(pair[1], "headers")
