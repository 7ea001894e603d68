"""Without the rules of idempotent producers (E)."""

from __future__ import annotations

from typing import Any

from tests.sim.mutations.registry import Put, mutation
from zmqueue.core import effects as e
from zmqueue.core.follower import Follower
from zmqueue.core.leader import Leader
from zmqueue.core.log_view import LogView
from zmqueue.core.producers import Producers
from zmqueue.errors import DuplicateSequence
from zmqueue.log.partition_log import PartitionLog
from zmqueue.log.start import Start


@mutation("E1")
def producer_state_not_rebuilt(put: Put) -> None:
    begin = Leader.begin

    def _begin(self: Any) -> list[e.Effect]:
        self.log.producers = Producers()
        return begin(self)

    put(Leader, "begin", _begin)


@mutation("E1")
def producer_state_not_rolled_back(put: Put) -> None:
    restate = LogView.restate

    def _restate(self: Any, log_start: int, log_end: int, epochs: Any, producers: Any, first_offset: int = -1) -> None:
        restate(self, log_start, log_end, epochs, self.producers, first_offset)

    put(LogView, "restate", _restate)


@mutation("E1")
def producers_of_deleted_batches_are_forgotten(put: Put) -> None:
    save = PartitionLog._save_start

    def _save(self: Any, start: Start, leaving: Any) -> None:
        save(self, Start(start.log_start, b"", start.epoch, start.base), leaving)

    put(PartitionLog, "_save_start", _save)


@mutation("E1")
def a_copy_that_starts_anew_knows_no_producers(put: Put) -> None:
    put(Follower, "_adopt", lambda self, response: [])


@mutation("E2")
def duplicate_acknowledged_early(put: Put) -> None:
    on_produce = Leader.on_produce

    def _on_produce(self: Any, token: Any, batch: Any, *args: Any, **options: Any) -> list[e.Effect]:
        try:
            written = self.log.producers.check(batch.header)
        except DuplicateSequence:
            written = None
        except Exception:
            return on_produce(self, token, batch, *args, **options)
        if written is not None:
            return [e.AnswerProduce(token, self._success(written.base_offset))]
        return on_produce(self, token, batch, *args, **options)

    put(Leader, "on_produce", _on_produce)


@mutation("E2")
def sequences_are_not_checked(put: Put) -> None:
    put(Producers, "check", lambda self, header: None)
