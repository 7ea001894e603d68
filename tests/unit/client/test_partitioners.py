from __future__ import annotations

import pytest

from zmqueue.client.partitioners import DefaultPartitioner, RoundRobinPartitioner
from zmqueue.wire.murmur2 import murmur2, partition_for_key


@pytest.mark.parametrize(
    ("data", "signed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_is_kafkas(data: bytes, signed: int) -> None:
    assert murmur2(data) == signed & 0xFFFFFFFF


def test_a_key_always_has_the_same_partition_and_it_is_never_negative() -> None:
    for number in range(200):
        key = b"key-%d" % number
        assert 0 <= partition_for_key(key, 7) < 7
        assert partition_for_key(key, 7) == DefaultPartitioner()(key, range(7), [])


def test_a_record_without_key_avoids_partitions_without_leader() -> None:
    assert {DefaultPartitioner()(None, range(4), [2]) for _ in range(20)} == {2}


def test_round_robin_visits_every_partition() -> None:
    partitioner = RoundRobinPartitioner()
    assert {partitioner(b"same", range(3), range(3)) for _ in range(3)} == {0, 1, 2}
