"""A scripted cluster in one thread: the broker's side of the protocol, with every failure a test can ask for.

`FakeCluster` has a router socket per broker. By default it behaves: one log per partition, the producer table of E1/E2,
metadata, offsets, fetches that wait. `script` takes a function that sees each request first, and says what to do.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from unit.client.fake_coordinator import FakeCoordinator

from zmqueue import errors
from zmqueue.model import EARLIEST, LATEST
from zmqueue.transport import Socket, Transport, Waker
from zmqueue.wire import frames, messages
from zmqueue.wire.batch import HEADER_BYTES, BatchHeader, decode, parse_header
from zmqueue.wire.frames import Head, Operation

# What a script may return besides an error code or frames: nothing special, or no answer at all.
DEFAULT = None
SILENCE = "silence"
GARBAGE = "garbage"
DROP = "drop"
Script = Callable[["Seen"], Any]


class Seen:
    """One request as a broker received it."""

    def __init__(self, broker: int, peer: bytes, head: Head, message: Any, raw: list[bytes]) -> None:
        self.broker, self.peer, self.head, self.message, self.raw = broker, peer, head, message, raw

    @property
    def operation(self) -> Operation:
        return self.head.operation

    @property
    def headers(self) -> list[BatchHeader]:
        return [parse_header(frame) for frame in self.raw[::2]]


class Partition:
    def __init__(self, leader: int) -> None:
        self.leader = leader
        self.leader_epoch = 1
        self.batches: list[tuple[BatchHeader, bytes]] = []
        self.log_start = 0
        self.log_end = 0
        self.producers: dict[int, list[tuple[int, int, int]]] = {}

    def append(self, header: BatchHeader, body: bytes) -> tuple[int, int]:
        """(error, base offset)"""
        if header.producer_id >= 0:
            known = self.producers.get(header.producer_id)
            if known is None:
                if header.base_sequence != 0:
                    return errors.UnknownProducer.code, -1
                known = self.producers[header.producer_id] = []
            for first, last, offset in known[-8:]:
                if (first, last) == (header.base_sequence, header.last_sequence):
                    return 0, offset
            expected = known[-1][1] + 1 if known else 0
            if header.base_sequence < expected:
                return errors.DuplicateSequence.code, -1
            if header.base_sequence > expected:
                return errors.OutOfOrderSequence.code, -1
            known.append((header.base_sequence, header.last_sequence, self.log_end))
        header.base_offset, header.leader_epoch = self.log_end, self.leader_epoch
        self.batches.append((header, body))
        self.log_end = header.next_offset
        return 0, header.base_offset

    def lost_from(self, offset: int, last_epoch: int) -> int | None:
        """Where a reader's history leaves this one's, if it does: the record before `offset` had that epoch."""
        ends = {header.leader_epoch: header.next_offset for header, _ in self.batches}
        if last_epoch < 0 or not ends:
            return None
        epoch = max((each for each in ends if each <= last_epoch), default=-1)
        end = ends.get(epoch, 0)
        return None if epoch == last_epoch and offset <= end else min(end, offset)

    def read(self, offset: int, bytes_max: int) -> bytes:
        data = b""
        for header, body in self.batches:
            if header.next_offset > offset and (not data or len(data) < bytes_max):
                data += header.pack() + body
        return data


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class FakeCluster:
    def __init__(self, brokers: int = 1, topics: dict[str, int] | None = None) -> None:
        self.ports = {broker: free_port() for broker in range(brokers)}
        self.bootstrap = f"127.0.0.1:{self.ports[0]}"
        self.index = 1
        self.cluster_id = "fake"
        self.topics: dict[str, tuple[bytes, dict[int, Partition]]] = {}
        self.configs: dict[str, tuple[dict[str, str], int]] = {}  # settings of topics, and how often they changed
        self.seen: list[Seen] = []
        self.script: Script = lambda seen: DEFAULT
        self.next_producer = 1
        self.coordinator = FakeCoordinator(
            self.topics,
            lambda seen, message: seen.broker in self._sockets and self.answer(seen, message),
            lambda seen, code: self._sockets[seen.broker].send([seen.peer, *frames.failure(seen.head, code, "")]),
        )
        self._waiting: list[tuple[float, Seen]] = []
        self._sockets: dict[int, Socket] = {}
        self._reopening: set[int] = set()
        self._posted: list[tuple[Callable[[], None], threading.Event]] = []
        self._stop = False
        self._changed = threading.Condition()
        self._transport = Transport()
        self._waker = Waker()
        self._transport.watch(self._waker.fileno(), self._waker.clear)
        for name, count in (topics or {"t": 1}).items():
            self.add_topic(name, count)
        for broker in self.ports:
            self._open(broker)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> FakeCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._waker.wake()
        self._thread.join(5)
        self._transport.close()
        self._waker.close()

    # -- the test's thread -----------------------------------------------------------------------------------------

    def add_topic(self, name: str, count: int) -> None:
        leaders = sorted(self.ports)
        topic_id = len(self.topics).to_bytes(1, "big") + self.index.to_bytes(15, "big")
        self.topics[name] = topic_id, {n: Partition(leaders[n % len(leaders)]) for n in range(count)}
        self.index += 1

    def partition(self, topic: str = "t", number: int = 0) -> Partition:
        return self.topics[topic][1][number]

    def move(self, topic: str, number: int, leader: int) -> None:
        partition = self.partition(topic, number)
        partition.leader = leader
        partition.leader_epoch += 1
        self.index += 1

    def do(self, action: Callable[[], None]) -> None:
        """Run in the cluster's thread, and wait for it."""
        done = threading.Event()
        self._posted.append((action, done))
        self._waker.wake()
        assert done.wait(5)

    def kill(self, broker: int) -> None:
        self.do(lambda: self._transport.close_socket(self._sockets.pop(broker)))

    def start(self, broker: int) -> None:
        self.do(lambda: self._open(broker))

    def wait_for(self, ready: Callable[[], Any], timeout_s: float = 5.0) -> None:
        """Until something the cluster has seen makes it true."""
        with self._changed:
            assert self._changed.wait_for(ready, timeout_s), "the cluster did not see what was expected"

    def count(self, operation: Operation) -> int:
        return sum(seen.operation == operation for seen in list(self.seen))

    def values(self, topic: str = "t", number: int = 0) -> list[bytes]:
        return [v for h, body in self.partition(topic, number).batches for v in decode(h, body).values]

    # -- the cluster's thread ----------------------------------------------------------------------------------------

    def _open(self, broker: int) -> None:
        """libzmq closes sockets in its own time: a port that is still taken is tried again by the loop."""
        try:
            self._sockets[broker] = self._transport.router(
                "127.0.0.1", self.ports[broker], lambda: self._on_ready(broker), frame_bytes_max=8 << 20
            )
            self._reopening.discard(broker)
        except errors.PortInUse:
            self._reopening.add(broker)

    def _run(self) -> None:
        while not self._stop:
            busy = self._waiting or self._reopening or self.coordinator.waiting
            self._transport.poll(5 if busy else 1000)
            self.coordinator.tick()
            for broker in list(self._reopening):
                self._open(broker)
            while self._posted:
                action, done = self._posted.pop(0)
                action()
                done.set()
            waiting, self._waiting = self._waiting, []
            for deadline, seen in waiting:
                self._fetch(seen, deadline)

    def _on_ready(self, broker: int) -> None:
        while broker in self._sockets:
            received = self._sockets[broker].receive()
            if received is None:
                return
            peer, rest = received[0], received[1:]
            head = frames.parse_head(rest)
            seen = Seen(broker, peer, head, frames.parse_request(head, rest), rest[2:])
            with self._changed:
                self.seen.append(seen)
                self._handle(seen)
                self._changed.notify_all()

    def _handle(self, seen: Seen) -> None:
        verdict = self.script(seen)
        if verdict == SILENCE:
            return
        if verdict == GARBAGE:
            self._sockets[seen.broker].send([seen.peer, b"\xff\x00", b"nonsense"])
        elif verdict == DROP:
            # The connection goes, the broker stays.
            self._transport.close_socket(self._sockets.pop(seen.broker))
            self._open(seen.broker)
        elif isinstance(verdict, list):
            self._sockets[seen.broker].send([seen.peer, *verdict])
        elif isinstance(verdict, int) and seen.operation not in (Operation.PRODUCE, Operation.FETCH):
            self._sockets[seen.broker].send([seen.peer, *frames.failure(seen.head, verdict, "scripted")])
        elif seen.operation == Operation.FETCH:
            if isinstance(verdict, int):
                self.answer(seen, messages.FetchResponse([messages.FetchResult(verdict)] * len(seen.message.entries)))
            else:
                self._fetch(seen, time.monotonic() + seen.message.wait_ms / 1000)
        elif seen.operation == Operation.PRODUCE:
            self._produce(seen, verdict)
        elif seen.operation in (Operation.FIND, Operation.FETCH_BACKWARD):
            self._look_up(seen)
        elif seen.operation in FakeCoordinator.OPERATIONS:
            self.coordinator.handle(seen)
        else:
            self.answer(seen, self._reply(seen))

    def answer(self, seen: Seen, message: Any, raw: list[bytes] | None = None) -> None:
        self._sockets[seen.broker].send([seen.peer, *frames.response(seen.head, message, raw)])

    def _find(self, topic_id: bytes, number: int) -> Partition | None:
        return next((p.get(number) for i, p in self.topics.values() if i == topic_id), None)

    def _produce(self, seen: Seen, verdict: int | None) -> None:
        results = []
        for entry, header, body in zip(seen.message.entries, seen.headers, seen.raw[1::2], strict=True):
            partition = self._find(entry.topic_id, entry.partition)
            if partition is None:
                results.append(messages.ProduceResult(errors.UnknownTopicId.code))
            elif verdict is not None:
                results.append(messages.ProduceResult(verdict))
            elif partition.leader != seen.broker:
                results.append(
                    messages.ProduceResult(errors.NotLeader.code, -1, partition.leader_epoch, partition.leader)
                )
            else:
                error, offset = partition.append(header, body)
                results.append(messages.ProduceResult(error, offset, partition.leader_epoch, partition.leader, 1))
        if seen.message.acks != 0:
            self.answer(seen, messages.ProduceResponse(results))

    def _fetch(self, seen: Seen, deadline: float) -> None:
        if seen.broker not in self._sockets:
            return
        results, raw = [], []
        ready = time.monotonic() >= deadline
        for entry in seen.message.entries:
            partition = self._find(entry.topic_id, entry.partition)
            data = b""
            if partition is None:
                result = messages.FetchResult(errors.UnknownTopicId.code)
            elif partition.leader != seen.broker:
                result = messages.FetchResult(errors.NotLeader.code, -1, -1, partition.leader_epoch, partition.leader)
            elif not partition.log_start <= entry.offset <= partition.log_end:
                result = messages.FetchResult(errors.OffsetOutOfRange.code, partition.log_end, partition.log_start)
            elif (lost_from := partition.lost_from(entry.offset, entry.last_epoch)) is not None:
                result = messages.FetchResult(errors.LogTruncated.code, truncated_to=lost_from)
            else:
                data = partition.read(entry.offset, entry.bytes_max)
                result = messages.FetchResult(0, partition.log_end, partition.log_start, partition.leader_epoch)
            ready = ready or bool(data) or bool(result.error)
            results.append(result)
            raw.append(data)
        if ready:
            self.answer(seen, messages.FetchResponse(results), raw)
        else:
            self._waiting.append((deadline, seen))

    def _look_up(self, seen: Seen) -> None:
        """Topics are indexed by header `k`; one batch is looked at per request, or sent."""
        message = seen.message
        partition = self._find(message.topic_id, message.partition)
        if partition is None or partition.leader != seen.broker:
            code = errors.UnknownTopicId.code if partition is None else errors.NotLeader.code
            self._sockets[seen.broker].send([seen.peer, *frames.failure(seen.head, code, "")])
            return
        end, start, epoch = partition.log_end, partition.log_start, partition.leader_epoch
        if seen.operation == Operation.FIND:
            batch = next((b for b in partition.batches if b[0].next_offset > message.offset), None)
            offsets, scanned_to, data = [], end, b""
            if batch is not None:
                header, body = batch
                headers = decode(header, body).headers or [None] * header.record_count
                matching = [nth for nth, pairs in enumerate(headers) if ["k", message.value] in (pairs or [])]
                offsets = [o for nth in matching if (o := header.base_offset + nth) >= message.offset][: message.limit]
                scanned_to = header.next_offset if len(offsets) < message.limit else offsets[-1] + 1
                data = header.pack() + body if offsets else b""
            self.answer(seen, messages.FindResponse(offsets, scanned_to, end, start, epoch), [data])
        else:
            before = end if message.before < 0 else message.before
            batch = next((b for b in reversed(partition.batches) if b[0].base_offset < before), None)
            data = batch[0].pack() + batch[1] if batch is not None and batch[0].next_offset > start else b""
            self.answer(seen, messages.FetchBackwardResponse(before, end, start, epoch), [data])

    def _reply(self, seen: Seen) -> Any:
        message = seen.message
        match seen.operation:
            case Operation.METADATA:
                return self.metadata(message.topics)
            case Operation.PRODUCER_ID:
                self.next_producer += 1
                return messages.ProducerIdResponse(self.next_producer, 0)
            case Operation.CREATE_TOPIC:
                self.add_topic(message.name, message.partitions or 3)
                return messages.CreateTopicResponse(self.topics[message.name][0], message.partitions or 3, 1)
            case Operation.DELETE_TOPIC:
                del self.topics[message.name]
                self.index += 1
                return messages.Done()
            case Operation.ALTER_TOPIC:
                config, version = self.configs.get(message.name, ({}, 0))
                assert message.config_version == version
                changed = {k: v for k, v in {**config, **message.changes}.items() if v is not None}
                self.configs[message.name] = (changed, version + 1)
                self.index += 1
                return messages.Done()
            case Operation.DELETE_RECORDS:
                partition = self._find(message.topic_id, message.partition)
                assert partition is not None
                wanted = partition.log_end if message.offset == -1 else message.offset
                partition.log_start = max(partition.log_start, wanted)
                return messages.DeleteRecordsResponse(partition.log_start)
            case Operation.STATUS:
                return messages.StatusResponse(seen.broker, 1, False, 1, 1, 0, 1, self.index, True, 1, 1, 0, 0, 0)
            case Operation.LIST_OFFSETS:
                return messages.ListOffsetsResponse([self._offset(entry) for entry in message.entries])
            case Operation.DESCRIBE_PARTITIONS:
                found = [self._find(entry.topic_id, entry.partition) for entry in message.entries]
                rows = [messages.PartitionHealth(0, p.log_start, p.log_end, p.log_end, 1, 9) for p in found if p]
                return messages.DescribePartitionsResponse(rows)
        raise AssertionError(seen.operation)

    def _offset(self, entry: messages.OffsetEntry) -> messages.OffsetResult:
        partition = self._find(entry.topic_id, entry.partition)
        assert partition is not None
        if entry.timestamp == EARLIEST:
            return messages.OffsetResult(0, partition.log_start)
        if entry.timestamp == LATEST:
            return messages.OffsetResult(0, partition.log_end)
        for header, _ in partition.batches:
            if header.max_timestamp >= entry.timestamp:
                return messages.OffsetResult(0, header.base_offset, header.base_timestamp, partition.leader_epoch)
        return messages.OffsetResult(0, -1, -1, partition.leader_epoch)

    def metadata(self, names: list[str] | None) -> messages.MetadataResponse:
        topics = [
            messages.TopicInfo(
                name,
                topic_id,
                1,
                1,
                "disk",
                self.configs.get(name, ({}, 0))[0],
                [
                    messages.PartitionInfo(n, p.leader, p.leader_epoch, [p.leader], [p.leader], [])
                    for n, p in partitions.items()
                ],
                self.configs.get(name, ({}, 0))[1],
            )
            for name, (topic_id, partitions) in self.topics.items()
            if names is None or name in names
        ]
        brokers = [messages.BrokerInfo(b, "127.0.0.1", port, 1, False) for b, port in self.ports.items()]
        return messages.MetadataResponse(self.cluster_id, 0, self.index, brokers, topics)


def with_flipped_body_byte(data: bytes) -> bytes:
    """A range whose first batch no longer matches its checksum."""
    at = HEADER_BYTES + 3
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
