"""What clients saw, one JSON line per event, in the order in which it happened on one clock.

An operation begins with `invoke` and ends in one of three ways: `ok`, `fail` (certain to have had no effect) or `info`
(it may have happened or not: time-outs, lost connections, a client that gave up). The checker believes `ok` and `fail`,
so whoever records must not guess: in doubt it is `info`.

    t   seconds since the history began, of a monotonic clock
    p   the process: one producer, one consumer, or a broker (replica)
    e   invoke | ok | fail | info
    f   what was done:
        send     k, v; ok also o (offset), r (replicas that held it); a = 1 where acks was 1
        assign   the process reads keys `ks`, each from `os` (-1: from somewhere)
        poll     ok: rows [[k, [o, v, o, v, ...]], ...]
        hw       ok: rows [[k, [end]], ...], the high watermarks that were seen
        final    k, o: after healing the process has read all of k, from its start up to o
        replica  k, o (log start), end, rows [[k, [base offset, checksum, ...]]]: a replica's batches after the end
        topic    k, x: create or delete of topic k, whose name is used once
        topics   ks: the topics that are there at the end
        fault    x: a fault (invoke: begins, ok: is over), ks: the keys that it hit
        whole    every replica is in sync again
        era      records that were acknowledged before may be gone from here on (a power cut without fsync)

Of a group's members there are files of their own, and `p` is the member (chaos/members.py merges them):

        join      invoke: from here on it asks to be a member
        assigned, revoked, lost: the partitions `ks`, told in generation v to the membership x; `poll` has v and x too
        commit    o: which commit of the member; invoke: rows [[k, [offset]], ...] under the membership x; fail: x says
                  why; ok: rows, if not all were accepted
        leave     invoke: it asks to go; ok: it is gone
        killed
        suspended invoke; ok: it wakes
        removed   the coordinator gave the membership x up
        end       everybody leaves now

A line is a few hundred bytes at most, except polls. The file is written through one lock, so its order is the order of
events; a writer that is killed leaves at most one torn line, which readers leave out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

INVOKE, OK, FAIL, INFO = "invoke", "ok", "fail", "info"


class Event(msgspec.Struct, omit_defaults=True, gc=False):
    t: float
    p: int
    e: str
    f: str
    k: str = ""
    v: int = -1
    o: int = -1
    r: int = 0
    a: int = -1
    end: int = -1
    x: str = ""
    rows: list[tuple[str, list[int]]] | None = None
    ks: list[str] | None = None
    os: list[int] | None = None


_encode = msgspec.json.Encoder().encode


class Recorder:
    """Appends events to a file, from any thread, and keeps counts for those who watch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.acked = 0
        self._file = path.open("wb", buffering=1 << 16)
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._closed = False

    def now(self) -> float:
        return time.monotonic() - self._began

    def add(self, p: int, e: str, f: str, **more: Any) -> float:
        """The time that the event got. What comes after `close` is not part of the history any more."""
        with self._lock:
            at = round(time.monotonic() - self._began, 6)
            if not self._closed:
                self._file.write(_encode(Event(at, p, e, f, **more)) + b"\n")
                if f == "send" and e == OK:
                    self.acked += 1
            return at

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(lines: Iterable[bytes]) -> Iterator[Event]:
    """The events of a history. Only its last line may be torn; anything else that does not decode is an error."""
    decode = msgspec.json.Decoder(Event).decode
    for line in lines:
        if line[-1:] != b"\n":
            return
        yield decode(line)


def read_file(path: Path) -> Iterator[Event]:
    with path.open("rb") as file:
        yield from read(file)
