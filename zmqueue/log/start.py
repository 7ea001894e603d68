"""Where a log begins, if that is not where its first segment does, and what was known of the records before.

Deleting records moves the start into a segment; deleting segments takes with them what their batches told of producers,
whose retries must be recognised all the same. Both are kept in one small file, replaced as a whole and checked. Losing
it is harmless: deleted records of one segment are there again until the leader says otherwise, and a producer that has
not written since is asked to begin anew.
"""

from __future__ import annotations

import logging

import msgspec
from google_crc32c import value as crc32c
from msgspec import Struct

from zmqueue.core.epochs import NO_EPOCH
from zmqueue.log.files import Files

START_FILE = "start"

_logger = logging.getLogger(__name__)


class Start(Struct, frozen=True):
    """`producers`: the state before the segment at `base`, the first that is left (see core.producers); `epoch`: of the
    last record before the first batch that is left, -1 if nobody knows."""

    log_start: int = 0
    producers: bytes = b""
    epoch: int = NO_EPOCH
    base: int = 0


def load_start(files: Files, folder: str) -> Start:
    data = files.read_small(f"{folder}/{START_FILE}")
    if data is None:
        return Start()
    try:
        return parse_start(data)
    except ValueError as error:
        _logger.error("%s/%s: %s; the log begins with its first segment", folder, START_FILE, error)
        return Start()


def parse_start(data: bytes) -> Start:
    """Raises ValueError for what `save_start` never wrote."""
    if len(data) <= 4 or int.from_bytes(data[:4], "little") != crc32c(data[4:]):
        raise ValueError("does not match its checksum")
    return msgspec.msgpack.decode(data[4:], type=Start)


def save_start(files: Files, folder: str, start: Start) -> None:
    """Durable on return."""
    data = msgspec.msgpack.encode(start)
    files.replace(f"{folder}/{START_FILE}", crc32c(data).to_bytes(4, "little") + data)


def drop_start(files: Files, folder: str) -> None:
    """The log begins with its first segment, and nothing is known of what was before. Not synced yet."""
    if files.exists(f"{folder}/{START_FILE}"):
        files.remove(f"{folder}/{START_FILE}")
