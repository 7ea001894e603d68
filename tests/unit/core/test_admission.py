"""Who may vote again after forgetting: the cases in which a forgotten vote or entry could still count."""

from __future__ import annotations

import msgspec
import pytest

from tests.golden import samples
from zmqueue.core.admission import refusal
from zmqueue.wire.messages import StatusResponse

FOLLOWS: StatusResponse = msgspec.structs.replace(
    samples.sample(StatusResponse), broker=0, controller=2, term=7, index=40, voting=True
)


def answer(**changes: int | bool) -> StatusResponse:
    return msgspec.structs.replace(FOLLOWS, **changes)


def members(**changes: StatusResponse | None) -> dict[int, StatusResponse | None]:
    """Five that follow broker 2, of whom broker 0 has forgotten; `b3=...` changes the answer of broker 3."""
    found: dict[int, StatusResponse | None] = {broker: answer(broker=broker) for broker in range(5)}
    found[0] = answer(voting=False)
    return found | {int(name[1:]): given for name, given in changes.items()}


def test_one_that_has_caught_up_while_all_others_follow_one_leader_may_vote():
    assert refusal(0, members()) is None


def test_another_learner_does_not_keep_it_from_voting():
    assert refusal(0, members(b4=answer(broker=4, voting=False))) is None
    assert refusal(0, members(b4=answer(broker=4, voting=False, term=6, controller=-1))) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"b0": None}, "broker 0 does not answer"),
        ({"b0": answer(voting=True)}, "votes already"),
        ({"b0": answer(voting=False, index=39)}, "39 of 40 commands"),
        (
            {"b0": answer(voting=False, term=6)},
            "broker 1 follows broker 2 in term 7, broker 0 follows broker 2 in term 6",
        ),
        ({"b0": answer(voting=False, controller=-1)}, "follows nobody"),
        ({"b3": None}, "broker 3 does not answer"),
        ({"b3": answer(broker=3, term=8, controller=-1)}, "broker 3 follows nobody in term 8"),
        ({"b3": answer(broker=3, term=8, controller=3)}, "broker 3 follows broker 3 in term 8"),
    ],
)
def test_a_vote_or_an_entry_that_was_forgotten_could_still_count(changes, why):
    refused = refusal(0, members(**changes))
    assert refused is not None
    assert why in refused
