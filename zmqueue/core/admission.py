"""Whether a broker whose Raft folder was lost may vote again.

It has forgotten what it acknowledged and whom it voted for. Two elections could then be won in one term, or one without
an entry that is committed. Both are excluded once, at one moment,

- every other member runs, and all that vote follow the same leader in the same term. None of them can stand in that
  term any more, so no second election can be won in it with the vote that was forgotten. And that leader has every
  committed entry: it needed the votes of more than half of all members, and those who have forgotten gave none;
- the broker itself has reached that term and everything that this leader has applied, in the journal it will vote from.

What happens after that moment is Raft as usual.
"""

from __future__ import annotations

from collections.abc import Mapping

from zmqueue.model import NO_BROKER
from zmqueue.wire.messages import StatusResponse


def refusal(broker: int, answers: Mapping[int, StatusResponse | None]) -> str | None:
    """Why `broker` may not be admitted, given each member's own word; None if it may."""
    own = answers[broker]
    if own is None:
        return f"broker {broker} does not answer: it must run, and follow, before it may vote"
    if own.voting:
        return f"broker {broker} votes already"
    for other, answer in answers.items():
        if other == broker:
            continue
        if answer is None:
            return f"broker {other} does not answer: all others must be up"
        if answer.voting and (
            answer.controller == NO_BROKER or (answer.controller, answer.term) != (own.controller, own.term)
        ):
            return f"broker {other} follows {_leader(answer)}, broker {broker} follows {_leader(own)}"
    leader = answers.get(own.controller)
    if leader is None or own.controller == broker:
        return f"broker {broker} follows {_leader(own)}"
    if own.index < leader.index:
        return f"broker {broker} has applied {own.index} of {leader.index} commands: it is still catching up"
    return None


def _leader(answer: StatusResponse) -> str:
    who = "nobody" if answer.controller == NO_BROKER else f"broker {answer.controller}"
    return f"{who} in term {answer.term}"
