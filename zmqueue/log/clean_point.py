"""How far a log is compacted, and since when: the small file `compacted` in a partition's folder.

Below `end` no record is left that another one below `end` has replaced. A tombstone may go once it has stood there,
with all that it deletes already gone, for as long as its topic says: then whoever began to read before it stood alone
has had that time to come by it. `horizons` say since when, in pieces of the log: the tombstones below the end of the
first horizon, and of each other those from the end of the one before.

The file is written after the compaction that it tells of is durable, and removed before a truncation takes away what it
tells of, as other records may come there. Losing it is harmless: the log is compacted from its start again, and
tombstones stay that much longer. Each replica has its own.
"""

from __future__ import annotations

import logging

import msgspec
from google_crc32c import value as crc32c
from msgspec import Struct

from zmqueue.log.files import Files

CLEAN_FILE = "compacted"
# Beyond so many the oldest two become one, of the later time.
HORIZONS_MAX = 64

_logger = logging.getLogger(__name__)


class Horizon(Struct, frozen=True, array_like=True):
    """`tombstones` were kept below `end` (and behind the horizon before) when the log was last compacted."""

    end: int
    since_ms: int
    tombstones: int


class CleanPoint(Struct, frozen=True):
    end: int = 0
    horizons: tuple[Horizon, ...] = ()

    def advanced(self, end: int, now_ms: int, tombstones: list[int]) -> CleanPoint:
        """After a compaction up to `end`, which kept so many tombstones of each horizon and of what is new."""
        assert len(tombstones) == len(self.horizons) + 1
        horizons = [
            Horizon(horizon.end, horizon.since_ms, count)
            for horizon, count in zip((*self.horizons, Horizon(end, now_ms, 0)), tombstones, strict=True)
            if count
        ]
        while len(horizons) > HORIZONS_MAX:
            first, second = horizons[:2]
            since_ms = max(first.since_ms, second.since_ms)
            horizons[:2] = [Horizon(second.end, since_ms, first.tombstones + second.tombstones)]
        return CleanPoint(max(end, self.end), tuple(horizons))

    def tombstones_end(self, now_ms: int, delete_retention_ms: int) -> int:
        """Tombstones below this offset have stood long enough."""
        end = 0
        for horizon in self.horizons:
            if horizon.since_ms + delete_retention_ms > now_ms:
                break
            end = horizon.end
        return end


def load_clean_point(files: Files, folder: str) -> CleanPoint:
    data = files.read_small(f"{folder}/{CLEAN_FILE}")
    if data is None:
        return CleanPoint()
    try:
        return parse_clean_point(data)
    except ValueError as error:
        _logger.error("%s/%s: %s; the log is compacted from its start again", folder, CLEAN_FILE, error)
        return CleanPoint()


def parse_clean_point(data: bytes) -> CleanPoint:
    """Raises ValueError for what `save_clean_point` never wrote."""
    if len(data) <= 4 or int.from_bytes(data[:4], "little") != crc32c(data[4:]):
        raise ValueError("does not match its checksum")
    return msgspec.msgpack.decode(data[4:], type=CleanPoint)


def save_clean_point(files: Files, folder: str, point: CleanPoint) -> None:
    """Durable on return."""
    data = msgspec.msgpack.encode(point)
    files.replace(f"{folder}/{CLEAN_FILE}", crc32c(data).to_bytes(4, "little") + data)


def drop_clean_point(files: Files, folder: str) -> None:
    """Gone for good on return."""
    files.remove(f"{folder}/{CLEAN_FILE}")
    files.fsync_dir(folder)
