"""The bare pipe of fetching: what ZeroMQ, files and CBOR allow a consumer, with nothing of zmqueue in between.

Five processes, each with a file per partition that it leads, filled with whole batches beforehand. A reader in this
process asks each of them, one request at a time as a consumer does, for the next range of every partition there; the
answer is a frame per partition, read with `pread`. The reader steps from batch to batch and decodes their columns,
which no consumer of these batches can avoid. No checksum is looked at, no shape proved, no position kept.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

import cbor2
import zmq
from bench_pipe import BROKERS, HOST, STALLED_S, Batches, Child, Figures, Shape, _drained, say

RANGE_BYTES = 1024 * 1024  # of one partition in one answer, as a consumer asks by default
_PLACE = struct.Struct(">IQ")
_LENGTH = struct.Struct("<I")


def serve(arguments: dict[str, Any]) -> None:
    shape, folder = Shape(**arguments["shape"]), Path(arguments["folder"])
    files = {}
    for partition in range(arguments["number"], shape.partitions, BROKERS):
        batches = Batches(shape, encode_each=False)
        fd = os.open(folder / f"fetch-{partition}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # A batch is its body here, after its length.
        _, body = batches.next()
        framed = _LENGTH.pack(len(body)) + bytes(body)
        for _ in range(arguments["batches"]):
            os.write(fd, framed)
        files[partition] = fd, RANGE_BYTES // len(framed) * len(framed) or len(framed)
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    say({"port": socket.bind_to_random_port(f"tcp://{HOST}")})
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while all(source is socket for source, _ in poller.poll()):
        for who, *places in _drained(socket):
            answer = []
            for place in places:
                partition, at = _PLACE.unpack(place.buffer)
                fd, size = files[partition]
                answer.append(os.pread(fd, size, at))
            socket.send_multipart([who, *answer], copy=False)
    context.destroy(linger=0)


def run(shape: Shape, records: int, folder: Path) -> Figures:
    """Every record of every partition once, as columns."""
    per_batch = Batches(shape, encode_each=False).records
    batches = -(-records // (per_batch * shape.partitions))
    children = [
        Child("fetch", __file__, number=n, folder=str(folder), shape=shape.__dict__, batches=batches)
        for n in range(min(BROKERS, shape.partitions))
    ]
    context = zmq.Context()
    try:
        poller = zmq.Poller()
        places: dict[Any, dict[int, int]] = {}
        for number, child in enumerate(children):
            socket = context.socket(zmq.DEALER)
            socket.connect(f"tcp://{HOST}:{child.hear()['port']}")
            poller.register(socket, zmq.POLLIN)
            places[socket] = dict.fromkeys(range(number, shape.partitions, BROKERS), 0)
        begun, seen = time.monotonic(), 0
        for socket, positions in places.items():
            _ask(socket, positions)
        while places:
            ready = poller.poll(STALLED_S * 1000)
            if not ready:
                raise RuntimeError(f"the bare pipe stood still for {STALLED_S} s")
            for socket, _ in ready:
                positions = places[socket]
                answer = socket.recv_multipart(copy=False)
                for partition, frame in zip(list(positions), answer, strict=True):
                    positions[partition] += len(frame)
                    if not len(frame):
                        del positions[partition]
                # The next ranges are on their way while these are decoded.
                if positions:
                    _ask(socket, positions)
                else:
                    del places[socket]
                for frame in answer:
                    seen += _decode(frame.bytes)
        return Figures(seen, shape.value_bytes, time.monotonic() - begun)
    finally:
        context.destroy(linger=0)
        for child in children:
            child.end()


def _ask(socket: Any, positions: dict[int, int]) -> None:
    socket.send_multipart([_PLACE.pack(partition, at) for partition, at in positions.items()])


def _decode(data: bytes) -> int:
    """How many values there are, each made."""
    at, count = 0, 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        columns = cbor2.loads(data[at : at + length])
        count += len(columns[2])
        at += length
    return count


if __name__ == "__main__":
    serve(json.loads(sys.argv[2]))
