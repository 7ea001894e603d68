"""Which old records a topic no longer keeps. Decisions only: rows in, an offset out; the log acts (`delete_before`).

Whole segments go, from the first on, and never one that is appended to or reaches beyond what is committed. A rule says
how many of the rows it is done with; the rule that is done with most decides. Neither rule needs the other to be set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from zmqueue.core.topic_config import UNLIMITED, TopicSettings


class Row(NamedTuple):
    """A segment that is full. `max_timestamp` below 0: its records have none."""

    base: int
    next: int
    bytes: int
    max_timestamp: int


Rule = Callable[[Sequence[Row], int, TopicSettings, int], int]


def too_old(rows: Sequence[Row], log_bytes: int, settings: TopicSettings, now_ms: int) -> int:
    """Segments whose youngest record is older than retention_ms. Where no record has a time, age says nothing."""
    if settings.retention_ms == UNLIMITED:
        return 0
    limit = now_ms - settings.retention_ms
    return sum(1 for _ in takewhile(lambda row: 0 <= row.max_timestamp < limit, rows))


def too_much(rows: Sequence[Row], log_bytes: int, settings: TopicSettings, now_ms: int) -> int:
    """Segments without which retention_bytes are still left: at least that much is kept, as long as it is there."""
    if settings.retention_bytes == UNLIMITED:
        return 0
    spare, count = log_bytes - settings.retention_bytes, 0
    while count < len(rows) and spare >= rows[count].bytes:
        spare -= rows[count].bytes
        count += 1
    return count


RULES: tuple[Rule, ...] = (too_old, too_much)


def start_after(rows: Iterable[Row], log_bytes: int, settings: TopicSettings, committed: int, now_ms: int) -> int:
    """Where the log begins when its rules are done; -1 if nothing goes. `log_bytes` counts all of it.

    `committed`: the end of what is committed and durable here.
    """
    if not settings.deletes:
        return -1
    eligible = takewhile(lambda row: row.next <= committed, rows)
    # Mostly the first one stays, and then so do all: a log of thousands is looked at again and again.
    first = list(islice(eligible, 1))
    if not _done_with(first, log_bytes, settings, now_ms):
        return -1
    going = [*first, *eligible]
    return going[_done_with(going, log_bytes, settings, now_ms) - 1].next


def _done_with(rows: Sequence[Row], log_bytes: int, settings: TopicSettings, now_ms: int) -> int:
    return max(rule(rows, log_bytes, settings, now_ms) for rule in RULES)
