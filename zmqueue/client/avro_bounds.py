"""What a schema lets a record of a few bytes do to its reader.

fastavro follows a schema in C, without a look at the stack or at counts: a value that nests deeply ends the process,
and an array whose items take no bytes is as long as it claims to be. So schemas are looked at before anything is read
with them.
"""

from __future__ import annotations

import math
from typing import Any

from zmqueue.errors import ConfigError

_BYTES_MIN = {"null": 0, "boolean": 1, "int": 1, "long": 1, "float": 4, "double": 8, "bytes": 1, "string": 1}


def depth_of(schema: Any) -> float:
    """How deep values can nest: infinitely where a type holds itself. Raises ConfigError for arrays of nothing."""
    try:
        return _Walk().bounds(schema)[0]
    except RecursionError:
        return math.inf


class _Walk:
    """Over a schema as fastavro parses it: full names, each defined where it comes first."""

    def __init__(self) -> None:
        self._named: dict[str, tuple[float, float]] = {}

    def bounds(self, schema: Any) -> tuple[float, float]:
        """Depth, and the fewest bytes, of a value."""
        if isinstance(schema, str):
            return (1, _BYTES_MIN[schema]) if schema in _BYTES_MIN else self._named[schema]
        if isinstance(schema, list):
            return 1 + max((self.bounds(branch)[0] for branch in schema), default=0), 1
        kind = schema["type"]
        if kind == "array":
            depth, fewest = self.bounds(schema["items"])
            if not fewest:
                raise ConfigError("an Avro array of items without bytes: any number of them fits into any record")
            return 1 + depth, 1
        if kind == "map":
            return 1 + self.bounds(schema["values"])[0], 1
        if kind in ("record", "error"):
            return self._record(schema)
        if kind in ("enum", "fixed"):
            found = (1, schema["size"] if kind == "fixed" else 1)
            self._named[schema["name"]] = found
            return found
        return self.bounds(kind)

    def _record(self, schema: Any) -> tuple[float, float]:
        # Whoever meets the name meanwhile is within the record. A value that ends takes a byte to say so on the way.
        self._named[schema["name"]] = (math.inf, 1)
        fields = [self.bounds(field["type"]) for field in schema["fields"]]
        found = 1 + max((depth for depth, _ in fields), default=0), sum(fewest for _, fewest in fields)
        self._named[schema["name"]] = found
        return found
