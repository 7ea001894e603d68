"""One partition of `__consumer_offsets` while this broker leads it in one epoch, and the coordinator that lives on it.

    reading     the log, slice by slice, up to where it ended when the reading began
    waiting     until the high watermark has reached that end: only then is what was read sure to stay (rule F1)
    active      requests and time go to the coordinator, its writes to the log
    failed      the log could not be read, or the coordinator made a mistake: tried anew after a pause. A broker must
                not die of a group, since the next one would die of the same
    closed      the partition has moved

Outside `active` requests are answered COORDINATOR_LOADING. A coordinator that gives up, because the log may hold what
it does not know, is replaced at once by a new one that reads the log again.

Invariants:
- every request that was taken is answered once: by the coordinator, or when its life ends;
- writes are appended in their order, several in a batch where they come together, a write never in two;
- results of writes reach only the coordinator that asked for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import final

from msgspec import Struct

from zmqueue.broker.logs import Logs
from zmqueue.broker.replies import Replies, Token
from zmqueue.core.effects import Effect
from zmqueue.core.group_effects import Answer, GiveUp, Log, Refuse, Write
from zmqueue.core.groups import Coordinator
from zmqueue.core.node import Node
from zmqueue.errors import CoordinatorLoading, CorruptBatch, CorruptLog, InvalidRecord, NotCoordinator, ZmqueueError
from zmqueue.model import ACKS_ALL, KiB, PartitionKey
from zmqueue.wire.batch import CONTROL, Batch, decode, encode, split
from zmqueue.wire.group_messages import GroupRow

_logger = logging.getLogger(__name__)

READ_BYTES = 64 * KiB
# How many records are read in one go: a few milliseconds of work.
SLICE_RECORDS = 100
WRITE_TIMEOUT_MS = 10_000
RETRY_MS = 5_000
RECORD_OVERHEAD_BYTES = 32
MISTAKE = "the broker made a mistake, see above"


class Phase(Enum):
    READING = "reading"
    WAITING = "waiting"
    ACTIVE = "active"
    FAILED = "failed"
    CLOSED = "closed"


class World(Struct, frozen=True):
    """What every host works with."""

    node: Node
    logs: Logs
    replies: Replies
    run: Callable[[list[Effect]], None]
    clock: Callable[[], int]
    wall_clock: Callable[[], int]
    new_coordinator: Callable[[], Coordinator]
    write_bytes_max: int


@final
class Writing(Struct, eq=False):
    """The token of a batch on its way into the log, and the numbers of the writes in it."""

    host: Host
    coordinator: Coordinator
    numbers: list[int]


class Host:
    def __init__(self, world: World, key: PartitionKey) -> None:
        self.key = key
        self._world = world
        self._epoch = world.node.replicas[key].leader_epoch
        self._open: dict[int, Token] = {}  # by identity: a client may ask twice under the same head
        self._writes: list[Write] = []
        self._begin()

    def _begin(self) -> None:
        world = self._world
        self._view = world.node.replicas[self.key].log
        self.coordinator = world.new_coordinator()
        self.phase = Phase.READING
        self._at, self._end = self._view.log_start, self._view.log_end
        self._reading = self._read()
        self._since_ms = world.clock()
        self.due_ms: int | None = None  # when time matters next

    # -- taking over -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Read another slice of the log, or see how far it is committed."""
        if self.phase is Phase.READING:
            self._read_slice()
        if self.phase is Phase.WAITING and self._view.high_watermark >= self._end:
            self._activate()

    def _read_slice(self) -> None:
        try:
            next(self._reading)
        except StopIteration:
            self.phase = Phase.WAITING
        except CorruptLog as error:
            self._world.node.on_lost(self.key)
            self._fail(str(error))
        except ZmqueueError as error:
            self._fail(str(error))
        except Exception:
            _logger.exception("group partition %d: before offset %d", self.key.partition, self._at)
            self._fail(MISTAKE)

    def _read(self) -> Iterator[None]:
        """Tell the coordinator all that the log holds, with a stop after every slice."""
        count = 0
        while self._at < self._end:
            self._at = max(self._at, self._view.log_start)
            for batch in split(self._world.logs[self.key].read(self._at, READ_BYTES, self._end)):
                self._at = batch.header.next_offset
                for key, value in self._records(batch):
                    try:
                        self.coordinator.replay(key, value)
                    except InvalidRecord as error:
                        self._pass_over(error)
                    count += 1
                    if count % SLICE_RECORDS == 0:
                        yield

    def _records(self, batch: Batch) -> Iterable[tuple[bytes | None, bytes | None]]:
        header = batch.header
        if header.attributes & CONTROL or not header.record_count:
            return ()
        try:
            columns = decode(header, batch.body)
        except CorruptBatch as error:
            self._pass_over(error)
            return ()
        return zip(columns.keys or [None] * len(columns.values), columns.values, strict=True)

    def _pass_over(self, error: CorruptBatch | InvalidRecord) -> None:
        """The bytes are as they were written: whoever wrote them was wrong, and no other copy is better."""
        _logger.error("group partition %d: before %d: passed over: %s", self.key.partition, self._at, error)

    def _fail(self, reason: str) -> None:
        _logger.error("group partition %d: no coordinator for now: %s", self.key.partition, reason)
        self.phase = Phase.FAILED
        self.due_ms = self._world.clock() + RETRY_MS

    def _activate(self) -> None:
        world = self._world
        self.phase = Phase.ACTIVE
        now_ms = world.clock()
        if self._hear(self.coordinator.activate, now_ms, world.wall_clock()):
            _logger.info(
                "group partition %d: coordinator active, epoch %d, %d groups, %d offsets read in %d ms",
                self.key.partition,
                self._epoch,
                len(self.coordinator.list_groups()),
                self._end - self._view.log_start,
                now_ms - self._since_ms,
            )

    # -- events ----------------------------------------------------------------------------------------------------

    def on_request(self, token: Token, event: Callable[..., list[Effect]], *arguments: object) -> None:
        """`event` is of the coordinator. Raises CoordinatorLoading."""
        self._check_active()
        self._open[id(token)] = token
        self._hear(event, token, *arguments)

    def list_groups(self) -> list[GroupRow]:
        self._check_active()
        return self.coordinator.list_groups()

    def _check_active(self) -> None:
        if self.phase is not Phase.ACTIVE:
            raise CoordinatorLoading()

    def on_topics(self) -> None:
        if self.phase is Phase.ACTIVE:
            self._hear(self.coordinator.on_topics, self._world.clock())

    def on_time(self, now_ms: int) -> None:
        """`due_ms` has come."""
        if self.phase is Phase.ACTIVE:
            self._hear(self.coordinator.on_tick, now_ms, self._world.wall_clock())
        elif self.phase is Phase.FAILED:
            self._begin()

    def on_written(self, writing: Writing, code: int) -> None:
        for number in writing.numbers:
            if writing.coordinator is self.coordinator and self.phase is Phase.ACTIVE:
                self._hear(self.coordinator.on_written, number, code, self._world.clock())

    def _hear(self, event: Callable[..., list[Effect]], *arguments: object) -> bool:
        """Whether the coordinator lives on."""
        try:
            self._perform(event(*arguments))
            self.due_ms = self.coordinator.next_due_ms
        except _GaveUp as gave_up:
            _logger.warning("group partition %d: read again: %s", self.key.partition, gave_up)
            self._drop(CoordinatorLoading())
            self._begin()
            return False
        except Exception:
            _logger.exception("group partition %d", self.key.partition)
            self._drop(CoordinatorLoading())
            self._fail(MISTAKE)
            return False
        return True

    # -- effects ---------------------------------------------------------------------------------------------------

    def _perform(self, effects: list[Effect]) -> None:
        replies = self._world.replies
        for effect in effects:
            match effect:
                case Answer(token, message):
                    del self._open[id(token)]
                    replies.answer(token, message)
                case Write():
                    self._writes.append(effect)
                case Refuse(token, code, text):
                    del self._open[id(token)]
                    replies.fail(token, code, text)
                case Log(text, warning):
                    _logger.log(logging.WARNING if warning else logging.INFO, "%s", text)
                case GiveUp(reason):
                    raise _GaveUp(reason)
                case _:
                    raise AssertionError(f"not an effect of a coordinator: {effect}")

    def write(self, now_ms: int) -> None:
        """Append what the coordinator wants to be written, in as few batches as it fits."""
        if not self._writes:
            return
        writes, self._writes = self._writes, []
        numbers: list[int] = []
        records: list[tuple[bytes, bytes | None]] = []
        size = 0
        for write in writes:
            length = sum(len(key) + len(value or b"") + RECORD_OVERHEAD_BYTES for key, value in write.records)
            if numbers and size + length > self._world.write_bytes_max:
                self._append(numbers, records, now_ms)
                numbers, records, size = [], [], 0
            numbers.append(write.number)
            records += write.records
            size += length
        self._append(numbers, records, now_ms)

    def _append(self, numbers: list[int], records: list[tuple[bytes, bytes | None]], now_ms: int) -> None:
        world = self._world
        keys, values = [key for key, _ in records], [value for _, value in records]
        batch = encode(values, keys=keys, base_timestamp=world.wall_clock())
        writing = Writing(self, self.coordinator, numbers)
        world.run(world.node.on_produce(self.key, writing, batch, ACKS_ALL, now_ms + WRITE_TIMEOUT_MS, now_ms))

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """This broker no longer leads the partition, or in another epoch."""
        self._drop(NotCoordinator())
        self.phase = Phase.CLOSED

    def _drop(self, error: ZmqueueError) -> None:
        waiting, self._open = self._open, {}
        self._writes.clear()
        for token in waiting.values():
            self._world.replies.fail(token, error.code, str(error))


class _GaveUp(Exception):
    """Says why."""
