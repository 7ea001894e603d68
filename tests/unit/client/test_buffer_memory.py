"""What the buffer counts is what it takes: nothing that an application sends makes a producer outgrow buffer_memory."""

from __future__ import annotations

import itertools
import os
import tracemalloc
from typing import Any

import pytest

from zmqueue.client.buffer import BYTES_OVERHEAD, RECORD_OVERHEAD, Buffer, Lane
from zmqueue.client.columns import as_headers
from zmqueue.client.ordering import PartitionOrder
from zmqueue.model import KiB, MiB

RECORDS = 1_000


def buffer() -> Buffer:
    return Buffer(
        batch_size=64 * KiB,
        linger_s=0,
        memory_max=256 * MiB,
        max_block_s=0,
        delivery_timeout_s=1,
        on_work=lambda: None,
        check=lambda: None,
        on_settled=lambda batch, error: None,
    )


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize(("key_bytes", "headers"), [(0, 0), (8, 0), (0, 1), (40, 5)])
@pytest.mark.parametrize("value_bytes", [0, 10, 100, 1_000])
def test_what_is_counted_covers_what_is_taken(value_bytes: int, key_bytes: int, headers: int, bulk: bool) -> None:
    filled, lane = buffer(), Lane("t", bytes(16), 0, PartitionOrder[Any](5, idempotent=True))
    numbers = itertools.count(1_000_000_000_000)
    tracemalloc.start()
    try:
        begun = tracemalloc.get_traced_memory()[0]
        for _ in range(RECORDS):
            value, key = os.urandom(value_bytes), os.urandom(key_bytes) if key_bytes else None
            pairs, more = as_headers([("name", os.urandom(4)) for _ in range(headers)]) if headers else (None, 0)
            size = RECORD_OVERHEAD + value_bytes + (BYTES_OVERHEAD + key_bytes if key_bytes else 0) + more
            with filled.lock:
                if bulk:
                    columns = [value], [key] if key else None, [pairs] if pairs else None
                    filled.extend(lane, *columns, [next(numbers)], size)
                else:
                    filled.append(lane, value, key, pairs, next(numbers), size)
        taken = tracemalloc.get_traced_memory()[0] - begun
    finally:
        tracemalloc.stop()
    assert taken <= 1.25 * filled.used
