"""Records with a certain value in a partition: by the secondary index where it covers, by reading where it does not.

One call does a bounded amount of work and says how far it came, so that nothing on the broker's loop takes long and
nothing has to be remembered between calls: whoever wants more asks again from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, field

from zmqueue.errors import CorruptBatch, CorruptIndex, NoSuchIndex
from zmqueue.log import keys
from zmqueue.model import KiB
from zmqueue.wire.batch import CONTROL, Batch, decode, split

if TYPE_CHECKING:
    from zmqueue.log.keys import KeysFile
    from zmqueue.log.partition_log import PartitionLog

# What looking at a page or a batch costs at least, as if it had so many bytes.
_LOOK_BYTES = 4 * KiB


class Found(Struct):
    """Offsets in order, the batches that hold them, and the offset up to which there are no others."""

    offsets: list[int] = field(default_factory=list)
    batches: list[bytes] = field(default_factory=list)
    scanned_to: int = 0


class Finder:
    """One search. `work_bytes` bounds it: the bytes of opened batches, and something for each look."""

    def __init__(self, log: PartitionLog, value: bytes, from_offset: int, end_offset: int, limit: int) -> None:
        if log.secondary.field is None:
            raise NoSuchIndex()
        self._log = log
        self._field = log.secondary.field
        self._value = value
        self._key = keys.key_of(value)
        self._end = min(end_offset, log.log_end)
        self._limit = limit
        self._work = 0
        self._start = max(from_offset, log.log_start)
        self._found = Found(scanned_to=self._start)

    def run(self, work_bytes: int) -> Found:
        found, secondary = self._found, self._log.secondary
        while found.scanned_to < self._end and not self._is_over(work_bytes):
            before = found.scanned_to, self._work
            run, following = secondary.covering(found.scanned_to)
            if run is None:
                self._scan(self._end if following < 0 else min(following, self._end), work_bytes)
            else:
                try:
                    self._follow(run, work_bytes)
                except CorruptIndex as error:
                    secondary.drop(run, error)
                    continue
            if (found.scanned_to, self._work) == before:
                break  # a batch that reaches beyond the end
        found.scanned_to = max(found.scanned_to, self._log.log_start)
        return found

    def _is_over(self, work_bytes: int) -> bool:
        """However little may be done in a call, it brings the search forward."""
        found = self._found
        return len(found.offsets) >= self._limit or (self._work >= work_bytes and found.scanned_to > self._start)

    def _follow(self, run: KeysFile, work_bytes: int) -> None:
        """By the index: only batches with a candidate in them are read."""
        found = self._found
        stop = min(run.end_offset, self._end)
        self._work += _LOOK_BYTES
        for offset in run.lookup(self._key, found.scanned_to):
            if offset >= stop:
                break
            if offset < found.scanned_to:
                continue  # in a batch that was looked at
            found.scanned_to = offset
            if self._is_over(work_bytes):
                return
            data = self._log.read(offset, 1, self._end, 1)
            if not data:
                return
            before = len(found.offsets)
            self._look(next(split(data)), stop)
            run.misses += len(found.offsets) == before
        if len(found.offsets) < self._limit:
            found.scanned_to = max(stop, found.scanned_to)

    def _scan(self, stop: int, work_bytes: int) -> None:
        found = self._found
        data = self._log.read(found.scanned_to, max(1, work_bytes - self._work), self._end)
        for batch in split(data):
            self._look(batch, stop)
            if found.scanned_to >= stop or self._is_over(work_bytes):
                return

    def _look(self, batch: Batch, stop: int) -> None:
        """Take what matches in one batch between where we are and `stop`, and go on behind it."""
        header, found = batch.header, self._found
        start = found.scanned_to
        self._work += max(_LOOK_BYTES, header.raw_length)
        found.scanned_to = min(header.next_offset, stop)
        if header.attributes & CONTROL:
            return
        try:
            columns = decode(header, batch.body)
        except CorruptBatch:
            return  # undamaged, so its producer closed it wrongly: it has no records for anybody
        before = len(found.offsets)
        for nth, value in self._field.each(columns):
            if value != self._value:
                continue
            offset = header.base_offset + (columns.offset_deltas[nth] if columns.offset_deltas is not None else nth)
            if start <= offset < stop:
                found.offsets.append(offset)
                if len(found.offsets) == self._limit:
                    found.scanned_to = offset + 1
                    break
        if len(found.offsets) > before:
            found.batches.append(header.pack() + batch.body)
