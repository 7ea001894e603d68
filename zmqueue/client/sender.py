"""The producer's half that lives in the IO thread: closed batches out, answers in.

`pump` looks at every lane that has something and sends what can be sent: batches of several partitions with one leader
share a request, one batch of a partition per request, at most `max_in_flight` requests per leader. It runs when records
arrive, when an answer arrives, when the world has changed (see routing.py) and when a batch has lingered; it may run at
any time, so whoever changes something just calls it.

What is sent, resent or given up for one partition is decided in ordering.py. Here is what belongs to several of them:
- Identities. All partitions begin under the producer's identity; one whose numbers broke takes a newer one, and others
  follow only when theirs break. Numbers are kept per partition, so a shared identity does not tie partitions together.
- Requests that stay unanswered for `STUCK_S`. The client then asks another broker who leads, again and again; when a
  partition's leader has moved, its batches are taken back and sent there, and the old answer is ignored.
"""

from __future__ import annotations

import time
from functools import partial
from typing import NamedTuple

from msgspec import Struct

from zmqueue.client.buffer import Batch, Buffer, Lane
from zmqueue.client.metrics import ProducerMetrics
from zmqueue.client.network import Answer, Request, Timer
from zmqueue.client.ordering import Identity, Settled
from zmqueue.client.routing import STUCK_S, Router, jittered
from zmqueue.errors import (
    ClientClosed,
    DeliveryTimeout,
    InvalidRecord,
    MessageTooLarge,
    NetworkError,
    NotLeader,
    UnknownTopicId,
    ZmqueueError,
    from_code,
)
from zmqueue.model import ACKS_NONE, NO_BROKER, MiB
from zmqueue.wire import batch as wire_batch
from zmqueue.wire import messages
from zmqueue.wire.frames import Operation

# A request is closed at this size; a batch is at most half of it, so none is ever refused for its company.
REQUEST_BYTES = 2 * MiB
ENTRIES_MAX = 1024
ANSWER_GRACE_S = 0.5
IDENTITY_TIMEOUT_S = 5.0
SWEEP_S_MAX = 1.0


class SenderSettings(Struct, frozen=True):
    acks: int
    codec: int
    max_in_flight: int
    batch_bytes_max: int
    request_timeout_s: float
    delivery_timeout_s: float
    retry_backoff_s: float
    retry_backoff_s_max: float
    retries_max: int | None = None


class Entry(NamedTuple):
    lane: Lane
    batch: Batch
    token: int


class Sent:
    """A produce request on its way."""

    __slots__ = ("at", "entries", "leader", "probe", "request", "stuck")

    def __init__(self, leader: int, entries: list[Entry], at: float) -> None:
        self.leader, self.entries, self.at = leader, entries, at
        self.request: Request | None = None
        self.probe: Timer | None = None
        self.stuck = False


class Draft:
    """A produce request that is being filled."""

    __slots__ = ("batches", "bytes")

    def __init__(self) -> None:
        self.batches: list[tuple[Lane, Batch]] = []
        self.bytes = 0

    @property
    def full(self) -> bool:
        return self.bytes >= REQUEST_BYTES // 2 or len(self.batches) >= ENTRIES_MAX


