"""The settings that a topic can have: their names (Kafka's where Kafka has them), their checks, and what they mean.

Texts travel and are stored as they were given; `settings_of` makes of them what the log works with, with the broker's
own defaults where a topic says nothing. -1 means without limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches

from msgspec import Struct

from zmqueue.config import LogConfig
from zmqueue.errors import InvalidConfig

STORAGES = ("disk", "memory")
POLICIES = ("delete", "compact", "compact,delete", "delete,compact")
INDEXES = ("sparse", "dense")
UNLIMITED = -1
SEGMENT_BYTES_MIN = 1024
SEGMENT_BYTES_MAX = (1 << 32) - 1

_SECONDARY = re.compile(r"(header|json|cbor):(.{1,200})\Z", re.DOTALL)

Check = Callable[[str, str], None]


class TopicSettings(Struct, frozen=True):
    """What a partition's log is told. Limits in bytes are per partition."""

    deletes: bool  # old segments are removed
    compacts: bool  # of each key the latest record is kept
    retention_ms: int
    retention_bytes: int
    quota_bytes: int  # beyond it, records are refused
    segment_bytes: int
    segment_ms: int
    index_interval_bytes: int  # 0: an entry for every batch
    secondary: tuple[str, str] | None  # kind (header, json, cbor) and name or path of what is indexed
    dirty_ratio_min: float
    delete_retention_ms: int  # how long a tombstone stays after it was first compacted
    compaction_lag_ms_min: int


def _whole(least: int, most: int = (1 << 62)) -> Check:
    def check(name: str, text: str) -> None:
        if not re.fullmatch(r"-?[0-9]{1,19}", text, re.ASCII) or not least <= int(text) <= most:
            until = "" if most == 1 << 62 else f" to {most}"
            raise InvalidConfig(f"{name}={text!r}: a whole number from {least}{until or ' up'}")

    return check


def _one_of(*choices: str) -> Check:
    def check(name: str, text: str) -> None:
        if text not in choices:
            raise InvalidConfig(f"{name}={text!r}: one of {', '.join(choices)}")

    return check


def _ratio(name: str, text: str) -> None:
    if not re.fullmatch(r"0(\.[0-9]{1,9})?|1(\.0{1,9})?", text, re.ASCII):
        raise InvalidConfig(f"{name}={text!r}: a number from 0 to 1")


def _secondary(name: str, text: str) -> None:
    if _SECONDARY.match(text) is None:
        raise InvalidConfig(f"{name}={text!r}: header:NAME, json:PATH or cbor:PATH")


SETTINGS: dict[str, Check] = {
    "min.insync.replicas": _whole(1),
    "storage.mode": _one_of(*STORAGES),
    "cleanup.policy": _one_of(*POLICIES),
    "retention.ms": _whole(UNLIMITED),
    "retention.bytes": _whole(UNLIMITED),
    "quota.bytes": _whole(UNLIMITED),
    "segment.bytes": _whole(SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX),
    "segment.ms": _whole(1),
    "index.type": _one_of(*INDEXES),
    "index.interval.bytes": _whole(1, SEGMENT_BYTES_MAX),
    "index.secondary": _secondary,
    "min.cleanable.dirty.ratio": _ratio,
    "delete.retention.ms": _whole(0),
    "min.compaction.lag.ms": _whole(0),
}

# What a topic is made with, it keeps.
FIXED = {"storage.mode"}


def check(config: Mapping[str, str]) -> None:
    """Raises InvalidConfig for an unknown name (with the nearest known one) or a value out of range."""
    for name, text in config.items():
        _check_name(name)
        SETTINGS[name](name, text)


def _check_name(name: str) -> None:
    if name not in SETTINGS:
        near = get_close_matches(name, SETTINGS, 1)
        raise InvalidConfig(f"no topic setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def altered(present: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """A topic's settings with these changed, None taking one back. Raises InvalidConfig."""
    for name, text in changes.items():
        _check_name(name)
        if name in FIXED and text != present.get(name):
            raise InvalidConfig(f"{name} is fixed when a topic is created")
    config = {**present, **changes}
    kept = {name: text for name, text in config.items() if text is not None}
    check(kept)
    return kept


def settings_of(config: Mapping[str, str], defaults: LogConfig) -> TopicSettings:
    """Of a config that was checked."""

    def number(name: str, otherwise: int) -> int:
        return int(config.get(name, otherwise))

    policy = config.get("cleanup.policy", "delete").split(",")
    secondary = _SECONDARY.match(config.get("index.secondary", ""))
    interval = number("index.interval.bytes", defaults.index_interval_bytes)
    return TopicSettings(
        deletes="delete" in policy,
        compacts="compact" in policy,
        retention_ms=number("retention.ms", defaults.retention_ms),
        retention_bytes=number("retention.bytes", defaults.retention_bytes),
        quota_bytes=number("quota.bytes", UNLIMITED),
        segment_bytes=number("segment.bytes", defaults.segment_bytes_max),
        segment_ms=number("segment.ms", defaults.segment_ms),
        index_interval_bytes=0 if config.get("index.type") == "dense" else interval,
        secondary=(secondary[1], secondary[2]) if secondary else None,
        dirty_ratio_min=float(config.get("min.cleanable.dirty.ratio", "0.5")),
        delete_retention_ms=number("delete.retention.ms", defaults.delete_retention_ms),
        compaction_lag_ms_min=number("min.compaction.lag.ms", 0),
    )


def storage(config: Mapping[str, str], default: str) -> str:
    return config.get("storage.mode", default)


def min_insync_replicas(config: Mapping[str, str], replication_factor: int, storage_mode: str) -> int:
    """1 where one disk is promise enough; 2 for memory, and where three or more replicas are kept."""
    given = config.get("min.insync.replicas")
    if given is not None:
        return int(given)
    return min(replication_factor, 2) if storage_mode == "memory" or replication_factor >= 3 else 1


def check_min_insync(count: int, replication_factor: int) -> None:
    """Raises InvalidConfig. More than there are replicas could never commit anything."""
    if not 1 <= count <= replication_factor:
        raise InvalidConfig(f"min.insync.replicas={count} must be in 1..{replication_factor}")
