"""A full disk: refused with its own error, nothing acknowledged is lost, reads go on, and room makes it well again."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.workload import read_all
from zmqueue import Producer
from zmqueue.errors import DeliveryTimeout
from zmqueue.testing import Cluster, running_cluster

SIZE_MIB = 24
FILLER_MIB = 12
PADDING = b"x" * 20_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not allow mounting a small tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def cluster(small_disk: Path) -> Iterator[Cluster]:
    with running_cluster(small_disk / "data", config={"raft.disk_reserve_bytes": 65536}) as cluster:
        yield cluster


def test_a_full_disk_refuses_writes_keeps_records_and_recovers(cluster: Cluster, small_disk: Path) -> None:
    cluster.command("topic", "create", "t", "-p", "2")
    filler = small_disk / "filler"
    filler.write_bytes(bytes(FILLER_MIB << 20))
    acked: set[int] = set()
    with Producer(bootstrap_servers=cluster.bootstrap_servers, delivery_timeout_ms=3_000, linger_ms=0) as producer:
        for number in range((SIZE_MIB << 20) // len(PADDING)):
            future = producer.send("t", b"%d%s" % (number, PADDING), partition=number % 2)
            try:
                future.get(timeout=20)
            except DeliveryTimeout:
                break
            acked.add(number)
        else:
            raise AssertionError("the disk never filled up")
    assert acked
    assert acked <= kept(cluster)
    filler.unlink()
    with Producer(bootstrap_servers=cluster.bootstrap_servers, delivery_timeout_ms=30_000) as producer:
        for number in (1_000_000, 1_000_001):
            producer.send("t", b"%d%s" % (number, PADDING), partition=number % 2).get(timeout=40)
            acked.add(number)
    assert acked <= kept(cluster)


def kept(cluster: Cluster) -> set[int]:
    found = read_all(cluster.bootstrap_servers, "t", 2, number=lambda value: int(value.rstrip(b"x")))
    return {number for records in found.values() for _, number in records}
