"""What a group coordinator asks of its shell. Effects of one step are performed in their order.

`Write` is appended to the coordinator's partition with acks=all, as one batch (all of it or nothing), in the order in
which writes were asked for. How it ended comes back as `Coordinator.on_written`: success only when the high watermark
has passed it; an error says whether the batch may be in the log none the less (`ZmqueueError.indeterminate`).
"""

from __future__ import annotations

from msgspec import Struct

from zmqueue.core.effects import Effect, Token
from zmqueue.core.lease import Lease
from zmqueue.errors import CoordinatorNotAvailable, ZmqueueError


class Write(Effect):
    """Keys and values of records; None deletes. `number` comes back with `on_written`."""

    number: int
    records: list[tuple[bytes, bytes | None]]


class Answer(Effect):
    token: Token
    message: Struct


class Refuse(Effect):
    """The request failed as a whole."""

    token: Token
    code: int
    text: str


class Log(Effect):
    """A line for the operator; a `warning` names something that somebody should look at."""

    text: str
    warning: bool = False


class GiveUp(Effect):
    """The log may hold what this coordinator cannot know: close it, and let a new one replay the partition."""

    reason: str


def refusal(token: Token, error: ZmqueueError) -> Refuse:
    return Refuse(token, error.code, str(error))


def served(lease: Lease, token: Token, message: Struct, now_ms: int) -> Answer | Refuse:
    """An answer that holds only if we still coordinate: another may have taken over once the lease is gone."""
    if lease.readable(now_ms):
        return Answer(token, message)
    return refusal(token, CoordinatorNotAvailable("this broker has lost touch with the controller"))
