"""Ports for clusters that stand side by side on one machine.

A port that is free now may be taken when a broker that was killed comes back to it. So a whole offset is locked for as
long as its cluster lives, against everybody else who asks here; the lock goes with the process that holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from zmqueue.errors import ZmqueueError

HOST = "127.0.0.1"
# The first port of each kind, at offset 0.
BASE_PORTS = (9092, 9192, 9292, 9392, 9492)
# Below the range from which the kernel takes ports for outgoing connections.
OFFSETS = range(1_000, 22_000, 10)


class NoFreePorts(ZmqueueError):
    """Every offset is taken by other clusters."""


@contextlib.contextmanager
def reserved_offset(brokers: int) -> Iterator[int]:
    """A port offset whose ports are free, held against other runs on this machine."""
    folder = Path(tempfile.gettempdir()) / f"zmqueue-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for offset in random.SystemRandom().sample(OFFSETS, len(OFFSETS)):
        with (folder / str(offset)).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if all(_is_free(base + offset + i) for base in BASE_PORTS for i in range(brokers)):
                yield offset
                return
    raise NoFreePorts("no free ports for a cluster")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT are no listeners
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
