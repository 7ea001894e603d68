"""Without the rules of a follower (C)."""

from __future__ import annotations

from typing import Any

from tests.sim.mutations.registry import Put, mutation
from zmqueue.core import effects as e
from zmqueue.core.follower import Follower
from zmqueue.core.leader import Leader


@mutation("C2")
def late_fetch_answer_used(put: Put) -> None:
    fetched = Follower.on_fetched

    def on_fetched(self: Any, response: Any, batches: Any, now_ms: int) -> list[e.Effect]:
        if response.leader_epoch == self.epoch:
            self._fetching, self._fetch_id = True, response.fetch_id
            if response.diverged_end >= 0:
                self.established = False
        return fetched(self, response, batches, now_ms)

    put(Follower, "on_fetched", on_fetched)


@mutation("C3")
def follower_truncates_to_watermark(put: Put) -> None:
    def begin(self: Any, now_ms: int) -> list[e.Effect]:
        self._fetch_due_ms = now_ms
        return [e.Truncate(self.key, self.log.high_watermark)]

    put(Follower, "begin", begin)


@mutation("C3")
def no_divergence_check(put: Put) -> None:
    on_fetch = Leader.on_fetch

    def _on_fetch(self: Any, token: Any, fetch: Any, now_ms: int) -> list[e.Effect]:
        fetch.last_epoch = self.log.epochs.last
        fetch.log_end = min(fetch.log_end, self.log.log_end)
        return on_fetch(self, token, fetch, now_ms)

    put(Leader, "on_fetch", _on_fetch)


@mutation("C4")
def push_before_first_fetch(put: Put) -> None:
    on_push = Follower.on_push

    def _on_push(self: Any, push: Any, batches: Any, now_ms: int) -> list[e.Effect]:
        kept = self.established, self._fetching
        if push.leader_epoch == self.epoch and push.base_offset <= self.log.log_end:
            self.established, self._fetching = True, False
        effects = on_push(self, push, batches, now_ms)
        self.established, self._fetching = kept[0], kept[1] or self._fetching
        return effects

    put(Follower, "on_push", _on_push)
    put(Follower, "on_flushed", lambda self: self._ack())
    put(Follower, "_continues", lambda self, push: push.base_offset <= self.log.log_end)


@mutation("C4")
def ack_over_gap(put: Put) -> None:
    on_push = Follower.on_push

    def _on_push(self: Any, push: Any, batches: Any, now_ms: int) -> list[e.Effect]:
        effects = on_push(self, push, batches, now_ms)
        if self.established and push.leader_epoch == self.epoch and push.base_offset > self.log.log_end:
            effects = [*effects, e.SendAck(self.key, self.leader, self.epoch, push.log_end)]
        return effects

    put(Follower, "on_push", _on_push)


@mutation("C5")
def ack_before_fsync(put: Put) -> None:
    append = Follower._append

    def _append(self: Any, batches: Any, high_watermark: int) -> list[e.Effect]:
        effects = append(self, batches, high_watermark)
        if effects:
            effects.append(e.SendAck(self.key, self.leader, self.epoch, self.log.log_end))
        return effects

    put(Follower, "_append", _append)
