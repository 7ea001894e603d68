from __future__ import annotations

from pathlib import Path

import pytest
from unit.log.fakes import batch, raw

from zmqueue.errors import CorruptLog
from zmqueue.log.files import DiskFiles
from zmqueue.log.index import NO_TIMESTAMP, GrowingIndex
from zmqueue.log.segment import Segment
from zmqueue.wire.batch import split


def index(*entries: tuple[int, int, int]) -> GrowingIndex:
    made = GrowingIndex(1000, 100)
    for entry in entries:
        made.add(*entry)
    return made


def test_the_index_finds_the_last_boundary_not_behind_an_offset():
    made = index((1010, 120, 5), (1020, 240, 9))
    assert [made.position_of(offset) for offset in (1000, 1009, 1010, 1019, 1020, 9999)] == [0, 0, 120, 120, 240, 240]


def test_the_index_finds_the_first_boundary_from_an_offset():
    made = index((1010, 120, 5), (1020, 240, 9))
    assert [made.position_from(offset, 777) for offset in (1000, 1010, 1011, 1021)] == [120, 120, 240, 777]


def test_before_the_boundary_for_a_time_nothing_reaches_it():
    made = index((1010, 120, 5), (1020, 240, 9), (1030, 360, 9))
    assert [made.position_before_time(time) for time in (1, 5, 6, 9, 10)] == [0, 0, 120, 120, 360]


def test_a_truncated_index_is_due_where_it_was_before():
    made = index((1010, 120, 5), (1020, 240, 9))
    assert made.truncate(240) == (120, 5)
    assert (len(made), made.due) == (1, 220)
    assert made.truncate(0) == (0, NO_TIMESTAMP)
    assert (len(made), made.due) == (0, 100)


@pytest.fixture
def segment(tmp_path: Path) -> Segment:
    """40 batches of three records each from offset 100 on, of rising and falling times."""
    made = Segment(DiskFiles(), str(tmp_path), 100, 256)
    made.create()
    for nth in range(40):
        one = batch(100 + 3 * nth, 3, time=1000 + (nth * 7) % 40)
        made.opened().append([raw(one)], len(raw(one)))
        made.note(one.header)
    return made


def test_every_offset_is_located_in_its_batch(segment: Segment):
    for offset in range(100, 220):
        position, base = segment.locate(offset)
        assert base == offset - (offset - 100) % 3
        (first, *_) = split(segment.read(position, offset, 1, 220, 0)[0])
        assert first.header.base_offset == base
    assert segment.locate(220) == (segment.size, 220)


def test_closed_it_reads_the_same(segment: Segment):
    open_ = segment.read(0, 100, 1 << 20, 220, 0)
    segment.close()
    assert segment.read(0, 100, 1 << 20, 220, 0) == open_


def test_a_truncation_restores_the_timestamp_of_what_is_left(segment: Segment):
    for end in range(217, 99, -3):
        segment.truncate(*segment.locate(end))
        assert segment.next_offset == end
        times = [header.max_timestamp for _, header in segment.walk(0)]
        assert segment.max_timestamp == max(times, default=NO_TIMESTAMP)
        assert segment.file is not None
        assert segment.file.size == segment.size
        assert all(segment.index.position_of(offset) <= segment.size for offset in range(100, 220))


def test_a_file_that_became_shorter_than_its_log_is_damage(segment: Segment):
    assert segment.file is not None
    segment.file.truncate(segment.size - 1)
    with pytest.raises(CorruptLog, match=segment.path):
        segment.read(segment.locate(217)[0], 217, 1000, 220, 0)


def test_a_whole_batch_in_the_wrong_place_is_not_served(segment: Segment):
    with pytest.raises(CorruptLog, match="lies offset 100"):
        segment.read(0, 150, 1000, 220, 0)
