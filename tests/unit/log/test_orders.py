"""Reading a log in other orders: from its tail, and from a point in time."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.log.fakes import SMALL, batch, content

from zmqueue.errors import CorruptLog, OffsetOutOfRange
from zmqueue.log.files import DiskFiles
from zmqueue.log.memory import MemoryFiles
from zmqueue.log.partition_log import PartitionLog
from zmqueue.wire.batch import Batch, split

SLOW = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=80)

# Records, bytes of a value, timestamp.
shapes = st.lists(st.tuples(st.integers(1, 5), st.sampled_from([1, 20, 150]), st.integers(0, 50)), max_size=80)


def filled(shapes: list[tuple[int, int, int]]) -> PartitionLog:
    log = PartitionLog.open(MemoryFiles(), "/p", SMALL)
    for records, size, time in shapes:
        log.append([batch(log.log_end, records, value=b"v" * size, time=time)])
    return log


def backward(log: PartitionLog, before: int, bytes_max: int, end: int) -> list[Batch]:
    """All batches before an offset, the last first."""
    found: list[Batch] = []
    while data := log.read_backward(before, bytes_max, end):
        batches = list(split(data))
        assert len(data) <= bytes_max or len(batches) == 1
        assert batches[-1].header.base_offset < before <= batches[-1].header.next_offset or not found
        found += reversed(batches)
        before = batches[0].header.base_offset
        if before <= log.log_start:
            break
    return found


@SLOW
@given(shapes, st.integers(1, 2_000), st.data())
def test_backward_is_forward_reversed(shapes, bytes_max, data):
    log = filled(shapes)
    forward = content(log)
    end = data.draw(st.sampled_from([0, *(b.header.next_offset for b in forward)]))
    log.log_start = data.draw(st.integers(0, log.log_end))
    before = data.draw(st.integers(log.log_start, log.log_end))
    expected = [
        b
        for b in reversed(forward)
        if max(b.header.base_offset, log.log_start) < min(before, b.header.next_offset) and b.header.next_offset <= end
    ]
    assert backward(log, before, bytes_max, end) == expected


@pytest.mark.parametrize("bytes_max", [1, 300, 700, 1_000, 5_000])
def test_a_range_never_ends_before_the_offset_it_was_asked_for(bytes_max):
    """Also where the index knows a boundary shortly before it, at which reading forward would stop."""
    log = filled([(1 + nth % 3, [1, 20, 40][nth % 3], 0) for nth in range(60)])
    for each in content(log):
        before = each.header.next_offset
        assert list(split(log.read_backward(before, bytes_max, log.log_end)))[-1] == each


def test_an_offset_that_is_not_there_is_refused():
    log = filled([(3, 10, 0)] * 5)
    with pytest.raises(OffsetOutOfRange):
        log.read_backward(16, 100, 15)
    with pytest.raises(OffsetOutOfRange):
        log.read_backward(-1, 100, 15)
    assert log.read_backward(0, 100, 15) == b""


def test_damage_does_not_leave_the_log_backward_either(tmp_path: Path):
    log = PartitionLog.open(DiskFiles(), str(tmp_path / "p"), SMALL)
    for _ in range(3):
        log.append([batch(log.log_end, 3)])
    path = next(tmp_path.glob("p/*.log"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptLog):
        log.read_backward(log.log_end, 10_000, log.log_end)


@SLOW
@given(shapes, st.data())
def test_the_first_record_of_a_time_is_found_as_by_a_scan(shapes, data):
    """Clocks go back; segments are cut off at both ends and grow again between searches."""
    log = filled(shapes)
    for _ in range(3):
        for _ in range(4):
            time = data.draw(st.integers(-1, 60))
            end = data.draw(st.integers(0, log.log_end))
            expected = next(
                (
                    (b.header.base_offset + nth, b.header.base_timestamp + nth)
                    for b in content(log)
                    for nth in range(b.header.record_count)
                    if b.header.base_timestamp + nth >= time
                ),
                None,
            )
            if expected is not None and expected[0] >= end:
                expected = None
            assert log.offset_for_time(time, end) == expected
        log.truncate(data.draw(st.integers(0, log.log_end)))
        for records, size, time in data.draw(shapes_again):
            log.append([batch(log.log_end, records, value=b"v" * size, time=time)])


shapes_again = st.lists(st.tuples(st.integers(1, 5), st.sampled_from([20, 150]), st.integers(0, 50)), max_size=12)
