"""A replica while it follows, in one leader epoch. A new epoch gets a new object: nothing carries over but the log.

It begins unestablished: it fetches, and where its history leaves the leader's it cuts its own log back, until a fetch
finds both in agreement. From then on, in this epoch, it never truncates. Pushes are appended only if they continue the
log exactly; a gap is fetched, and pushes that arrive meanwhile are held, so that it gets back into the stream.

Invariants:
- at most one fetch is outstanding, and an answer is used only if it answers the newest one, once;
- what is acknowledged is a durable, contiguous prefix of the leader's log;
- the high watermark is a hint: it is never a point to truncate to.
"""

from __future__ import annotations

from collections import deque

import msgspec

from zmqueue.config import ReplicationConfig
from zmqueue.core.effects import Adopt, Append, DeleteBefore, Effect, Flush, Reset, SendAck, SendFetch, Truncate
from zmqueue.core.log_view import LogView
from zmqueue.core.producers import Producers
from zmqueue.model import PartitionKey
from zmqueue.wire.batch import Batch, is_void, void_from
from zmqueue.wire.messages import BeaconRow, Push, ReplicaFetchRequest, ReplicaFetchResponse

RETRY_MS = 50
FETCH_ID_BITS = 30  # for the fetches of one leader epoch in one life; a broker epoch takes the 31 above


def _is_state(producers: bytes) -> bool:
    try:
        Producers.decode(producers)
    except msgspec.MsgspecError:
        return False
    return True


