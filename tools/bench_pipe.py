"""The bare pipe: ZeroMQ and files in the shape of zmqueue, without zmqueue.

Five broker processes, each with the sockets of a real one: a ROUTER for the producer, a PUB for its followers, a SUB to
the others' PUBs, a ROUTER and DEALERs for acknowledgements. Each appends the batches of the partitions it leads and
follows to one file per partition (writev), and one flush thread per process syncs what is dirty (fdatasync, group
commit). A batch is answered when its leader and all its followers have it on disk. The producer keeps a window of
batches per partition in flight. Nothing else is done: no checksum is looked at, nothing is parsed, indexed, decided or
retried. What this moves is what the product could move at best with the same sockets, files and number of processes.

Brokers are children that speak JSON lines over stdin and stdout: they say their ports, are told everybody's, and say
when their subscriptions are in place. They end when stdin ends, so none outlives its parent, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import zmq

BROKERS = 5
HOST = "127.0.0.1"
READY_S = 30
STALLED_S = 30
DRAINED_AT_ONCE = 64
BEACON_MS = 20
WARM_UP_ROUNDS = 20
BEACON = b"\xff" * 4
_NUMBER = struct.Struct(">I")
_PROGRESS = struct.Struct(">IQ")


@dataclass(frozen=True)
class Shape:
    """What raw and produce have in common. A batch has as many records as fit into `batch_bytes`."""

    value_bytes: int = 100
    batch_bytes: int = 65536
    partitions: int = 10
    window: int = 5
    replicas: int = 2

    def leader(self, partition: int) -> int:
        return partition % BROKERS

    def followers(self, partition: int) -> list[int]:
        return [(partition + n) % BROKERS for n in range(1, self.replicas)]


@dataclass
class Figures:
    """What a run has measured."""

    records: int
    record_bytes: int
    seconds: float
    latencies_ms: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, float]:
        return {
            "records": self.records,
            "seconds": round(self.seconds, 3),
            "records_per_s": round(self.records / self.seconds),
            "mb_per_s": round(self.records * self.record_bytes / self.seconds / 1e6, 1),
            **percentiles("latency", self.latencies_ms),
        }


def percentiles(name: str, samples_ms: list[float]) -> dict[str, float]:
    if len(samples_ms) < 2:
        return {}
    cuts = statistics.quantiles(samples_ms, n=100, method="inclusive")
    return {f"{name}_ms_p50": round(cuts[49], 3), f"{name}_ms_p99": round(cuts[98], 3)}


# -- a bare broker -----------------------------------------------------------------------------------------------


class Flusher:
    """Group commit: syncs every file that was written to since its last round, then reports how far each is safe."""

    def __init__(self) -> None:
        self._wanted = threading.Condition()
        self._dirty: dict[int, tuple[int, int]] = {}
        self.done: deque[tuple[int, int]] = deque()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, partition: int, fd: int, count: int) -> None:
        with self._wanted:
            self._dirty[partition] = (fd, count)
            if len(self._dirty) == 1:
                self._wanted.notify()

    def _run(self) -> None:
        while True:
            with self._wanted:
                while not self._dirty:
                    self._wanted.wait()
                dirty, self._dirty = self._dirty, {}
            for partition, (fd, count) in dirty.items():
                os.fdatasync(fd)
                self.done.append((partition, count))
                os.eventfd_write(self.wake_fd, 1)


class Partition:
    """Counts of batches: written here, safe here, safe at each follower, answered."""

    def __init__(self, fd: int, leader: int, followers: list[int]) -> None:
        self.fd = fd
        self.leader = leader
        self.safe = dict.fromkeys([leader, *followers], 0)
        self.written = 0
        self.answered = 0
        self.producer = b""


class Broker:
    def __init__(self, number: int, folder: Path, shape: Shape) -> None:
        self.number = number
        self.context = zmq.Context()
        self.client, client_port = self._bound(zmq.ROUTER)
        self.publisher, publisher_port = self._bound(zmq.PUB)
        self.peers, peers_port = self._bound(zmq.ROUTER)
        self.ports = {"client": client_port, "publisher": publisher_port, "peers": peers_port}
        self.subscriber = self.context.socket(zmq.SUB)
        self.dealers: dict[int, zmq.Socket[bytes]] = {}
        self.flusher = Flusher()
        self.partitions: dict[int, Partition] = {}
        self.heard: set[bytes] = set()
        for partition in range(shape.partitions):
            leader, followers = shape.leader(partition), shape.followers(partition)
            if number in (leader, *followers):
                path = folder / f"broker-{number}-partition-{partition}"
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                self.partitions[partition] = Partition(fd, leader, followers)

    def _bound(self, kind: int) -> tuple[zmq.Socket[bytes], int]:
        socket = self.context.socket(kind)
        return socket, socket.bind_to_random_port(f"tcp://{HOST}")

    def join(self, ports: list[dict[str, int]]) -> None:
        """Subscribe to the leaders of what is followed here, and wait until the subscriptions are in place."""
        followed = {n: partition.leader for n, partition in self.partitions.items() if partition.leader != self.number}
        for n in followed:
            self.subscriber.subscribe(_NUMBER.pack(n))
        # Subscriptions travel in order: once a beacon arrives, those before it are in effect at its sender.
        self.subscriber.subscribe(BEACON)
        for leader in sorted(set(followed.values())):
            self.subscriber.connect(f"tcp://{HOST}:{ports[leader]['publisher']}")
            self.dealers[leader] = self.context.socket(zmq.DEALER)
            self.dealers[leader].connect(f"tcp://{HOST}:{ports[leader]['peers']}")

    def serve(self, stdin: int) -> None:
        """Until stdin ends."""
        poller = zmq.Poller()
        handlers: dict[Any, Any] = {
            self.client: self._on_produce,
            self.subscriber: self._on_push,
            self.peers: self._on_acks,
            self.flusher.wake_fd: self._on_flushed,
        }
        for source in (*handlers, stdin):
            poller.register(source, zmq.POLLIN)
        beacon = [BEACON, _NUMBER.pack(self.number)]
        beaconing = True
        while True:
            ready = [source for source, _ in poller.poll(BEACON_MS if beaconing else None)]
            if beaconing:
                self.publisher.send_multipart(beacon)
                beaconing = self.client not in ready
            for source in ready:
                if source == stdin:
                    return
                handlers[source]()

    def _on_produce(self) -> None:
        for producer, number, header, body in _drained(self.client):
            partition = self.partitions[_NUMBER.unpack(number.buffer)[0]]
            partition.producer = producer.bytes
            self.publisher.send_multipart([number, header, body], copy=False)
            self._append(_NUMBER.unpack(number.buffer)[0], partition, header, body)

    def _on_push(self) -> None:
        for frames in _drained(self.subscriber):
            if frames[0].buffer == BEACON:
                if frames[1].bytes not in self.heard:
                    self.heard.add(frames[1].bytes)
                    if len(self.heard) == len(self.dealers):
                        say({"ready": True})
                continue
            number = _NUMBER.unpack(frames[0].buffer)[0]
            self._append(number, self.partitions[number], frames[1], frames[2])

    def _append(self, number: int, partition: Partition, header: zmq.Frame, body: zmq.Frame) -> None:
        buffers = [header.buffer, body.buffer]
        assert os.writev(partition.fd, buffers) == len(buffers[0]) + len(buffers[1]), "the disk is full"
        partition.written += 1
        self.flusher.submit(number, partition.fd, partition.written)

    def _on_flushed(self) -> None:
        os.eventfd_read(self.flusher.wake_fd)
        acks: dict[int, list[bytes]] = {}
        while self.flusher.done:
            number, count = self.flusher.done.popleft()
            partition = self.partitions[number]
            if partition.leader == self.number:
                self._safe(number, self.number, count)
            else:
                acks.setdefault(partition.leader, []).append(_PROGRESS.pack(number, count))
        for leader, rows in acks.items():
            self.dealers[leader].send_multipart([_NUMBER.pack(self.number), b"".join(rows)])

    def _on_acks(self) -> None:
        for _, follower, rows in _drained(self.peers):
            for number, count in _PROGRESS.iter_unpack(rows.buffer):
                self._safe(number, _NUMBER.unpack(follower.buffer)[0], count)

    def _safe(self, number: int, replica: int, count: int) -> None:
        partition = self.partitions[number]
        partition.safe[replica] = count
        everywhere = min(partition.safe.values())
        if everywhere > partition.answered:
            partition.answered = everywhere
            self.client.send_multipart([partition.producer, _PROGRESS.pack(number, everywhere)])


def _drained(socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """What has arrived, up to a bound that lets the other sockets have their turn."""
    for _ in range(DRAINED_AT_ONCE):
        try:
            yield socket.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return


def say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def broker_main(arguments: dict[str, Any]) -> None:
    broker = Broker(arguments["number"], Path(arguments["folder"]), Shape(**arguments["shape"]))
    say({"ports": broker.ports})
    line = sys.stdin.readline()
    if line:
        broker.join(json.loads(line)["ports"])
        if not broker.dealers:
            say({"ready": True})
        broker.serve(sys.stdin.fileno())
    broker.context.destroy(linger=0)


def echo_main() -> None:
    """The other end of the bare round trip."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    say({"port": socket.bind_to_random_port(f"tcp://{HOST}")})
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while all(source is socket for source, _ in poller.poll()):
        for who, number, _ in _drained(socket):
            socket.send_multipart([who, number], copy=False)
    context.destroy(linger=0)


