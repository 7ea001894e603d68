"""E1 and E2: what a partition remembers of its idempotent producers."""

from __future__ import annotations

import random

import pytest

from tests.unit.core.builders import batch
from zmqueue import errors
from zmqueue.core.producers import PRODUCERS_MAX, REMEMBERED, Producers
from zmqueue.wire.batch import BatchHeader


def header(sequence: int, count: int = 1, *, offset: int = 0, pid: int = 7, pepoch: int = 0) -> BatchHeader:
    return batch(offset, count, 1, pid=pid, pepoch=pepoch, sequence=sequence).header


def known(*headers: BatchHeader) -> Producers:
    return Producers(headers)


def test_a_producer_begins_at_sequence_zero():
    assert known().check(header(0)) is None
    with pytest.raises(errors.UnknownProducer):
        known().check(header(1))


def test_sequences_count_records():
    producers = known(header(0, 5))
    assert producers.check(header(5, 3)) is None
    with pytest.raises(errors.OutOfOrderSequence):
        producers.check(header(6))


def test_a_known_duplicate_has_its_offset():
    producers = known(header(0, 5, offset=100), header(5, 2, offset=105))
    written = producers.check(header(0, 5))
    assert written is not None
    assert (written.base_offset, written.next_offset) == (100, 105)


def test_a_duplicate_older_than_remembered_is_known_without_its_offset():
    producers = known(*(header(n, offset=n) for n in range(REMEMBERED + 1)))
    assert producers.check(header(1)) is not None
    with pytest.raises(errors.DuplicateSequence):
        producers.check(header(0))


def test_a_batch_of_which_only_a_part_is_written_is_not_called_a_duplicate():
    with pytest.raises(errors.OutOfOrderSequence):
        known(header(0, 5)).check(header(3, 4))


def test_a_newer_epoch_of_a_producer_begins_anew_and_fences_the_older():
    producers = known(header(0, 5))
    with pytest.raises(errors.OutOfOrderSequence):
        producers.check(header(5, pepoch=1))
    assert producers.check(header(0, pepoch=1)) is None
    producers.note(header(0, pepoch=1))
    with pytest.raises(errors.ProducerFenced):
        producers.check(header(5))


def test_batches_without_a_producer_are_not_remembered():
    producers = known(batch(0, 1, 1).header)
    assert len(producers) == 0


def test_the_producers_that_wrote_least_recently_are_forgotten_first():
    producers = known(*(header(0, pid=n) for n in range(PRODUCERS_MAX)))
    producers.note(header(1, pid=0))
    producers.note(header(0, pid=PRODUCERS_MAX))
    assert len(producers) == PRODUCERS_MAX
    assert producers.check(header(2, pid=0)) is None
    with pytest.raises(errors.UnknownProducer):
        producers.check(header(1, pid=1))


@pytest.mark.parametrize("seed", range(5))
def test_what_is_remembered_is_a_function_of_the_log_alone(seed: int):
    """Rebuilt after an election or a truncation it is what it would have been."""
    rng = random.Random(seed)
    log: list[BatchHeader] = []
    running = Producers()
    next_sequence: dict[int, int] = {}
    for _ in range(200):
        pid, count = rng.randint(1, 5), rng.randint(1, 3)
        sequence = next_sequence.get(pid, 0)
        next_sequence[pid] = sequence + count
        log.append(header(sequence, count, offset=len(log), pid=pid))
        running.note(log[-1])
    assert Producers(log)._producers == running._producers
    assert list(Producers(log)._producers) == list(running._producers)
