"""Options of a consumer that take more than one form."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from zmqueue.client.slots import Reset
from zmqueue.errors import ConfigError
from zmqueue.model import EARLIEST, LATEST

RESETS: dict[str, Reset] = {"earliest": EARLIEST, "latest": LATEST, "none": None}


def reset_of(option: Any) -> Reset:
    """A name, a point in time (ms, or a datetime), or how long ago (a timedelta)."""
    if isinstance(option, str) and option in RESETS:
        return RESETS[option]
    if isinstance(option, datetime):
        return max(0, int(option.timestamp() * 1000))
    if isinstance(option, timedelta) and option >= timedelta(0):
        return option
    if isinstance(option, int) and not isinstance(option, bool) and option >= 0:
        return option
    raise ConfigError(
        f"auto_offset_reset: {option!r} is not one of {', '.join(RESETS)}, nor a time in ms, a datetime or a timedelta"
    )


def assignor_of(option: Any) -> str:
    """The name of an assignor that the brokers know. Of a list the first; of a class its name."""
    if isinstance(option, list | tuple):
        if not option:
            raise ConfigError("partition_assignment_strategy: the list is empty")
        option = option[0]
    name = option if isinstance(option, str) else getattr(option, "name", None)
    if not isinstance(name, str) or not 0 < len(name) <= 249:
        raise ConfigError(f"partition_assignment_strategy: {option!r} is not the name of an assignor")
    return name


def check_at_least(least: float, **settings: float) -> None:
    for name, value in settings.items():
        if not value >= least:
            raise ConfigError(f"{name}: {value!r} is below {least}")


def check_group(group: str, instance: str | None, session_ms: float, heartbeat_ms: float) -> None:
    for name, value in (("group_id", group), ("group_instance_id", instance)):
        if value is not None and not (isinstance(value, str) and 0 < len(value) <= 249):
            raise ConfigError(f"{name}: {value!r:.80} is not a text of 1 to 249 characters")
    if not heartbeat_ms < session_ms:
        raise ConfigError(f"heartbeat_interval_ms: {heartbeat_ms} is not below session_timeout_ms, {session_ms}")


def names_of(topics: str | Iterable[str]) -> list[str]:
    return [topics] if isinstance(topics, str) else list(topics)