# -- the parent's side -------------------------------------------------------------------------------------------


class Child:
    """A process of this module, or of another one. It ends when its stdin does, and is killed if it does not."""

    def __init__(self, role: str, module: str = __file__, **arguments: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, module, role, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C is for the parent, which ends its children in order.
            start_new_session=True,
        )

    def hear(self) -> dict[str, Any]:
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise RuntimeError("a process of the bare pipe ended early, see above")
        return json.loads(line)

    def tell(self, message: dict[str, Any]) -> None:
        stdin = self._pipe(self._process.stdin)
        stdin.write(json.dumps(message) + "\n")
        stdin.flush()

    def end(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                self._pipe(pipe).close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="zmqueue-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def bare_brokers(folder: Path, shape: Shape) -> Iterator[list[int]]:
    """The ports that the producer talks to."""
    with contextlib.ExitStack() as ends:
        children = []
        for number in range(BROKERS):
            child = Child("broker", number=number, folder=str(folder), shape=shape.__dict__)
            ends.callback(child.end)
            children.append(child)
        ports = [child.hear()["ports"] for child in children]
        for child in children:
            child.tell({"ports": ports})
        for child in children:
            assert child.hear()["ready"]
        yield [port["client"] for port in ports]


class Batches:
    """What the producer sends: each batch made anew from its values, as zmqueue does it, or one made before."""

    def __init__(self, shape: Shape, encode_each: bool) -> None:
        from zmqueue.wire import batch

        self._encode = batch.encode
        self._encode_each = encode_each
        value = os.urandom(shape.value_bytes)
        count = 1
        per_record = len(self._encode([value] * 100).body) // 100 or 1
        count = max(1, (shape.batch_bytes - batch.HEADER_BYTES) // per_record)
        while count > 1 and self._encode([value] * count).header.total_bytes > shape.batch_bytes:
            count -= 1
        self.records = count
        # Distinct objects, as a user's values are.
        self._values = [os.urandom(shape.value_bytes) for _ in range(count)]
        self._made = self._make()

    def next(self) -> list[bytes]:
        return self._make() if self._encode_each else self._made

    def _make(self) -> list[bytes]:
        made = self._encode(self._values, producer_id=1, producer_epoch=0, base_sequence=0)
        return [made.header.pack(), made.body]


class Producer:
    """Keeps the window of every partition full, for so many records or so long; then waits for all answers."""

    def __init__(self, ports: list[int], shape: Shape, batches: Batches) -> None:
        self._shape = shape
        self._batches = batches
        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.DEALER) for _ in ports]
        self._poller = zmq.Poller()
        for socket, port in zip(self._sockets, ports, strict=True):
            socket.connect(f"tcp://{HOST}:{port}")
            self._poller.register(socket, zmq.POLLIN)
        self._in_flight: list[deque[float]] = [deque() for _ in range(shape.partitions)]
        self._answered = [0] * shape.partitions

    def close(self) -> None:
        self._context.destroy(linger=0)

    def run(self, records: int, seconds: float | None = None) -> Figures:
        begun = time.monotonic()
        self._unsent = sys.maxsize if seconds is not None else -(-records // self._batches.records)
        self._deadline = begun + seconds if seconds is not None else float("inf")
        self._latencies_ms: list[float] = []
        for partition in range(self._shape.partitions):
            self._fill(partition)
        while any(self._in_flight):
            ready = self._poller.poll(STALLED_S * 1000)
            if not ready:
                raise RuntimeError(f"the bare pipe stood still for {STALLED_S} s")
            for socket, _ in ready:
                for [progress] in _drained(socket):
                    self._on_progress(*_PROGRESS.unpack(progress.buffer))
        took = time.monotonic() - begun
        sent = len(self._latencies_ms) * self._batches.records
        return Figures(sent, self._shape.value_bytes, took, self._latencies_ms)

    def _on_progress(self, partition: int, count: int) -> None:
        now, times = time.monotonic(), self._in_flight[partition]
        for _ in range(count - self._answered[partition]):
            self._latencies_ms.append((now - times.popleft()) * 1000)
        self._answered[partition] = count
        self._fill(partition)

    def _fill(self, partition: int) -> None:
        socket, times = self._sockets[self._shape.leader(partition)], self._in_flight[partition]
        while len(times) < self._shape.window and self._unsent and (now := time.monotonic()) < self._deadline:
            times.append(now)
            socket.send_multipart([_NUMBER.pack(partition), *self._batches.next()], copy=False)
            self._unsent -= 1


def bare_fdatasync(folder: Path, size: int, rounds: int = 200) -> dict[str, float]:
    """Append so many bytes and sync them, again and again."""
    data = os.urandom(size)
    samples = []
    fd = os.open(folder / "fdatasync", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        for _ in range(rounds):
            os.write(fd, data)
            begun = time.monotonic()
            os.fdatasync(fd)
            samples.append((time.monotonic() - begun) * 1000)
    finally:
        os.close(fd)
        os.unlink(folder / "fdatasync")
    return percentiles("fdatasync", samples)


def bare_round_trip(size: int, rounds: int = 500) -> dict[str, float]:
    """Send so many bytes to another process and wait for its short answer."""
    child = Child("echo")
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, STALLED_S * 1000)
        socket.connect(f"tcp://{HOST}:{child.hear()['port']}")
        message = [_NUMBER.pack(0), bytes(size)]
        samples = []
        for _ in range(rounds):
            begun = time.monotonic()
            socket.send_multipart(message, copy=False)
            socket.recv_multipart()
            samples.append((time.monotonic() - begun) * 1000)
        return percentiles("round_trip", samples[10:])
    finally:
        context.destroy(linger=0)
        child.end()


def run(shape: Shape, records: int, seconds: float | None, parent: Path, encode_each: bool) -> dict[str, Any]:
    """One run of the bare pipe, and what disk and sockets alone do at the same time on the same machine."""
    batches = Batches(shape, encode_each)
    with temporary_folder(parent) as folder:
        disk = bare_fdatasync(folder, shape.batch_bytes)
        trip = bare_round_trip(shape.batch_bytes)
        with bare_brokers(folder, shape) as ports, contextlib.closing(Producer(ports, shape, batches)) as producer:
            producer.run(WARM_UP_ROUNDS * shape.partitions * batches.records)
            figures = producer.run(records, seconds)
    return {
        "bench": "raw",
        "batches": "encoded" if encode_each else "prebuilt",
        **shape.__dict__,
        "records_per_batch": batches.records,
        **figures.as_dict(),
        **disk,
        **trip,
    }


if __name__ == "__main__":
    if sys.argv[1] == "broker":
        broker_main(json.loads(sys.argv[2]))
    else:
        echo_main()