class Sender:
    def __init__(self, router: Router, buffer: Buffer, settings: SenderSettings, metrics: ProducerMetrics) -> None:
        self._router = router
        self._network = router.network
        self._buffer = buffer
        self._settings = settings
        self._metrics = metrics
        self._sent: dict[int, set[Sent]] = {}
        self._stuck: set[Sent] = set()
        self._identity: Identity | None = None
        self._identity_asked = False
        self._identity_failures = 0
        self._timer: Timer | None = None
        self._sweeping = False
        self._turn = 0
        self._due = 0.0
        router.listeners.append(self._on_world)

    # -- sending -------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        lanes = self._buffer.begin_pump()
        if not lanes:
            return
        self._turn = (self._turn + 1) % len(lanes)
        now = time.monotonic()
        self._due = float("inf")
        ready: dict[int, bool] = {}
        routes = []
        for lane in lanes[self._turn :] + lanes[: self._turn]:
            leader = self._route(lane)
            if leader != NO_BROKER and leader not in ready:
                ready[leader] = self._router.ready(leader)
            if leader == NO_BROKER or not ready[leader]:
                self._router.refresh(avoid=leader)
            else:
                routes.append((lane, leader))
        while routes:
            routes = self._fill_and_send(routes, now)
        self._set_timer(now)
        if not self._sweeping:
            self._sweeping = True
            self._network.call_later(min(SWEEP_S_MAX, self._settings.delivery_timeout_s / 10), self._sweep)

    def _fill_and_send(self, routes: list[tuple[Lane, int]], now: float) -> list[tuple[Lane, int]]:
        """One more request per leader that has room; the routes that may have more, those passed over first."""
        drafts: dict[int, Draft] = {}
        passed, served = [], []
        for lane, leader in routes:
            if len(self._sent.get(leader, ())) >= self._settings.max_in_flight:
                continue
            draft = drafts.get(leader)
            if draft is not None and draft.full:
                passed.append((lane, leader))
                continue
            batch = self._next_batch(lane, now)
            if batch is None:
                continue
            assert batch.header is not None
            if draft is None:
                draft = drafts[leader] = Draft()
            draft.batches.append((lane, batch))
            draft.bytes += batch.header.total_bytes
            served.append((lane, leader))
        for leader, draft in drafts.items():
            self._send(leader, draft)
        return passed + served

    def _route(self, lane: Lane) -> int:
        """The leader. On the way, what the lane needs before it can send at all."""
        view = self._router.metadata.topics.get(lane.topic)
        if view is None:
            return NO_BROKER
        if view.topic_id != lane.topic_id:
            lane.topic_id = view.topic_id
            error = UnknownTopicId(f"topic {lane.topic} was deleted and created again")
            self._settle(lane.order.reset(error))
        if lane.order.needs_identity:
            self._give_identity(lane)
        seen = view.partitions.get(lane.partition)
        return seen.leader if seen is not None else NO_BROKER

    def _next_batch(self, lane: Lane, now: float) -> Batch | None:
        order = lane.order
        if now < order.blocked_until:
            self._due = min(self._due, order.blocked_until)
            return None
        batch = order.next_to_send(now)
        while batch is None and order.has_room:
            fresh, due = self._buffer.take(lane, now, gather=bool(order.unsettled))
            if fresh is None:
                self._due = min(self._due, due)
                return None
            error = self._encode(fresh)
            if error is not None:
                self._buffer.settle(fresh, error)
                continue
            order.add(fresh)
            batch = fresh
        return batch

    def _encode(self, batch: Batch) -> ZmqueueError | None:
        deltas = batch.deltas if any(batch.deltas) else None
        try:
            batch.header, batch.body = wire_batch.encode(
                batch.values,
                keys=batch.keys,
                headers=batch.headers,
                timestamp_deltas=deltas,
                base_timestamp=batch.base_timestamp,
                codec=self._settings.codec,
            )
        except (TypeError, ValueError, OverflowError) as error:
            return InvalidRecord(f"the batch cannot be encoded: {error}")
        batch.delivery.deltas = deltas
        self._metrics.encoded(batch, time.monotonic())
        batch.values, batch.keys, batch.headers, batch.deltas = [], None, None, []
        if batch.header.total_bytes > self._settings.batch_bytes_max:
            return MessageTooLarge(
                f"a batch of {batch.header.total_bytes} bytes exceeds max_request_size={self._settings.batch_bytes_max}"
            )
        return None

    def _send(self, leader: int, draft: Draft) -> None:
        settings = self._settings
        rows: list[messages.ProduceEntry] = []
        raw: list[bytes] = []
        entries: list[Entry] = []
        now = time.monotonic()
        self._metrics.requested([batch for _, batch in draft.batches], now)
        for lane, batch in draft.batches:
            header = batch.header
            assert header is not None
            header.producer_id, header.producer_epoch = batch.identity
            header.base_sequence = batch.base_sequence
            rows.append(messages.ProduceEntry(lane.topic_id, lane.partition))
            raw += (header.pack(), batch.body)
            entries.append(Entry(lane, batch, lane.order.sent(batch)))
        message = messages.ProduceRequest(settings.acks, int(settings.request_timeout_s * 1000), rows)
        sent = Sent(leader, entries, now)
        self._sent.setdefault(leader, set()).add(sent)
        sent.request = self._router.send(
            leader,
            Operation.PRODUCE,
            message,
            raw,
            settings.request_timeout_s + ANSWER_GRACE_S,
            partial(self._on_answer, sent),
            answered=settings.acks != ACKS_NONE,
        )
        sent.probe = self._network.call_later(STUCK_S, partial(self._on_stuck, sent))

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._due != float("inf"):
            self._timer = self._network.call_later(max(0.0, self._due - now), self.pump)

    @property
    def in_flight(self) -> int:
        return sum(map(len, list(self._sent.values())))

    # -- answers -------------------------------------------------------------------------------------------------

    def _on_answer(self, sent: Sent, result: Answer | ZmqueueError) -> None:
        self._forget(sent)
        if isinstance(result, ClientClosed):
            return
        if isinstance(result, Answer):
            self._metrics.answered(time.monotonic() - sent.at)
        if isinstance(result, Answer) and self._settings.acks == ACKS_NONE:
            for lane, batch, token in sent.entries:
                self._settle(lane.order.acknowledged(batch, token))
        elif isinstance(result, Answer) and len(result.message.results) == len(sent.entries):
            for entry, row in zip(sent.entries, result.message.results, strict=True):
                self._on_result(sent.leader, entry, row)
        else:
            error = (
                result if isinstance(result, ZmqueueError) else NetworkError("an answer with a wrong number of results")
            )
            for entry in sent.entries:
                self._on_error(sent.leader, entry, error)
        for lane in {entry.lane for entry in sent.entries}:
            self._buffer.rest(lane)
        self.pump()

    def _on_result(self, leader: int, entry: Entry, row: messages.ProduceResult) -> None:
        lane, batch, token = entry
        if row.error:
            redirected = row.error == NotLeader.code and self._router.metadata.hint(
                lane.topic_id, lane.partition, row.leader, row.leader_epoch
            )
            self._on_error(leader, entry, from_code(row.error), redirected=redirected)
            return
        if not lane.order.is_current(batch, token):
            return
        delivery = batch.delivery
        delivery.base_offset, delivery.leader_epoch, delivery.replicas = row.base_offset, row.leader_epoch, row.replicas
        if row.append_timestamp >= 0:
            delivery.base_timestamp, delivery.deltas = row.append_timestamp, None
        self._settle(lane.order.acknowledged(batch, token))

    def _on_error(self, leader: int, entry: Entry, error: ZmqueueError, *, redirected: bool = False) -> None:
        lane, batch, token = entry
        if not lane.order.is_current(batch, token):
            return
        pause = _at_once if redirected else self._pause
        now = time.monotonic()
        self._settle(lane.order.failed(batch, token, error, now, pause))
        if self._settings.retries_max is not None and batch.sends > self._settings.retries_max:
            batch.deadline = now
            self._settle(lane.order.expire(now))
        if lane.order.fenced is not None:
            self.shut(lane.order.fenced)
        elif (error.refresh_metadata or not error.retriable) and not redirected:
            self._router.refresh(avoid=leader)

    def _pause(self, failures: int) -> float:
        return jittered(self._settings.retry_backoff_s, failures, self._settings.retry_backoff_s_max)

    def _settle(self, settled: list[Settled[Batch]]) -> None:
        for batch, error in settled:
            self._buffer.settle(batch, error)

    def _forget(self, sent: Sent) -> None:
        self._sent[sent.leader].discard(sent)
        self._stuck.discard(sent)
        if sent.probe is not None:
            sent.probe.cancel()

    # -- the world -----------------------------------------------------------------------------------------------

    def _on_world(self) -> None:
        if self._stuck:
            self._redirect_stuck()
        self.pump()

    def _on_stuck(self, sent: Sent) -> None:
        self._stuck.add(sent)
        sent.probe = self._network.call_later(STUCK_S, partial(self._on_stuck, sent))
        self._router.refresh(avoid=sent.leader)

    def _redirect_stuck(self) -> None:
        for sent in list(self._stuck):
            waits = False
            for lane, batch, token in sent.entries:
                if not lane.order.is_current(batch, token):
                    continue
                leader, _ = self._router.metadata.leader(lane.topic, lane.partition)
                if leader in (NO_BROKER, sent.leader):
                    waits = True
                else:
                    lane.order.abandon()
            if not waits:
                self._forget(sent)
                if sent.request is not None:
                    self._network.cancel(sent.request)

    def _sweep(self) -> None:
        """Give up what has waited longer than delivery_timeout_ms, wherever it is."""
        self._sweeping = False
        now = time.monotonic()
        for lane in self._buffer.begin_pump():
            last = lane.order.last_error
            for batch in self._buffer.expire(lane, now):
                why = f"; last error: {last.name}: {last}" if last is not None else ""
                self._buffer.settle(batch, DeliveryTimeout(f"not sent within delivery_timeout_ms{why}"))
            self._settle(lane.order.expire(now))
            self._buffer.rest(lane)
        self.pump()

    # -- identities ------------------------------------------------------------------------------------------------

    def _give_identity(self, lane: Lane) -> None:
        if self._identity is not None and lane.order.identity != self._identity:
            lane.order.take_identity(self._identity)
        elif not self._identity_asked:
            self._identity_asked = True
            self._network.request(
                self._router.any_address(),
                Operation.PRODUCER_ID,
                messages.ProducerIdRequest(),
                None,
                IDENTITY_TIMEOUT_S,
                self._on_identity,
            )

    def _on_identity(self, result: Answer | ZmqueueError) -> None:
        if isinstance(result, Answer):
            self._identity_asked = False
            self._identity_failures = 0
            self._identity = Identity(result.message.producer_id, result.message.producer_epoch)
            self.pump()
        elif not isinstance(result, ClientClosed):
            # Asked again by the next pump, of which the pause makes sure.
            def again() -> None:
                self._identity_asked = False
                self.pump()

            self._network.call_later(self._pause(self._identity_failures), again)
            self._identity_failures += 1

    # -- the end ---------------------------------------------------------------------------------------------------

    def shut(self, error: ZmqueueError) -> None:
        """Nothing more can be delivered: everybody who waits hears why."""
        lanes = self._buffer.begin_pump()
        for batch in self._buffer.refuse(error):
            self._buffer.settle(batch, error)
        for lane in lanes:
            for batch in lane.order.unsettled:
                if not batch.acked and not batch.reported:
                    self._buffer.settle(batch, error)
                batch.flying = False
            lane.order.unsettled.clear()
            self._buffer.rest(lane)


def _at_once(_: int) -> float:
    return 0.0
