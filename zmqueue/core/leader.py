"""A replica while it leads, in one leader epoch. A new epoch gets a new object: nothing carries over but the log.

Invariants:
- high_watermark = min(own durable end, acknowledged end of every member of the maximal ISR), moves only forward, and
  only while the applied ISR has at least min_insync_replicas members;
- the maximal ISR is the applied ISR plus whoever a proposal under way would add: both outcomes are safe;
- at most one ISR proposal is under way, its content fixed when it is made; it ends when its result is applied here;
- a follower's entry belongs to this leader epoch and to one life (broker epoch) of the follower;
- an acks=all produce is answered with success only when the high watermark has passed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

from msgspec import Struct

from zmqueue import errors
from zmqueue.config import ReplicationConfig
from zmqueue.core.cluster import BrokerState, PartitionState
from zmqueue.core.commands import BrokerRef, IsrChange
from zmqueue.core.effects import (
    Advanced,
    AnswerFetch,
    AnswerProduce,
    Append,
    DeleteBefore,
    Effect,
    Flush,
    ProposeIsr,
    Publish,
    SendBatches,
    Token,
)
from zmqueue.core.epochs import NO_EPOCH
from zmqueue.core.lease import Lease
from zmqueue.core.log_view import LogView
from zmqueue.model import ACKS_ALL, ACKS_NONE, PartitionKey
from zmqueue.wire.batch import Batch
from zmqueue.wire.messages import BeaconRow, ProduceResult, ReplicaFetchRequest, ReplicaFetchResponse

# A log start that moved is told this often, as publications may get lost. Whoever misses them all hears it by fetch.
START_BEACONS = 10


class Progress(Struct, gc=False):
    """How far one follower is, in one of its lives.

    `caught_up_ms` is the latest time of which we know that the follower had everything we had then. The mark is how we
    learn it under load, when the follower is never exactly at our end: it had our whole log of `mark_ms` as soon as it
    acknowledges `mark_end`.
    """

    broker_epoch: int
    acked_end: int
    caught_up_ms: int
    mark_end: int
    mark_ms: int


class Waiting(Struct, order=True, gc=False):
    """A produce that is appended and not answered yet."""

    end: int
    number: int
    base: int
    deadline_ms: int
    token: Token


class Leader:
    def __init__(
        self,
        key: PartitionKey,
        broker: int,
        log: LogView,
        partition: PartitionState,
        min_insync: int,
        brokers: Mapping[int, BrokerState],
        lease: Lease,
        config: ReplicationConfig,
        now_ms: int,
    ) -> None:
        self.key = key
        self.broker = broker
        self.log = log
        self.epoch = partition.leader_epoch
        self.start_end = log.log_end  # "leader epoch start offset": nobody joins the ISR below it
        self.followers: dict[int, Progress] = {}
        self.pending: IsrChange | None = None
        self._brokers = brokers
        self._lease = lease
        self._config = config
        self._since_ms = now_ms
        self._waiting: list[Waiting] = []  # acks=all, a heap by end
        self._waiting_flush: list[Waiting] = []  # acks=1, likewise
        self._number = 0
        self._start_beacons = 0  # how often the log's start has yet to be told
        self._adopt(partition, min_insync)

    def begin(self) -> list[Effect]:
        return [Flush(self.key), *self._advance()]

    # -- producing -----------------------------------------------------------------------------------------------

    def on_produce(
        self, token: Token, batch: Batch, acks: int, deadline_ms: int, now_ms: int, *, over_quota: bool = False
    ) -> list[Effect]:
        header, log = batch.header, self.log
        if acks == ACKS_ALL:
            if len(self.isr) < self.min_insync:
                return self._refuse(token, errors.NotEnoughReplicas.code)
        elif not self._lease.writable(now_ms):
            return self._refuse(token, errors.LeaseExpired.code)
        if header.producer_id >= 0:
            try:
                written = log.producers.check(header)
            except errors.ZmqueueError as error:
                return self._refuse(token, error.code)
            if written is not None:
                return self._wait(token, written.base_offset, written.next_offset, acks, deadline_ms)
        if over_quota:
            return self._refuse(token, errors.QuotaExceeded.code)
        prev_epoch = log.epochs.last
        base = header.base_offset = log.log_end
        header.leader_epoch = self.epoch
        for progress in self.followers.values():
            if progress.acked_end >= base:
                progress.caught_up_ms = now_ms
        batches = [batch]
        log.note_appended(batches)
        effects: list[Effect] = [Append(self.key, batches)]
        if len(self.replicas) > 1:
            end = log.log_end
            effects.append(Publish(self.key, self.epoch, base, prev_epoch, log.high_watermark, end, batches))
        effects.append(Flush(self.key))
        effects += self._wait(token, base, log.log_end, acks, deadline_ms)
        return effects

    def _wait(self, token: Token, base: int, end: int, acks: int, deadline_ms: int) -> list[Effect]:
        """Answer now what is already safe, later what is not. A duplicate waits like the original."""
        if acks == ACKS_NONE:
            return []
        safe_end = self.log.high_watermark if acks == ACKS_ALL else self.log.durable_end
        if end <= safe_end:
            return [AnswerProduce(token, self._success(base))]
        self._number += 1
        heap = self._waiting if acks == ACKS_ALL else self._waiting_flush
        heappush(heap, Waiting(end, self._number, base, deadline_ms, token))
        return []

    def _success(self, base: int) -> ProduceResult:
        isr = len(self.isr)
        return ProduceResult(0, base, self.epoch, self.broker, isr, isr < len(self.replicas))

    def _refuse(self, token: Token, code: int) -> list[Effect]:
        return [AnswerProduce(token, ProduceResult(code, -1, self.epoch, self.broker))]

    def on_flushed(self, now_ms: int) -> list[Effect]:
        """The log's durable end has moved."""
        effects: list[Effect] = []
        heap = self._waiting_flush
        while heap and heap[0].end <= self.log.durable_end:
            waiting = heappop(heap)
            # Checked again at the answer: the process may have slept since the append.
            if self._lease.writable(now_ms):
                effects.append(AnswerProduce(waiting.token, self._success(waiting.base)))
            else:
                effects += self._refuse(waiting.token, errors.LeaseExpired.code)
        return effects + self._advance()

    def on_append_failed(self, code: int) -> list[Effect]:
        """The log is as it was before; what was appended by the failed step hears so."""
        effects: list[Effect] = []
        for heap in (self._waiting, self._waiting_flush):
            for waiting in [w for w in heap if w.end > self.log.log_end]:
                heap.remove(waiting)
                effects += self._refuse(waiting.token, code)
            heap.sort()
        return effects

    def _advance(self) -> list[Effect]:
        if len(self.isr) < self.min_insync:
            return []
        end = self.log.durable_end
        for member in self.maximal_isr:
            if member != self.broker:
                progress = self.followers.get(member)
                if progress is None:
                    return []
                if progress.acked_end < end:
                    end = progress.acked_end
        if end <= self.log.high_watermark:
            return []
        self.log.high_watermark = end
        effects: list[Effect] = [Advanced(self.key)]
        heap = self._waiting
        while heap and heap[0].end <= end:
            waiting = heappop(heap)
            effects.append(AnswerProduce(waiting.token, self._success(waiting.base)))
        return effects

    # -- followers -----------------------------------------------------------------------------------------------

    def on_ack(self, broker: int, broker_epoch: int, durable_end: int, now_ms: int) -> list[Effect]:
        if not self._progress(broker, broker_epoch, durable_end, now_ms):
            return []
        return self._advance() + self._expand(broker)

    def on_fetch(self, token: Token, fetch: ReplicaFetchRequest, now_ms: int) -> list[Effect]:
        """A follower asks for what it lacks. Its position counts only if its history is a prefix of ours."""
        log = self.log
        if fetch.broker not in self.replicas:
            return [self._reject(token, fetch, errors.InvalidRequest.code)]
        known = self.followers.get(fetch.broker)
        if known is not None and fetch.broker_epoch < known.broker_epoch:
            return [self._reject(token, fetch, errors.FencedEpoch.code)]
        if fetch.log_end < log.first_offset:
            # What it lacks is gone here: it starts anew where we start, and its position means nothing yet.
            return [AnswerFetch(token, self._response(fetch))]
        epoch, end = log.epochs.end_of(fetch.last_epoch, log.first_offset, log.log_end)
        if epoch < fetch.last_epoch or end < fetch.log_end:
            response = self._response(fetch)
            response.diverged_epoch, response.diverged_end = epoch, end
            return [AnswerFetch(token, response)]
        fresh = fetch.last_epoch == NO_EPOCH and fetch.log_end == log.first_offset > 0
        if not fresh:
            # One that has nothing counts when it acknowledges: until then it lacks what this answer tells it of
            # producers, and as a leader would not know them.
            self._progress(fetch.broker, fetch.broker_epoch, fetch.durable_end, now_ms)
        effects = self._advance()
        response = self._response(fetch)
        effects.append(SendBatches(token, self.key, fetch.log_end, fetch.bytes_max, response, fresh))
        return effects + self._expand(fetch.broker)

    def _progress(self, broker: int, broker_epoch: int, end: int, now_ms: int) -> bool:
        """Take note of a follower's durable end. False when it does not count."""
        log_end = self.log.log_end
        if broker not in self.replicas or broker == self.broker or end > log_end:
            return False
        progress = self.followers.get(broker)
        if progress is None or broker_epoch > progress.broker_epoch:
            # A new life of the follower: what its former life had acknowledged says nothing about this one.
            since = now_ms if end >= log_end else self._since_ms
            self.followers[broker] = Progress(broker_epoch, end, since, log_end, now_ms)
            return True
        if broker_epoch < progress.broker_epoch or end < progress.acked_end:
            return False
        progress.acked_end = end
        if end >= log_end:
            progress.caught_up_ms = now_ms
        elif end >= progress.mark_end:
            progress.caught_up_ms = max(progress.caught_up_ms, progress.mark_ms)
        if end >= progress.mark_end:
            progress.mark_end, progress.mark_ms = log_end, now_ms
        return True

    def _response(self, fetch: ReplicaFetchRequest) -> ReplicaFetchResponse:
        return ReplicaFetchResponse(
            topic_id=self.key.topic_id,
            partition=self.key.partition,
            fetch_id=fetch.fetch_id,
            leader_epoch=self.epoch,
            error=0,
            high_watermark=self.log.high_watermark,
            log_start=self.log.log_start,
            log_end=self.log.log_end,
            first_offset=self.log.first_offset,
        )

    def _reject(self, token: Token, fetch: ReplicaFetchRequest, code: int) -> AnswerFetch:
        response = self._response(fetch)
        response.error = code
        return AnswerFetch(token, response)

    def beacon(self) -> tuple[BeaconRow, bool]:
        """What to tell followers, and whether all of them that live know it already."""
        log = self.log
        row = BeaconRow(
            self.key.topic_id, self.key.partition, self.epoch, log.log_end, log.high_watermark, log.log_start
        )
        if self._start_beacons:
            self._start_beacons -= 1
            return row, False
        for replica in self.replicas:
            broker = self._brokers.get(replica)
            if replica == self.broker or broker is None or broker.fenced:
                continue
            progress = self.followers.get(replica)
            if progress is None or progress.acked_end < log.log_end:
                return row, False
        return row, True

    # -- the log's start -----------------------------------------------------------------------------------------

    def on_delete_records(self, offset: int, now_ms: int) -> list[Effect]:
        """Delete what lies below `offset`, -1 for all that is committed. Raises OffsetOutOfRange, LeaseExpired."""
        log = self.log
        if not self._lease.writable(now_ms):
            raise errors.LeaseExpired()
        end = min(log.high_watermark, log.durable_end)
        offset = end if offset == -1 else offset
        if not 0 <= offset <= end:
            raise errors.OffsetOutOfRange(f"offset {offset} is not in {log.log_start}..{end}")
        return [DeleteBefore(self.key, offset)] if offset > log.log_start else []

    def on_log_start(self) -> None:
        self._start_beacons = START_BEACONS

    # -- the ISR -------------------------------------------------------------------------------------------------

    def on_metadata(self, partition: PartitionState, min_insync: int, now_ms: int) -> list[Effect]:
        """The same epoch, but ISR, replicas or limits may have changed."""
        for member in partition.isr:
            if member not in self.isr and member in self.followers:
                self.followers[member].caught_up_ms = now_ms  # its time in the ISR begins now
        self._adopt(partition, min_insync)
        effects = self._advance()
        if len(self.isr) < self.min_insync:
            code = errors.NotEnoughReplicasAfterAppend.code
            effects += [effect for w in self._waiting for effect in self._refuse(w.token, code)]
            self._waiting.clear()
        # A follower that had caught up while it was fenced has nothing more to tell us: we have to look.
        for broker in list(self.followers):
            effects += self._expand(broker)
        return effects

    def on_isr_result(self) -> list[Effect]:
        """Our proposal was applied, accepted or not: only now may another be made."""
        self.pending = None
        self._set_maximal()
        effects = self._advance()
        for broker in list(self.followers):
            effects += self._expand(broker)
        return effects

    def _adopt(self, partition: PartitionState, min_insync: int) -> None:
        self.isr = list(partition.isr)
        self.replicas = list(partition.replicas)
        self.partition_epoch = partition.partition_epoch
        self.min_insync = min_insync
        self._set_maximal()

    def _set_maximal(self) -> None:
        proposed = [ref.broker for ref in self.pending.isr] if self.pending else []
        self.maximal_isr = list(dict.fromkeys([*self.isr, *proposed]))

    def _expand_any(self) -> list[Effect]:
        """A follower may have qualified while it was fenced, or while another proposal was under way."""
        return [effect for broker in self.followers for effect in self._expand(broker)]

    def _expand(self, broker: int) -> list[Effect]:
        if broker in self.isr or self.pending is not None or broker not in self.replicas:
            return []
        progress = self.followers.get(broker)
        state = self._brokers.get(broker)
        if progress is None or state is None or state.fenced or state.epoch != progress.broker_epoch:
            return []
        if progress.acked_end < self.log.high_watermark or progress.acked_end < self.start_end:
            return []
        return self._propose([*self.isr, broker])

    def _shrink(self, now_ms: int) -> list[Effect]:
        if self.pending is not None:
            return []
        limit = self._config.lag_ms_max
        slow = {member for member in self.isr if member != self.broker and self._lag_ms(member, now_ms) > limit}
        return self._propose([m for m in self.isr if m not in slow]) if slow else []

    def _lag_ms(self, member: int, now_ms: int) -> int:
        progress = self.followers.get(member)
        if progress is None:
            return now_ms - self._since_ms if self.log.log_end > self.log.high_watermark else 0
        return 0 if progress.acked_end >= self.log.log_end else now_ms - progress.caught_up_ms

    def _propose(self, isr: list[int]) -> list[Effect]:
        refs = []
        for member in isr:
            state = self._brokers.get(member)
            if state is None:
                return []
            progress = self.followers.get(member)
            # The epoch under which we saw it qualify; if it has restarted since, the proposal must fail.
            joined = progress is not None and member not in self.isr
            refs.append(BrokerRef(member, progress.broker_epoch if joined and progress else state.epoch))
        self.pending = IsrChange(self.key.topic_id, self.key.partition, self.epoch, self.partition_epoch, refs)
        self._set_maximal()
        return [ProposeIsr(self.key, self.pending)]

    # -- time ----------------------------------------------------------------------------------------------------

    def on_tick(self, now_ms: int) -> list[Effect]:
        effects = self._shrink(now_ms)
        for heap in (self._waiting, self._waiting_flush):
            late = [w for w in heap if w.deadline_ms <= now_ms]
            for waiting in late:
                heap.remove(waiting)
                effects += self._refuse(waiting.token, errors.RequestTimedOut.code)
            if late:
                heap.sort()
        return effects

    def on_stall(self, now_ms: int) -> None:
        """This process did not run for a while: nobody is late on account of that."""
        self._since_ms = now_ms
        for progress in self.followers.values():
            progress.caught_up_ms = progress.mark_ms = now_ms

    def end(self, leader: int, leader_epoch: int) -> list[Effect]:
        """We lead no longer. Whatever waits may or may not survive: its producer has to ask the next leader."""
        waiting = [*self._waiting, *self._waiting_flush]
        self._waiting.clear()
        self._waiting_flush.clear()
        result = ProduceResult(errors.NotLeader.code, -1, leader_epoch, leader)
        return [AnswerProduce(w.token, result) for w in waiting]

    @property
    def is_busy(self) -> bool:
        """Whether time matters to this partition right now."""
        return bool(self._waiting or self._waiting_flush) or any(
            member != self.broker and ((p := self.followers.get(member)) is None or p.acked_end < self.log.log_end)
            for member in self.isr
        )
