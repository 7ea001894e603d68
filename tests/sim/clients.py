"""Producers and consumers: they know the cluster only by what brokers tell them, and that may be old.

A producer is idempotent. It keeps a window of batches unacknowledged and, on any error or silence, sends the whole
window again from the oldest batch, with the same sequences, to whoever it then takes for the leader. Requests on one
connection stay in order, as TCP keeps them; answers may be lost.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from tests.sim import plan
from zmqueue import errors
from zmqueue.model import ACKS_ALL, NO_BROKER, PartitionKey
from zmqueue.wire.batch import Batch, encode
from zmqueue.wire.messages import FetchEntry, FetchRequest, FetchResponse, ProduceResult

if TYPE_CHECKING:
    from tests.sim.broker import SimBroker
    from tests.sim.world import World

TIMEOUT_MS = 350


class Client:
    def __init__(self, world: World, key: PartitionKey) -> None:
        self.world = world
        self.key = key
        self.leader = NO_BROKER
        self._arrival_ms: dict[int, int] = {}

    def look_up(self) -> None:
        """Ask any broker who leads."""
        world = self.world
        broker = world.brokers[int(world.random() * len(world.brokers))]
        if broker.alive and not broker.paused:
            partition = broker.state.partition(self.key)
            if partition is not None:
                self.leader = partition.leader

    def arrival_delay_ms(self, broker: int) -> int:
        """-1: lost. Never before what was sent to the same broker earlier."""
        world = self.world
        if world.random() < world.network.drop / 2:
            return -1
        due_ms = max(world.now + 1 + int(world.random() * 4), self._arrival_ms.get(broker, 0))
        self._arrival_ms[broker] = due_ms
        return due_ms - world.now


@lru_cache(1_000)
def _encoded(producer: int, first: int, count: int) -> Batch:
    """Schedules send the same few batches again and again."""
    values: list[bytes | None] = [b"%d/%d" % (producer, first + nth) for nth in range(count)]
    return encode(values, producer_id=producer, producer_epoch=0, base_sequence=first)


class Sent:
    """A batch of a producer."""

    __slots__ = ("batch", "count", "first", "rows")

    def __init__(self, producer: int, first: int, count: int) -> None:
        self.first = first
        self.count = count
        self.batch = _encoded(producer, first, count)
        self.rows = [(producer, first + nth, self.batch.header.body_crc) for nth in range(count)]

    @property
    def last_sequence(self) -> int:
        return self.first + self.count - 1

    def fresh(self) -> Batch:
        """The header is written to by the leader that appends it."""
        return Batch(self.batch.header.__copy__(), self.batch.body)

    def __repr__(self) -> str:
        return f"batch {self.first}..{self.last_sequence}"


class SimProducer(Client):
    def __init__(self, world: World, number: int, key: PartitionKey, load: plan.Producer) -> None:
        super().__init__(world, key)
        self.id = number
        self.acks = load.acks
        self.unacked: list[Sent] = []
        self._left = load.batches
        self._window = load.window
        self._pace_ms = load.pace_ms
        self._sequence = 0
        self._sent_ms = 0
        self._failed = False
        self._gaps = 0
        self._attempt = 0

    @property
    def is_done(self) -> bool:
        return self._failed or (self._left == 0 and not self.unacked)

    def run(self) -> None:
        """Again and again: send something new, or everything again if nothing was heard for long."""
        world = self.world
        if self.is_done:
            return
        if world.closing:
            self._left = 0
        if self.unacked and world.now - self._sent_ms > TIMEOUT_MS:
            self._resend()
        elif self._left and len(self.unacked) < self._window:
            sent = Sent(self.id, self._sequence, 1 + int(world.random() * 2))
            self._left -= 1
            self._sequence += sent.count
            self.unacked.append(sent)
            self._send(sent)
        pace_ms = self._pace_ms if self._left and len(self.unacked) < self._window else 100
        world.at(pace_ms + int(world.random() * pace_ms), None, None, self.run, ())

    def _resend(self) -> None:
        self._attempt += 1
        self.look_up()
        for sent in self.unacked:
            self._send(sent)

    def _send(self, sent: Sent) -> None:
        world = self.world
        self._sent_ms = world.now
        if self.leader == NO_BROKER:
            self.look_up()
        if self.leader != NO_BROKER:
            delay_ms = self.arrival_delay_ms(self.leader)
            if delay_ms >= 0:
                broker = world.brokers[self.leader]
                args = (self.key, (self, sent), sent.fresh(), self.acks, 300)
                world.at(delay_ms, broker, None, broker.on_produce, args)

    def hear(self, sent: Sent, result: ProduceResult) -> None:
        """Called by the broker; the answer travels."""
        world = self.world
        if world.random() >= world.network.drop / 2:
            world.at(1 + int(world.random() * 4), None, None, self._on_result, (sent, result, self._attempt))

    def _on_result(self, sent: Sent, result: ProduceResult, attempt: int) -> None:
        if sent not in self.unacked:
            return
        if result.error in (0, errors.DuplicateSequence.code):
            self.unacked.remove(sent)
            return
        if result.error == errors.UnknownProducer.code and sent is self.unacked[0] and sent.first > 0:
            if self.acks == ACKS_ALL:
                part = self.world.checker.parts[self.key]
                if part.epoch == result.leader_epoch and part.sequences.get(self.id, -1) >= 0:
                    self.world.checker.fail("incomplete", f"{self}: unknown in epoch {result.leader_epoch}")
            else:
                # Acknowledged by a leader alone, and lost with it: all a producer can do is to say so.
                self._failed = True
                return
        if result.error == errors.OutOfOrderSequence.code and sent is self.unacked[0] and self.acks != ACKS_ALL:
            self._gaps += 1
            if self._gaps > 5:
                self._failed = True  # as above
        if attempt == self._attempt:
            self._attempt += 1  # one resend for a window of refusals
            if result.leader >= 0:
                self.leader = result.leader
            self.world.at(20 + int(self.world.random() * 60), None, None, self._retry, (self._attempt,))

    def _retry(self, attempt: int) -> None:
        if attempt == self._attempt and self.unacked and not self._failed:
            self._resend()

    def __repr__(self) -> str:
        return f"producer {self.id} of {self.key}"


class SimConsumer(Client):
    def __init__(self, world: World, key: PartitionKey) -> None:
        super().__init__(world, key)
        self.offset = 0

    def __repr__(self) -> str:
        return f"consumer of {self.key}"

    def run(self) -> None:
        world = self.world
        if self.leader == NO_BROKER or world.random() < 0.1:
            self.look_up()
        if self.leader != NO_BROKER:
            delay_ms = self.arrival_delay_ms(self.leader)
            if delay_ms >= 0:
                broker = world.brokers[self.leader]
                wait_ms = 0 if world.random() < 0.5 else 80
                entry = FetchEntry(self.key.topic_id, self.key.partition, self.offset, 1 << 16)
                request = FetchRequest(wait_ms, 1, 1 << 16, 0, [entry])
                world.at(delay_ms, broker, None, broker.on_fetch, (self, request))
        if not world.closing:
            world.at(80 + int(world.random() * 150), None, None, self.run, ())

    def hear(self, broker: SimBroker, response: FetchResponse, frames: list[bytes]) -> None:
        """Checked where it is read; the consumer itself goes on only from its own offset."""
        result = response.results[0]
        if result.error:
            self.leader = result.leader if result.leader >= 0 else NO_BROKER
            if result.error == errors.OffsetOutOfRange.code:
                self.offset = max(self.offset, result.log_start)
            return
        end = self.world.checker.on_read(broker, self.key, result, frames[0])
        self.offset = max(self.offset, end)
