"""The secondary index of one partition: the files of keys.py, of which each covers a range of offsets.

Invariants
- Ranges do not overlap. What no file covers is scanned when somebody looks for something, so an answer never depends on
  how far the index is; only its price does.
- Files cover nothing at or above the high watermark. When a log is cut nevertheless (a follower's watermark is a hint),
  the files that reach beyond the cut are gone durably before the log is: a file must never meet other records under the
  offsets that it covers.
- A file's name comes last: a job writes under a temporary name, and the name is given here, on the loop's thread.

Lag: new records are indexed when CHUNK_BYTES of log have gathered, or when a segment is full. Small files are merged,
FAN at once, until they have FILE_ENTRIES_MAX: a partition has a few dozen files and one more for each so many entries,
and each entry is written about four times in its life. Files below the log start are removed.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from zmqueue.errors import CorruptIndex, FutureFormat, ZmqueueError
from zmqueue.log import keys
from zmqueue.log.files import Files
from zmqueue.log.index_build import IndexJob, IndexResult
from zmqueue.log.keys import KeysFile
from zmqueue.log.orders import span
from zmqueue.model import MiB
from zmqueue.wire.fields import Field

if TYPE_CHECKING:
    from zmqueue.log.partition_log import PartitionLog

CHUNK_BYTES = 1 * MiB
JOB_BYTES = 64 * MiB
FAN = 8
FILE_ENTRIES_MAX = 1 << 22
# A file is built anew once so many of its entries were followed in vain, or a sixteenth of them if that is more.
MISSES_MAX = 128

_logger = logging.getLogger(__name__)


class SecondaryStats(NamedTuple):
    """`covered_to`: everything from the log start to there is indexed. Lags are behind the log end."""

    kind: str
    path: str
    files: int
    entries: int
    bytes: int
    covered_to: int
    lag_records: int
    lag_bytes: int


class FileDescription(NamedTuple):
    """One index file as it lies in a folder. `error` says why it is not usable; the rest is then unknown."""

    name: str
    from_offset: int
    end_offset: int
    bytes: int
    kind: str = ""
    path: str = ""
    entries: int = 0
    pages: int = 0
    error: str = ""


class Secondary:
    def __init__(self, files: Files, folder: str) -> None:
        self._files = files
        self._folder = folder
        self._runs: list[KeysFile] = []
        self._starts: list[int] = []
        self.field: Field | None = None

    # -- what there is

    def define(self, definition: tuple[str, str] | None) -> None:
        """Index by this from now on. Files of another definition are removed."""
        if definition == (self.field.definition if self.field else None) and self.field is not None:
            return
        self.field = Field(*definition) if definition is not None else None
        found: list[KeysFile] = []
        for name in self._names():
            run = self._load(name)
            if run is None or run.summary.definition != definition:
                self._files.remove(f"{self._folder}/{name}")
            else:
                found.append(run)
        self._keep_disjoint(found)

    def _keep_disjoint(self, found: list[KeysFile]) -> None:
        """A crash may have left the parts beside what they were merged into; the larger file stands for them."""
        kept: list[KeysFile] = []
        for run in sorted(found, key=lambda run: (run.from_offset, -run.end_offset)):
            if kept and run.from_offset < kept[-1].end_offset:
                self._files.remove(run.path)
            else:
                kept.append(run)
        self._set(kept)

    def _set(self, runs: list[KeysFile]) -> None:
        self._runs = runs
        self._starts = [run.from_offset for run in runs]

    def _names(self) -> list[str]:
        return [name for name in self._files.listdir(self._folder) if keys.parse_name(name) is not None]

    def _load(self, name: str) -> KeysFile | None:
        try:
            return keys.load(self._files, self._folder, name)
        except (CorruptIndex, FutureFormat) as error:
            _logger.warning("%s; it is made anew", error)
            return None

    def covering(self, offset: int) -> tuple[KeysFile | None, int]:
        """The file that covers `offset`, or None and where the next one begins (-1: there is none)."""
        at = bisect_right(self._starts, offset)
        if at and offset < self._runs[at - 1].end_offset:
            return self._runs[at - 1], -1
        return None, self._starts[at] if at < len(self._starts) else -1

    def drop(self, run: KeysFile, error: ZmqueueError) -> None:
        """It does not prove: what it covered is scanned until it was made anew."""
        _logger.error("%s; it is made anew", error)
        self._set([each for each in self._runs if each is not run])
        self._files.remove(run.path)

    def stats(self, log: PartitionLog) -> SecondaryStats | None:
        if self.field is None:
            return None
        gap = self._gap(log.log_start, log.log_end)
        covered_to = gap[0] if gap else log.log_end
        behind = span(log, covered_to, log.log_end, log.log_end, 1 << 62).size if gap else 0
        return SecondaryStats(
            *self.field.definition,
            files=len(self._runs),
            entries=sum(run.entries for run in self._runs),
            bytes=sum(run.size for run in self._runs),
            covered_to=covered_to,
            lag_records=log.log_end - covered_to,
            lag_bytes=behind,
        )

    # -- the log shrinks

    def cut(self, end_offset: int) -> None:
        """Before the log is cut there. Also for files that nobody loaded, so that none comes back later."""
        reaching = [name for name in self._names() if (keys.parse_name(name) or (0, 0))[1] > end_offset]
        for name in reaching:
            self._files.remove(f"{self._folder}/{name}")
        if reaching:
            self._files.fsync_dir(self._folder)
        self._set([run for run in self._runs if run.end_offset <= end_offset])

    def _collect(self, log_start: int) -> None:
        while self._runs and self._runs[0].end_offset <= log_start:
            self._files.remove(self._runs[0].path)
            self._set(self._runs[1:])

    # -- the index grows

    def plan(self, log: PartitionLog, high_watermark: int) -> IndexJob | None:
        """The next thing worth doing, if any: cover what is not covered, renew what is stale, merge what is small."""
        if self.field is None:
            return None
        self._collect(log.log_start)
        return self._to_cover(log, min(high_watermark, log.log_end)) or self._to_renew(log) or self._to_merge(log)

    def _gap(self, start: int, end: int) -> tuple[int, int] | None:
        at = start
        for run in self._runs:
            if run.from_offset > at:
                return (at, min(run.from_offset, end)) if at < end else None
            at = max(at, run.end_offset)
        return (at, end) if at < end else None

    def _to_cover(self, log: PartitionLog, end: int) -> IndexJob | None:
        gap = self._gap(log.log_start, end)
        if gap is None:
            return None
        found = span(log, *gap, end, JOB_BYTES)
        at_the_end = gap[1] == end and found.in_last
        if not found.segments or (at_the_end and found.size < CHUNK_BYTES):
            return None
        return self._job(log, *gap, found.segments, [])

    def _to_renew(self, log: PartitionLog) -> IndexJob | None:
        for run in self._runs:
            if run.misses > max(MISSES_MAX, run.entries // 16):
                start = max(run.from_offset, log.log_start)
                segments = span(log, start, run.end_offset, run.end_offset, 1 << 62).segments
                return self._job(log, start, run.end_offset, segments, [_name(run)])
        return None

    def _to_merge(self, log: PartitionLog) -> IndexJob | None:
        best: tuple[int, int] | None = None
        for at in range(len(self._runs) - FAN + 1):
            window = self._runs[at : at + FAN]
            sizes = [run.entries for run in window]
            total = sum(sizes)
            # No large file is written again for the sake of small ones.
            if total > FILE_ENTRIES_MAX or 2 * max(sizes) > total > 0:
                continue
            touching = all(a.end_offset == b.from_offset for a, b in pairwise(window))
            if touching and (best is None or total < best[0]):
                best = total, at
        if best is None:
            return None
        window = self._runs[best[1] : best[1] + FAN]
        return self._job(log, window[0].from_offset, window[-1].end_offset, [], [_name(run) for run in window])

    def _job(
        self, log: PartitionLog, start: int, end: int, segments: list[tuple[int, int, int]], replaces: list[str]
    ) -> IndexJob:
        assert self.field is not None
        volatile = self._files.volatile
        return IndexJob(self._folder, volatile, *self.field.definition, start, end, log.generation, segments, replaces)

    def finish(self, log: PartitionLog, job: IndexJob, result: IndexResult) -> bool:
        """A job has come back. False if it no longer fits; then its file is removed."""
        if result.end_offset == job.from_offset:
            return False
        names = {_name(run) for run in self._runs}
        present = self.field is not None and self.field.definition == (job.kind, job.path)
        if not present or job.generation != log.generation or not names.issuperset(job.replaces):
            self._discard(job)
            return False
        try:
            run = keys.load_as(self._files, job.target, job.from_offset, result.end_offset)
        except (CorruptIndex, FutureFormat) as error:
            _logger.error("%s: a job wrote what does not prove", error)
            self._discard(job)
            return False
        run.path = f"{self._folder}/{keys.file_name(run.from_offset, run.end_offset)}"
        self._files.rename(job.target, run.path)
        for old in job.replaces:
            if f"{self._folder}/{old}" != run.path:
                self._files.remove(f"{self._folder}/{old}")
        kept = [each for each in self._runs if _name(each) not in job.replaces]
        self._set(sorted([*kept, run], key=lambda each: each.from_offset))
        return True

    def failed(self, job: IndexJob, error: ZmqueueError) -> None:
        """A job came to nothing. One that met a damaged file does not say which: all that it read are made anew."""
        self._discard(job)
        if isinstance(error, CorruptIndex):
            for run in [run for run in self._runs if _name(run) in job.replaces]:
                self.drop(run, error)

    def _discard(self, job: IndexJob) -> None:
        if self._files.exists(job.target):
            self._files.remove(job.target)


def _name(run: KeysFile) -> str:
    return keys.file_name(run.from_offset, run.end_offset)


def describe_index(files: Files, folder: str) -> list[FileDescription]:
    """The index files in a partition's folder, each proved from end to end. Works beside a broker and without one."""
    found = []
    for name in files.listdir(folder):
        covered = keys.parse_name(name)
        if covered is None:
            continue
        path = f"{folder}/{name}"
        try:
            run = keys.load(files, folder, name)
            run.verify()
            found.append(
                FileDescription(
                    name, *covered, files.size(path), *run.summary.definition, entries=run.entries, pages=run.pages
                )
            )
        except ZmqueueError as error:
            found.append(FileDescription(name, *covered, files.size(path), error=str(error)))
    return found
