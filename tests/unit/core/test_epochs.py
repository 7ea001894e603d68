"""Which epoch wrote what, and where two histories part (C3)."""

from __future__ import annotations

import random

import pytest

from zmqueue.core.epochs import NO_EPOCH, Epochs


def test_an_empty_log_has_no_epoch():
    assert Epochs().last == NO_EPOCH
    assert Epochs().end_of(5, 3, 3) == (NO_EPOCH, 3)


def test_an_epoch_ends_where_the_next_begins_and_the_last_with_the_log():
    epochs = Epochs([(1, 0), (3, 5)])
    assert epochs.end_of(1, 0, 9) == (1, 5)
    assert epochs.end_of(2, 0, 9) == (1, 5)
    assert epochs.end_of(3, 0, 9) == (3, 9)
    assert epochs.end_of(7, 0, 9) == (3, 9)
    assert epochs.end_of(0, 0, 9) == (NO_EPOCH, 0)


@pytest.mark.parametrize(
    ("epoch", "offset", "parting"),
    [
        (3, 4, None),
        (3, 5, None),  # the next record may be of another epoch
        (3, 6, 5),  # what the reader took for a record of epoch 3 is one of epoch 6 here
        (5, 9, 5),  # epoch 5 is not in this log at all
        (6, 9, None),
        (6, 12, 9),  # beyond the end
        (2, 3, None),  # of what lies before the start nothing is known
        (2, 4, 3),  # but what lies behind it was not written in epoch 2
    ],
)
def test_a_reader_hears_where_its_history_and_the_log_part(epoch: int, offset: int, parting: int | None):
    assert Epochs([(3, 3), (6, 5)]).parting(epoch, offset, 3, 9) == parting


def test_the_epoch_of_the_last_deleted_record_is_still_known_to_a_reader_that_is_just_there():
    epochs = Epochs([(1, 0), (3, 5)])
    epochs.begin_at(5)
    assert epochs.parting(1, 5, 5, 9) is None
    assert epochs.parting(2, 5, 5, 9) == 5


def test_an_epoch_is_noted_once_and_never_goes_back():
    epochs = Epochs()
    for epoch, start in [(1, 0), (1, 4), (2, 6)]:
        epochs.note(epoch, start)
    assert epochs.entries == [(1, 0), (2, 6)]
    with pytest.raises(AssertionError):
        epochs.note(1, 8)


def test_a_truncation_forgets_epochs_that_begin_at_or_after_the_new_end():
    epochs = Epochs([(1, 0), (2, 4), (3, 8)])
    epochs.truncate(8)
    assert epochs.entries == [(1, 0), (2, 4)]
    epochs.truncate(5)
    assert epochs.entries == [(1, 0), (2, 4)]
    epochs.truncate(0)
    assert epochs.entries == []


@pytest.mark.parametrize("seed", range(20))
def test_cutting_back_by_epochs_leaves_exactly_the_common_past(seed: int):
    """Two logs that share a past and then went apart agree, after the exchange of C3, on a prefix of that past."""
    rng = random.Random(seed)
    common = sorted(rng.choices(range(4), k=rng.randint(0, 8)))
    # Whoever writes next does so under an epoch of its own: an epoch has one leader.
    leader = common + sorted(rng.choices([5, 7, 9], k=rng.randint(0, 6)))
    follower = common + sorted(rng.choices([4, 6, 8], k=rng.randint(0, 6)))
    while True:
        mine, theirs = of_log(follower), of_log(leader)
        epoch, end = theirs.end_of(mine.last, 0, len(leader))
        if epoch == mine.last and end >= len(follower):
            break
        cut = min(mine.end_of(epoch, 0, len(follower))[1], end)
        assert cut < len(follower)
        follower = follower[:cut]
    assert follower == leader[: len(follower)]
    assert len(follower) == len(common)


def of_log(log: list[int]) -> Epochs:
    epochs = Epochs()
    for offset, epoch in enumerate(log):
        epochs.note(epoch, offset)
    return epochs
