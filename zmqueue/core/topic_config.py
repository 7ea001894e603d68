"""The settings that a topic can have: their names (Kafka's), their checks, and what follows when one is not given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches

from zmqueue.errors import InvalidConfig

STORAGES = ("disk", "memory")


def _positive(name: str, text: str) -> None:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise InvalidConfig(f"{name}={text!r}: a whole number from 1 up")


def _storage(name: str, text: str) -> None:
    if text not in STORAGES:
        raise InvalidConfig(f"{name}={text!r}: one of {', '.join(STORAGES)}")


SETTINGS: dict[str, Callable[[str, str], None]] = {
    "min.insync.replicas": _positive,
    "storage.mode": _storage,
}


def check(config: Mapping[str, str]) -> None:
    """Raises InvalidConfig for an unknown name (with the nearest known one) or a value out of range."""
    for name, text in config.items():
        if name not in SETTINGS:
            near = get_close_matches(name, SETTINGS, 1)
            raise InvalidConfig(f"no topic setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        SETTINGS[name](name, text)


def storage(config: Mapping[str, str], default: str) -> str:
    return config.get("storage.mode", default)


def min_insync_replicas(config: Mapping[str, str], replication_factor: int, storage_mode: str) -> int:
    """1 where one disk is promise enough; 2 for memory, and where three or more replicas are kept."""
    given = config.get("min.insync.replicas")
    if given is not None:
        return int(given)
    return min(replication_factor, 2) if storage_mode == "memory" or replication_factor >= 3 else 1
