"""Segments made anew take the place of those they were made from, and a crash at any point leaves one or the other.

A job writes `BASE.log.cleaned`, synced, and `BASE.index.cleaned`; the log then commits them, all together, in three
steps:

1. Each is renamed to `BASE.swap.NEXT`: it stands for everything in [BASE, NEXT). Once the folder is synced this is
   decided, and a crash from here on only makes the next opening finish it.
2. The segments in that range are renamed to `BASE.log.replaced-N`, whatever files go with them are removed, and the
   folder is synced. Were it not, the next step could survive a power cut that this one did not: segments that overlap
   look like corruption.
3. `BASE.swap.NEXT` becomes `BASE.log`, its index `BASE.index`, and the folder is synced.

Removing large files takes a disk its time, so they are handed to the log as segments to be removed, some now and then.
What is still called `.cleaned` when a log is opened was never decided, and goes, as does what was replaced.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable

from msgspec import Struct

from zmqueue.errors import CorruptIndex, StorageFailed, StorageFull
from zmqueue.log.files import Files
from zmqueue.log.index import SealedIndex, load
from zmqueue.log.segment import SUFFIX, Segment, index_name, segment_name

CLEANED = ".cleaned"
REPLACED = ".replaced"
_SWAP = re.compile(r"(\d{20})\.swap\.(\d{20})\Z")
_REPLACED = re.compile(r"\d{20}\.log\.replaced-\d+\Z")
# All files of a segment begin with its offset. Those put aside are not part of the log.
_OF_SEGMENT = re.compile(r"(\d{20})\.(?!swap\.|log\.corrupt-|log\.replaced-)(?!.*\.cleaned\Z)")


class Output(Struct, frozen=True, array_like=True):
    """A new segment, instead of those of `replaced_bytes` that cover the same offsets."""

    base_offset: int
    next_offset: int
    log_bytes: int
    replaced_bytes: int


Range = tuple[int, int]


def _place_of(output: Output, segments: list[Segment]) -> slice | None:
    """Where those are that it stands for, if they are still as they were, and the last is not among them."""
    at = bisect_left(segments, output.base_offset, key=lambda segment: segment.base_offset)
    end = bisect_left(segments, output.next_offset, key=lambda segment: segment.base_offset)
    if not at < end < len(segments):
        return None
    bounds = segments[at].base_offset, segments[end].base_offset, sum(segment.size for segment in segments[at:end])
    same = bounds == (output.base_offset, output.next_offset, output.replaced_bytes)
    return slice(at, end) if same else None


def put_in_place(
    files: Files, folder: str, outputs: list[Output], segments: list[Segment], interval_bytes: int
) -> tuple[bool, list[Segment]]:
    """Commit what a job has made, to the disk and in the list of a log's segments; what was replaced is to be removed.

    False if segments have changed meanwhile, other than by being deleted; outputs for such are passed over.
    CorruptIndex, StorageFull: nothing has changed. StorageFailed: it is finished, or not, when the log is opened next.
    """
    fitting = [output for output in outputs if _place_of(output, segments) is not None]
    made = [_made(files, folder, output, interval_bytes) for output in fitting]
    aside = _commit(files, folder, [(output.base_offset, output.next_offset) for output in fitting]) if made else {}
    replaced: list[Segment] = []
    for output, segment in zip(fitting, made, strict=True):
        place = _place_of(output, segments)
        assert place is not None
        for old in segments[place]:
            old.close()
            _retire(old, aside[old.path])
            replaced.append(old)
        segments[place] = [segment]
    start = segments[0].base_offset
    return all(output in fitting or output.next_offset <= start for output in outputs), replaced


def put_aside(files: Files, folder: str) -> list[Segment]:
    """What a job has made or left behind and nobody wants, as segments to be removed."""
    unwanted = []
    for name in files.listdir(folder):
        path = f"{folder}/{name}"
        if not name.endswith(CLEANED):
            continue
        if name.endswith(SUFFIX + CLEANED):
            segment = Segment(files, folder, int(name[:20]), 0)
            segment.size = files.size(path)
            to = _aside(files, segment.path)
            files.rename(path, to)
            _retire(segment, to)
            unwanted.append(segment)
        else:
            files.remove(path)
    return unwanted


def _retire(segment: Segment, path: str) -> None:
    # Its index is gone, and the name of it may be another's.
    segment.path, segment.index_path = path, f"{path}.index"


def _made(files: Files, folder: str, output: Output, interval_bytes: int) -> Segment:
    """The segment as it will be, from its index."""
    segment = Segment(files, folder, output.base_offset, interval_bytes)
    index, summary = load(files, segment.index_path + CLEANED, output.base_offset)
    told = summary.next_offset, summary.log_bytes, files.size(segment.path + CLEANED)
    if told != (output.next_offset, output.log_bytes, output.log_bytes):
        raise CorruptIndex(f"{segment.index_path}{CLEANED}: not of what lies there")
    if files.volatile:
        # In memory an index is no file.
        segment.restore(index, summary)
        segment.unseal()
        files.remove(segment.index_path + CLEANED)
    else:
        segment.restore(SealedIndex.of(files, segment.index_path, output.base_offset, len(index)), summary)
    return segment


def recover_swaps(files: Files, folder: str) -> None:
    """Before a log is opened: finish what was decided, remove what was not."""
    ranges = [(int(found[1]), int(found[2])) for name in files.listdir(folder) if (found := _SWAP.match(name))]
    if ranges:
        # Its name may be known to the page cache alone.
        files.fsync_dir(folder)
        _finish(files, folder, ranges)
    discard(files, folder)
    for name in files.listdir(folder):
        if _REPLACED.match(name):
            files.remove(f"{folder}/{name}")


def discard(files: Files, folder: str) -> None:
    """Remove what a job has left behind, here and now."""
    for name in files.listdir(folder):
        if name.endswith(CLEANED):
            files.remove(f"{folder}/{name}")


def _commit(files: Files, folder: str, ranges: list[Range]) -> dict[str, str]:
    """Where each of the segments that were replaced lies now."""
    decided: list[str] = []
    try:
        for base, end in ranges:
            swap = _swap_path(folder, base, end)
            files.rename(f"{folder}/{segment_name(base)}{CLEANED}", swap)
            decided.append(swap)
    except StorageFull:
        # The log goes on as it was, and must not be found decided otherwise when it has grown or was cut back.
        for swap in decided:
            files.remove(swap)
        files.fsync_dir(folder)
        raise
    files.fsync_dir(folder)
    try:
        return _finish(files, folder, ranges)
    except StorageFull as error:
        # Half done, and decided: only opening the log again makes it whole.
        raise StorageFailed(str(error)) from error


def _finish(files: Files, folder: str, ranges: Iterable[Range]) -> dict[str, str]:
    aside: dict[str, str] = {}
    for name in files.listdir(folder):
        found, path = _OF_SEGMENT.match(name), f"{folder}/{name}"
        if not found or not any(base <= int(found[1]) < end for base, end in ranges):
            continue
        if name == segment_name(int(found[1])):
            aside[path] = _aside(files, path)
            files.rename(path, aside[path])
        else:
            files.remove(path)
    files.fsync_dir(folder)
    for base, end in ranges:
        files.rename(_swap_path(folder, base, end), f"{folder}/{segment_name(base)}")
        index = f"{folder}/{index_name(base)}"
        if files.exists(index + CLEANED):
            files.rename(index + CLEANED, index)
    files.fsync_dir(folder)
    return aside


def _aside(files: Files, path: str) -> str:
    nth = 0
    while files.exists(to := f"{path}{REPLACED}-{nth}"):
        nth += 1
    return to


def _swap_path(folder: str, base: int, end: int) -> str:
    return f"{folder}/{base:020d}.swap.{end:020d}"
