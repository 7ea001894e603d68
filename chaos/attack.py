"""`python -m chaos.attack MODE ...`: strangers and bad clients, each a process of its own.

    flood HOST PORT KIND CONNECTIONS   opens them and holds on until its stdin ends. KIND: `silent` says nothing,
                                       `trickle` a byte of the greeting every half second, `greeted` the whole
                                       handshake and nothing after it
    garbage HOST PORT WHAT SECONDS SEED RATE
                                       what is no message, is too large, or never ends; WHAT: client, peer, push, raft
    produce BOOTSTRAP TOPIC MIB_PER_S  records of 10 kB until its stdin ends
    consume BOOTSTRAP TOPIC [PAUSE_S]  reads the topic and rests between polls, until its stdin ends
    hoard HOST PORT TOPIC_ID PARTITION REQUESTS
                                       asks for records again and again and reads no answer, until its stdin ends

What they achieved comes as one line of JSON on stdout: when all is open, or at the end. They are processes because the
harness, too, has clients whose latency is measured.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

TRICKLE_S = 0.5
RECORD_BYTES = 10_000
RECORDS_AT_ONCE = 20
PARTITIONS = 10
CONNECT_S_MAX = 5.0
CALLING_MAX = 50
GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "frames.json"
# These would be obeyed, or ask for what other brokers alone may have.
SPARED = ("CREATE_TOPIC", "DELETE_TOPIC", "ELECT_UNCLEAN")

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4
MIB = 1 << 20


def ready(socket_type: bytes) -> bytes:
    """The command that ends the handshake."""
    body = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", len(socket_type)) + socket_type
    return bytes([COMMAND, len(body)]) + body


def tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


def stdin_ends_within(seconds: float) -> bool:
    return bool(select.select([sys.stdin], [], [], seconds)[0])


# -- connections ---------------------------------------------------------------------------------------------------


def flood(host: str, port: int, kind: str, connections: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    open_ones = _connect_many(host, port, connections)
    if kind == "greeted":
        for sock in open_ones:
            _write(sock, GREETING + ready(b"DEALER"))
    tell(opened=len(open_ones))
    said = 0
    while not stdin_ends_within(TRICKLE_S):
        if kind == "trickle":
            for sock in open_ones:
                _write(sock, GREETING[said : said + 1])
            said += 1


def _connect_many(host: str, port: int, connections: int) -> list[socket.socket]:
    """As fast as they are accepted: a backlog that overflows would cost seconds of retransmission."""
    open_ones: list[socket.socket] = []
    calling: dict[int, socket.socket] = {}
    poller = select.poll()
    begun = 0
    while begun < connections or calling:
        while begun < connections and len(calling) < CALLING_MAX:
            begun += 1
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex((host, port))
            calling[sock.fileno()] = sock
            poller.register(sock, select.POLLOUT)
        for fd, _ in poller.poll():
            poller.unregister(fd)
            sock = calling.pop(fd)
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                open_ones.append(sock)
    return open_ones


def _connect(host: str, port: int) -> socket.socket | None:
    try:
        sock = socket.create_connection((host, port), timeout=CONNECT_S_MAX)
    except OSError:
        return None  # refused, or the backlog is full: there is no more to be had
    sock.setblocking(False)
    return sock


def _greet(sock: socket.socket, socket_type: bytes) -> bool:
    """The whole handshake. What is sent before the other side has ended its own would only be refused."""
    _write(sock, GREETING + ready(socket_type))
    heard = b""
    while b"READY" not in heard:
        data = b""
        if select.select([sock], [], [], CONNECT_S_MAX)[0]:
            with contextlib.suppress(OSError):
                data = sock.recv(4096)
        if not data:
            return False
        heard += data
    return True


def _write(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # closed by the broker, as it should be
        sock.send(data)


# -- bytes ---------------------------------------------------------------------------------------------------------


def samples(kind: str) -> dict[str, list[bytes]]:
    """Good messages of a kind (request, response), by their names."""
    return {
        name: [bytes.fromhex(frame) for frame in frames]
        for name, frames in json.loads(GOLDEN.read_text()).items()
        if name.endswith(kind) and not name.startswith(SPARED)
    }


def mutants(rng: random.Random, kind: str) -> Iterator[list[bytes]]:
    """Requests as they should be, but for a few bytes; and frames that never were any."""
    good = list(samples(kind).values())
    while True:
        if rng.random() < 0.2:
            yield [rng.randbytes(rng.randrange(200)) for _ in range(rng.randint(1, 5))]
            continue
        frames = [bytearray(frame) for frame in rng.choice(good)]
        for _ in range(rng.randint(0, 4)):
            frame = rng.choice(frames)
            if frame:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
        if rng.random() < 0.1:
            rng.shuffle(frames)
        if rng.random() < 0.1:
            del frames[rng.randrange(len(frames)) :]
        yield [bytes(frame) for frame in frames] or [b""]


def raw_inputs(rng: random.Random) -> Iterator[tuple[bool, bytes]]:
    """Whole conversations over TCP: whether a proper handshake comes first, and what is said then."""
    while True:
        match rng.randrange(5):
            case 0:
                yield False, rng.randbytes(rng.randrange(1, 2_000))
            case 1:
                yield True, rng.randbytes(rng.randrange(1, 2_000))
            case 2:  # longer than anything allowed
                size = rng.choice([17 * MIB, 1 << 40, (1 << 63) - 1])
                yield True, bytes([LONG]) + struct.pack(">Q", size) + rng.randbytes(20_000)
            case 3:  # announced, and never finished
                yield True, bytes([LONG | MORE]) + struct.pack(">Q", 64 << 10) + rng.randbytes(30_000)
            case 4:  # a length beyond all bounds for Raft's own frames
                yield False, b"\xff\xff\xff\x7f" + rng.randbytes(100)


class Fuzzer:
    """Sends inputs at a bounded rate, over one ZeroMQ socket and over many short TCP connections."""

    def __init__(self, host: str, port: int, what: str, rng: random.Random) -> None:
        self._address = (host, port)
        self._raw = raw_inputs(rng)
        self._greeted_as = {"push": b"SUB", "raft": b""}.get(what, b"DEALER")
        self._sock: zmq.Socket[bytes] | None = None
        self._messages: Iterator[list[bytes]] = iter(())
        if what != "raft":
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            self._sock = context.socket(zmq.XSUB if what == "push" else zmq.DEALER)
            self._sock.setsockopt(zmq.LINGER, 0)
            self._sock.connect(f"tcp://{host}:{port}")
            self._messages = subscriptions(rng) if what == "push" else mutants(rng, "request")

    def message(self) -> bool:
        """False if there is no room, or no such way in."""
        if self._sock is None:
            return False
        try:
            self._sock.send_multipart(next(self._messages), zmq.DONTWAIT)
            while self._sock.poll(0):
                self._sock.recv_multipart(zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True

    def conversation(self) -> bool:
        sock = _connect(*self._address)
        if sock is None:
            return False
        with sock:
            greets, said = next(self._raw)
            if greets and self._greeted_as and not _greet(sock, self._greeted_as):
                return False
            _write(sock, said)
            if select.select([sock], [], [], 0.001)[0]:
                with contextlib.suppress(OSError):
                    sock.recv(4096)
        return True


def subscriptions(rng: random.Random) -> Iterator[list[bytes]]:
    """To anything, cancelled as often as not, so that the table of them is under attack and not only its size."""
    made: list[bytes] = []
    while True:
        if made and rng.random() < 0.5:
            yield [b"\0" + made.pop(rng.randrange(len(made)))]
        elif rng.random() < 0.2:
            yield [rng.randbytes(rng.randrange(100))]
        else:
            made.append(rng.randbytes(rng.randrange(40)))
            yield [b"\1" + made[-1]]


def garbage(host: str, port: int, what: str, seconds: float, seed: int, rate: int) -> None:
    fuzzer = Fuzzer(host, port, what, random.Random(seed))
    began = time.monotonic()
    sent = tried = 0
    while (elapsed := time.monotonic() - began) < seconds:
        if tried >= elapsed * rate:
            time.sleep(0.002)
            continue
        tried += 1
        once: Callable[[], bool] = fuzzer.conversation if what == "raft" or tried % 50 == 0 else fuzzer.message
        sent += once()
    tell(inputs=sent)


# -- records -------------------------------------------------------------------------------------------------------


def produce(bootstrap: str, topic: str, mib_per_s: float) -> None:
    from zmqueue import Producer
    from zmqueue.errors import ZmqueueError

    value = random.Random(1).randbytes(RECORD_BYTES)
    per_s = mib_per_s * MIB / RECORD_BYTES
    due, sent = time.monotonic(), 0
    with Producer(bootstrap_servers=bootstrap, max_block_ms=5_000) as producer:
        while not stdin_ends_within(max(0.0, due - time.monotonic())):
            for _ in range(RECORDS_AT_ONCE):
                with contextlib.suppress(ZmqueueError):
                    producer.send(topic, value, partition=sent % PARTITIONS)
                sent += 1
            due = max(due + RECORDS_AT_ONCE / per_s, time.monotonic() - 1.0)  # no more than a second's worth is made up
    tell(mib=round(sent * RECORD_BYTES / MIB, 1))


def consume(bootstrap: str, topic: str, pause_s: float = 0.0) -> None:
    from zmqueue import Consumer, TopicPartition
    from zmqueue.errors import ZmqueueError

    read = 0
    with Consumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(topic, partition) for partition in range(PARTITIONS)])
        while not stdin_ends_within(pause_s):
            with contextlib.suppress(ZmqueueError):
                read += sum(map(len, consumer.poll(timeout_ms=200).values()))
    tell(mib=round(read * RECORD_BYTES / MIB, 1))


def hoard(host: str, port: int, topic_id: bytes, partition: int, requests: int) -> None:
    from zmqueue.wire.frames import Operation, request
    from zmqueue.wire.messages import FetchEntry, FetchRequest

    sock = _connect(host, port)
    if sock is None or not _greet(sock, b"DEALER"):
        sys.exit("no connection")
    wanted = FetchRequest(0, 1, 8 * MIB, 1_000_000, [FetchEntry(topic_id, partition, 0, 8 * MIB)])
    for number in range(requests):
        head, body = request(Operation.FETCH, number, wanted)
        _write(sock, bytes([MORE, len(head)]) + head + bytes([0, len(body)]) + body)
    tell(asked=requests)
    while not stdin_ends_within(60.0):
        continue


def main(arguments: list[str]) -> None:
    match arguments:
        case ["flood", host, port, kind, connections]:
            flood(host, int(port), kind, int(connections))
        case ["garbage", host, port, what, seconds, seed, rate]:
            garbage(host, int(port), what, float(seconds), int(seed), int(rate))
        case ["produce", bootstrap, topic, mib_per_s]:
            produce(bootstrap, topic, float(mib_per_s))
        case ["consume", bootstrap, topic, *pause_s]:
            consume(bootstrap, topic, *map(float, pause_s))
        case ["hoard", host, port, topic_id, partition, requests]:
            hoard(host, int(port), bytes.fromhex(topic_id), int(partition), int(requests))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
