"""Growing and sealed indexes against a plain list of boundaries, and files that do not prove."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zmqueue.errors import CorruptIndex, FutureFormat
from zmqueue.log import index as indexes
from zmqueue.log.files import DiskFiles
from zmqueue.log.index import NO_TIMESTAMP, GrowingIndex, Index, SealedIndex, Summary

BASE = 1_000

# Boundaries as steps: offsets and positions always advance, the highest timestamp before never goes back.
entries = st.lists(
    st.tuples(st.integers(1, 50), st.integers(76, 5_000), st.integers(0, 3)), min_size=0, max_size=900
).map(lambda steps: list(_sums(steps)))


def _sums(steps):
    offset, position, timestamp = BASE, 0, 0
    for by_offset, by_position, by_time in steps:
        offset, position, timestamp = offset + by_offset, position + by_position, timestamp + by_time
        yield offset, position, timestamp


def grown(rows) -> GrowingIndex:
    index = GrowingIndex(BASE, 0)
    for row in rows:
        index.add(*row)
    return index


def summary(**changes) -> Summary:
    made = {
        "base_offset": BASE,
        "next_offset": 9_999_999,
        "log_bytes": 1 << 30,
        "max_timestamp": 7,
        "interval_bytes": 0,
        "gap_bytes_max": 0,
        "epochs": [(3, BASE)],
        "producers": b"",
    }
    return Summary(**{**made, **changes})


def sealed(path: Path, rows) -> SealedIndex:
    DiskFiles().put(str(path), indexes.encode(grown(rows), summary()))
    return indexes.load(DiskFiles(), str(path), BASE)[0]


# Hundreds of entries are drawn, which takes as long as the machine is busy.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(entries, st.data())
def test_both_kinds_answer_as_a_list_would(tmp_path_factory, rows, data):
    kinds: list[Index] = [grown(rows), sealed(tmp_path_factory.mktemp("index") / "x.index", rows)]
    offsets = st.integers(BASE - 5, (rows[-1][0] if rows else BASE) + 5)
    positions = st.integers(0, (rows[-1][1] if rows else 0) + 5)
    times = st.integers(-2, (rows[-1][2] if rows else 0) + 2)
    for _ in range(10):
        offset, position, time = data.draw(offsets), data.draw(positions), data.draw(times)
        for index in kinds:
            assert len(index) == len(rows)
            assert index.position_of(offset) == max([p for o, p, _ in rows if o <= offset], default=0)
            assert index.position_from(offset, -1) == min([p for o, p, _ in rows if o >= offset], default=-1)
            assert index.position_before_time(time) == max([p for _, p, t in rows if t < time], default=0)
            assert index.last_boundary(position) == max([p for _, p, _ in rows if p <= position], default=0)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(entries)
def test_a_sealed_index_grows_again_as_it_was(tmp_path_factory, rows):
    again = sealed(tmp_path_factory.mktemp("index") / "x.index", rows).grown(0)
    assert list(zip(again.offsets, again.positions, again.timestamps, strict=True)) == [
        (o - BASE, p, t) for o, p, t in rows
    ]


def test_a_summary_comes_back(tmp_path: Path):
    told = summary(producers=b"state", epochs=[(1, BASE), (4, BASE + 10)])
    DiskFiles().put(str(tmp_path / "x"), indexes.encode(grown([]), told))
    assert indexes.load(DiskFiles(), str(tmp_path / "x"), BASE)[1] == told


def test_every_flipped_bit_is_found_before_it_misleads(tmp_path: Path):
    rows = [(BASE + 10 * n, 100 * n, n) for n in range(1, 700)]
    path = tmp_path / "x.index"
    good = indexes.encode(grown(rows), summary())
    for bit in range(0, len(good) * 8, 37):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises(CorruptIndex):
            indexes.load(DiskFiles(), str(path), BASE)[0].verify()


@pytest.mark.parametrize("size", [0, 1, 27, 28, 100, 4096, 5000])
def test_a_short_file_is_no_index(tmp_path: Path, size: int):
    path = tmp_path / "x.index"
    path.write_bytes(indexes.encode(grown([(BASE + n, n, n) for n in range(1, 300)]), summary())[:size])
    with pytest.raises(CorruptIndex):
        indexes.load(DiskFiles(), str(path), BASE)


def test_the_index_of_another_segment_proves_nothing(tmp_path: Path):
    path = tmp_path / "x.index"
    path.write_bytes(indexes.encode(grown([]), summary()))
    with pytest.raises(CorruptIndex):
        indexes.load(DiskFiles(), str(path), BASE + 1)


def test_a_future_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "x.index"
    monkeypatch.setattr(indexes, "_KIND", indexes._KIND._replace(version=2))
    path.write_bytes(indexes.encode(grown([]), summary()))
    monkeypatch.undo()
    with pytest.raises(FutureFormat):
        indexes.load(DiskFiles(), str(path), BASE)


def test_with_no_interval_every_batch_but_the_first_has_an_entry():
    index = GrowingIndex(0, 0)
    for position in range(0, 500, 100):
        if position >= index.due:
            index.add(position, position, NO_TIMESTAMP)
    assert list(index.positions) == [100, 200, 300, 400]
