"""The commands of one broker on their way through Raft: one at a time, in order, each until its result is known.

A command keeps its number and its bytes until it is applied here, however often it has to be sent: Raft may lose it,
duplicate it, or apply it after saying that it failed. Numbers make that harmless (see metadata.py). What a client
asked for is given up at its deadline, with an unknown outcome; what the broker itself needs is never given up.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from zmqueue import errors
from zmqueue.config import ReplicationConfig
from zmqueue.core.cluster import Applied
from zmqueue.core.commands import AnyCommand, Command, Envelope, Outcome, encode
from zmqueue.core.effects import AnswerCommand, Effect, Propose, Token
from zmqueue.core.metadata import ClusterState

QUEUE_MAX = 1_000
RETRY_MS = 100


class Wish(Struct):
    command: AnyCommand
    token: Token = None
    deadline_ms: int | None = None


class Sent(Struct):
    wish: Wish
    number: int
    data: bytes
    resend_ms: int


class Proposer:
    def __init__(self, broker: int, incarnation: int, config: ReplicationConfig) -> None:
        self.broker = broker
        self.incarnation = incarnation
        self.sent: Sent | None = None
        self._config = config
        self._number = 0
        self._own: deque[Wish] = deque()  # goes before all that clients asked for: fencing and the ISR cannot wait
        self._queue: deque[Wish] = deque()  # of clients

    def is_due(self, now_ms: int) -> bool:
        """Whether `step` may have something to do."""
        sent = self.sent
        if sent is None or self._queue:
            return bool(self._own or self._queue)
        return now_ms >= sent.resend_ms or sent.wish.deadline_ms is not None

    def ask(self, command: AnyCommand, *, first: bool = False) -> None:
        """For the broker's own needs. Asking for what is already under way changes nothing."""
        if any(wish.command == command for wish in self._own) or (self.sent and self.sent.wish.command == command):
            return
        if first:
            self._own.appendleft(Wish(command))
        else:
            self._own.append(Wish(command))

    def submit(self, command: AnyCommand, token: Token, deadline_ms: int) -> list[Effect]:
        """For a client, who waits for the outcome until the deadline."""
        if len(self._queue) >= QUEUE_MAX:
            return [AnswerCommand(token, _failed(errors.Busy("too many commands are waiting")))]
        self._queue.append(Wish(command, token, deadline_ms))
        return []

    def step(self, now_ms: int) -> list[Effect]:
        """Send what is due."""
        effects = self._give_up(now_ms)
        if self.sent is None and (self._own or self._queue):
            wish = (self._own or self._queue).popleft()
            self._number += 1
            data = encode(Envelope(self.broker, self.incarnation, self._number, wish.command))
            self.sent = Sent(wish, self._number, data, now_ms)
        if self.sent is not None and now_ms >= self.sent.resend_ms:
            self.sent.resend_ms = now_ms + self._config.proposal_timeout_ms
            effects.append(Propose(self.sent.data))
        return effects

    def _give_up(self, now_ms: int) -> list[Effect]:
        late = [w for w in self._queue if w.deadline_ms is not None and w.deadline_ms <= now_ms]
        for wish in late:
            self._queue.remove(wish)
        if self.sent and self.sent.wish.deadline_ms is not None and self.sent.wish.deadline_ms <= now_ms:
            late.append(self.sent.wish)
            self.sent = None
        return [AnswerCommand(wish.token, _failed(errors.MetadataUnavailable())) for wish in late]

    def on_unsure(self, data: bytes, now_ms: int) -> None:
        """Raft could not or would not commit it this time: send the same again soon."""
        if self.sent is not None and self.sent.data == data:
            self.sent.resend_ms = min(self.sent.resend_ms, now_ms + RETRY_MS)

    def on_applied(self, applied: Applied) -> tuple[Command | None, list[Effect]]:
        """If this was ours and under way, it is done. Returns the command, for whoever waits for it here."""
        envelope = applied.envelope
        if envelope is None or (envelope.broker, envelope.incarnation) != (self.broker, self.incarnation):
            return None, []
        return self._finish(envelope.number, applied.outcome)

    def on_restored(self, state: ClusterState) -> tuple[Command | None, Outcome | None, list[Effect]]:
        """A snapshot was installed: what was under way may be in it."""
        last = state.last_commands.get(self.broker)
        if last is None or last.incarnation != self.incarnation:
            return None, None, []
        command, effects = self._finish(last.number, last.outcome)
        return command, last.outcome, effects

    def _finish(self, number: int, outcome: Outcome) -> tuple[Command | None, list[Effect]]:
        sent = self.sent
        if sent is None or sent.number != number:
            return None, []
        self.sent = None
        answer: list[Effect] = [AnswerCommand(sent.wish.token, outcome)] if sent.wish.token is not None else []
        return sent.wish.command, answer


def _failed(error: errors.ZmqueueError) -> Outcome:
    return Outcome(error.code, str(error))
