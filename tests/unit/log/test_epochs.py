from __future__ import annotations

import pytest

from zmqueue.log.epochs import NO_EPOCH, EpochCache


def history(*entries: tuple[int, int]) -> EpochCache:
    epochs = EpochCache()
    for epoch, offset in entries:
        epochs.note(epoch, offset)
    return epochs


def test_only_the_first_batch_of_an_epoch_makes_an_entry():
    assert history((0, 0), (0, 5), (2, 9), (2, 12)).entries == [(0, 0), (2, 9)]


def test_an_epoch_never_goes_back():
    with pytest.raises(AssertionError):
        history((3, 0)).note(2, 4)


def test_an_epoch_ends_where_the_next_begins_and_the_last_at_the_log_end():
    epochs = history((1, 0), (4, 10), (7, 30))
    assert epochs.end_of(0, 50) is None
    assert epochs.end_of(1, 50) == (1, 10)
    assert epochs.end_of(3, 50) == (1, 10)
    assert epochs.end_of(4, 50) == (4, 30)
    assert epochs.end_of(7, 50) == (7, 50)
    assert epochs.end_of(99, 50) == (7, 50)
    assert EpochCache().end_of(5, 0) is None


def test_a_truncation_forgets_epochs_that_have_no_batch_left():
    epochs = history((1, 0), (4, 10), (7, 30))
    epochs.truncate(31)
    assert epochs.latest == 7
    epochs.truncate(30)
    assert (epochs.entries, epochs.latest) == ([(1, 0), (4, 10)], 4)
    epochs.truncate(0)
    assert (epochs.entries, epochs.latest) == ([], NO_EPOCH)
