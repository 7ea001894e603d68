"""The offsets that one group has committed, and the commits that are being written.

Invariant: `committed` is what a replay of the log would give. A row takes effect when its record is replicated, never
when it is asked for; what is under way is remembered so that an older commit of the same member, coming late, is seen
to be one. Such a row changes nothing and ends as the newer one does.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, field

from zmqueue.core.effects import Token
from zmqueue.model import PartitionKey
from zmqueue.wire.group_messages import CommitRow
from zmqueue.wire.group_records import CommittedOffset, OffsetKey, encode

UNCOUNTED = 0  # commits of this number come from somebody who does not number them


class Commit(Struct):
    """A request. `open` counts the rows whose code is not known yet."""

    token: Token
    results: list[int]
    open: int = 0

    def settle(self, row: int, code: int) -> bool:
        """Whether that was the last."""
        self.results[row] = code
        self.open -= 1
        return self.open == 0


class Pending(Struct):
    """An offset on its way into the log, and the rows of requests that end as it ends."""

    key: PartitionKey
    value: CommittedOffset
    rows: list[tuple[Commit, int]] = field(default_factory=list)


class Offsets:
    def __init__(self, group: str) -> None:
        self._group = group
        self.committed: dict[PartitionKey, CommittedOffset] = {}
        self._pending: dict[PartitionKey, list[Pending]] = {}  # in the order of their writes

    def __bool__(self) -> bool:
        return bool(self.committed or self._pending)

    def is_pending(self, key: PartitionKey) -> bool:
        return key in self._pending

    def latest_ms(self) -> int:
        return max((offset.committed_ms for offset in self.committed.values()), default=-1)

    def partitions(self) -> list[PartitionKey]:
        """All that the log may hold something for, in order."""
        return sorted({*self.committed, *self._pending})

    def add(self, commit: Commit, number: int, row: CommitRow, value: CommittedOffset) -> Pending | None:
        """Take a row that was found to be allowed. Returns what has to be written for it, if anything."""
        key = PartitionKey(row.topic_id, row.partition)
        pending = self._pending.get(key)
        if pending:
            last = pending[-1]
            if _is_older(value, last.value):
                last.rows.append((commit, number))
                commit.open += 1
                return None
        elif key in self.committed and _is_older(value, self.committed[key]):
            commit.results[number] = 0
            return None
        made = Pending(key, value, [(commit, number)])
        self._pending.setdefault(key, []).append(made)
        commit.open += 1
        return made

    def record(self, pending: Pending) -> tuple[bytes, bytes]:
        return encode(OffsetKey(self._group, *pending.key)), encode(pending.value)

    def tombstone(self, key: PartitionKey) -> tuple[bytes, None]:
        return encode(OffsetKey(self._group, *key)), None

    def end(self, ended: list[Pending], code: int) -> Iterator[Commit]:
        """These are written (code 0), or not. Yields the requests of which every row is known now."""
        for pending in ended:
            under_way = self._pending[pending.key]
            under_way.remove(pending)
            if not under_way:
                del self._pending[pending.key]
            if code == 0:
                self.committed[pending.key] = pending.value
            for commit, row in pending.rows:
                if commit.settle(row, code):
                    yield commit

    def waiting(self) -> Iterator[Commit]:
        """Every request that has not ended."""
        found = {id(c): c for some in self._pending.values() for pending in some for c, _ in pending.rows}
        yield from found.values()


def _is_older(value: CommittedOffset, than: CommittedOffset) -> bool:
    """Or the same once more."""
    return value.member_id == than.member_id and UNCOUNTED < value.number <= than.number