class Follower:
    def __init__(
        self,
        key: PartitionKey,
        broker: int,
        broker_epoch: int,
        cluster_id: str,
        log: LogView,
        leader: int,
        leader_epoch: int,
        config: ReplicationConfig,
    ) -> None:
        self.key = key
        self.broker = broker
        self.broker_epoch = broker_epoch
        self.cluster_id = cluster_id
        self.log = log
        self.leader = leader
        self.epoch = leader_epoch
        self.established = False
        self._config = config
        self._fetch_id = broker_epoch << FETCH_ID_BITS  # an answer to a former life of ours never fits
        self._fetching = False
        self._fetch_due_ms: int | None = 0  # when to fetch (again); None while nothing is missing
        self._held: deque[tuple[Push, list[Batch]]] = deque()
        self._held_bytes = 0

    def begin(self, now_ms: int) -> list[Effect]:
        return self._fetch(now_ms)

    def _fetch(self, now_ms: int) -> list[Effect]:
        self._fetch_id += 1
        self._fetching = True
        self._fetch_due_ms = now_ms + self._config.fetch_timeout_ms
        request = ReplicaFetchRequest(
            cluster_id=self.cluster_id,
            broker=self.broker,
            broker_epoch=self.broker_epoch,
            topic_id=self.key.topic_id,
            partition=self.key.partition,
            leader_epoch=self.epoch,
            fetch_id=self._fetch_id,
            log_end=self.log.log_end,
            last_epoch=self.log.epochs.last,
            durable_end=self.log.durable_end,
            bytes_max=self._config.fetch_bytes_max,
        )
        return [SendFetch(self.leader, request)]

    def on_fetched(self, response: ReplicaFetchResponse, batches: list[Batch], now_ms: int) -> list[Effect]:
        if not self._fetching or response.fetch_id != self._fetch_id or response.leader_epoch != self.epoch:
            return []
        self._fetching = False
        self._fetch_due_ms = now_ms + RETRY_MS
        if response.error or not _is_state(response.producers):
            return []
        if response.diverged_epoch >= 0 or response.diverged_end >= 0:
            if self.established:
                return []
            return self._cut_back(response)
        if response.first_offset > self.log.log_end:
            # The leader no longer has what we lack. Unestablished again: the next answer must prove agreement.
            self.established = False
            return [Reset(self.key, response.first_offset)]
        adopted = self._adopt(response)
        self.established = True
        self._fetch_due_ms = None
        effects = adopted + self._append(self._fresh(batches), response.high_watermark) + self._release()
        effects += self._follow_start(response.log_start)
        if self.log.log_end < response.log_end or self._held:
            effects += self._fetch(now_ms)  # held pushes that still do not fit show a gap behind the answer
        return effects

    def _cut_back(self, response: ReplicaFetchResponse) -> list[Effect]:
        """To where the leader's and our own history part: the end of the last epoch that both know."""
        log = self.log
        _, own_end = log.epochs.end_of(response.diverged_epoch, log.first_offset, log.log_end)
        end = min(own_end, response.diverged_end)
        if end < log.log_start:
            # They part before our first record: nothing of ours is the leader's, and we start where it starts.
            return [Reset(self.key, response.first_offset)]
        return [Truncate(self.key, end)]

    def _adopt(self, response: ReplicaFetchResponse) -> list[Effect]:
        """Our log begins empty where the leader's does: what the leader knows of the records before, we cannot read."""
        log = self.log
        if not response.producers or not log.first_offset == log.log_end == response.first_offset:
            return []
        log.producers = Producers.decode(response.producers)
        log.epochs.begin_at(log.first_offset, response.start_epoch)
        return [Adopt(self.key, response.start_epoch, response.producers)]

    def _follow_start(self, log_start: int) -> list[Effect]:
        """What is deleted at the leader is deleted here, as far as we know it to be committed and have it durable."""
        log = self.log
        offset = min(log_start, log.high_watermark, log.durable_end)
        return [DeleteBefore(self.key, offset)] if offset > log.log_start else []

    def on_truncated(self, now_ms: int) -> list[Effect]:
        """What is left is durable, but flushes under way before the cut no longer count: only a new one tells us so.

        Without it a follower that has nothing more to append would never acknowledge what it holds.
        """
        return [Flush(self.key), *self._fetch(now_ms)]

    def on_push(self, push: Push, batches: list[Batch], now_ms: int) -> list[Effect]:
        if push.leader_epoch != self.epoch or push.broker != self.leader:
            return []
        if not self.established or self._fetching:
            self._hold(push, batches)
            return []
        if not self._continues(push):
            self._hold(push, batches)
            return self._fetch(now_ms)
        return self._append(self._fresh(batches), push.high_watermark)

    def _continues(self, push: Push) -> bool:
        """Whether a push has no gap before it and, at our very end, follows the record that we have there."""
        log = self.log
        return push.base_offset < log.log_end or (
            push.base_offset == log.log_end and push.prev_epoch == log.epochs.last
        )

    def _hold(self, push: Push, batches: list[Batch]) -> None:
        size = sum(batch.header.total_bytes for batch in batches)
        if self._held_bytes + size <= self._config.held_bytes_max:
            self._held.append((push, batches))
            self._held_bytes += size

    def _release(self) -> list[Effect]:
        """Append those held pushes that now continue the log; others wait or are over."""
        effects: list[Effect] = []
        while self._held:
            push, batches = self._held[0]
            if push.base_offset > self.log.log_end:
                break
            self._held.popleft()
            self._held_bytes -= sum(batch.header.total_bytes for batch in batches)
            if self._continues(push):
                effects += self._append(self._fresh(batches), push.high_watermark)
        return effects

    def _fresh(self, batches: list[Batch]) -> list[Batch]:
        """Those that we lack.

        A batch has the same bounds in every replica, but where compaction has merged batches that lost all records:
        of such a one we may have the first part, with records or without.
        """
        end = self.log.log_end
        lacking = [batch for batch in batches if batch.header.next_offset > end]
        if lacking and lacking[0].header.base_offset < end and is_void(lacking[0].header):
            lacking[0] = void_from(lacking[0], end)
        return [batch for batch in lacking if batch.header.base_offset >= end]

    def _append(self, batches: list[Batch], high_watermark: int) -> list[Effect]:
        """Contiguous batches at our end. Whatever does not continue the log is not appended."""
        fitting: list[Batch] = []
        end = self.log.log_end
        epoch = self.log.epochs.last
        for batch in batches:
            header = batch.header
            if header.base_offset != end or header.leader_epoch < epoch or header.leader_epoch > self.epoch:
                break
            fitting.append(batch)
            end, epoch = header.next_offset, header.leader_epoch
        if fitting:
            self.log.note_appended(fitting)
        self.log.high_watermark = max(self.log.high_watermark, min(high_watermark, self.log.log_end))
        return [Append(self.key, fitting), Flush(self.key)] if fitting else []

    def on_beacon(self, row: BeaconRow, now_ms: int) -> list[Effect]:
        """Pushes and beacons come in order: a beacon beyond our end means that pushes were lost."""
        if row.leader_epoch != self.epoch or not self.established or self._fetching:
            return []
        log = self.log
        log.high_watermark = max(log.high_watermark, min(row.high_watermark, log.log_end))
        if row.log_end > log.log_end:
            return self._fetch(now_ms)
        # The leader lists us as behind although we are not: an acknowledgement was lost.
        acks = self._ack() if log.durable_end == log.log_end else []
        return acks + self._follow_start(row.log_start)

    def on_flushed(self) -> list[Effect]:
        return self._ack() if self.established else []

    def _ack(self) -> list[Effect]:
        return [SendAck(self.key, self.leader, self.epoch, self.log.durable_end)]

    def on_append_failed(self, now_ms: int) -> list[Effect]:
        """The log is as it was before: ask again, a little later."""
        if self.log.first_offset == self.log.log_end:
            self.established = False  # perhaps it was the beginning that failed (see `_adopt`)
        self._held.clear()
        self._held_bytes = 0
        self._fetching = False
        self._fetch_due_ms = now_ms + self._config.fetch_timeout_ms
        return []

    def on_tick(self, now_ms: int) -> list[Effect]:
        if self._fetch_due_ms is not None and now_ms >= self._fetch_due_ms:
            return self._fetch(now_ms)
        return []

    @property
    def is_busy(self) -> bool:
        return self._fetch_due_ms is not None
