"""What only an operator may decide: a broker that has forgotten votes again, a partition lives on with what is left."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from zmqueue import Admin, Producer
from zmqueue.testing import Cluster, running_cluster

VICTIM = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("operator") / "data", brokers=5) as cluster:
        yield cluster


def replace_disk(cluster: Cluster, admin: Admin, broker: int) -> None:
    """Kill the broker, empty its folder, start it, and wait until the cluster knows this life of it."""
    former = admin.describe_cluster().brokers[broker].epoch
    cluster.kill(broker)
    folder: Path = cluster.data_dir / f"broker-{broker}"
    for path in folder.iterdir():
        if path.name != "stopped":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    cluster.start(broker)
    deadline = time.monotonic() + 30
    while (known := admin.describe_cluster().brokers[broker]).fenced or known.epoch == former:
        assert time.monotonic() < deadline, known
        time.sleep(0.1)


def is_voting(admin: Admin, broker: int) -> bool:
    return admin.broker_status(broker).voting


def test_a_partition_that_lost_its_only_copy_waits_until_the_loss_is_accepted(cluster: Cluster) -> None:
    cluster.command("topic", "create", "lone", "-p", "5", "-r", "1")
    with (
        Admin(bootstrap_servers=cluster.bootstrap_servers) as admin,
        Producer(bootstrap_servers=cluster.bootstrap_servers, acks="all") as producer,
    ):
        for partition in range(5):
            producer.send("lone", b"value", partition=partition).get(30)
        (lost,) = [p.partition for p in admin.describe_topic("lone").partitions if p.leader == VICTIM]
        replace_disk(cluster, admin, VICTIM)
        waiting = admin.describe_topic("lone").partitions[lost]
        assert (waiting.leader, waiting.isr) == (-1, [])

        asked = cluster.command("topic", "recover", "lone", check=False)
        assert asked.returncode == 5
        assert "--accept-data-loss" in asked.stderr
        assert admin.describe_topic("lone").partitions[lost].leader == -1, "asking changes nothing"

        cluster.command("topic", "recover", "lone", "--accept-data-loss")
        assert producer.send("lone", b"new", partition=lost).get(30).offset == 0
        assert "has a leader" in cluster.command("topic", "recover", "lone").stdout


def test_a_broker_without_its_raft_folder_votes_again_only_when_admitted(cluster: Cluster) -> None:
    with Admin(bootstrap_servers=cluster.bootstrap_servers) as admin:
        if is_voting(admin, VICTIM):
            replace_disk(cluster, admin, VICTIM)
        cluster.wait_healthy()
        assert not is_voting(admin, VICTIM)
        cluster.kill(0)
        refused = cluster.command("broker", "admit", str(VICTIM), check=False)
        assert refused.returncode == 1
        assert "broker 0" in refused.stderr
        cluster.start(0)
        cluster.wait_healthy()
        cluster.command("broker", "admit", str(VICTIM))
        cluster.wait_healthy()
        assert is_voting(admin, VICTIM)
        assert "votes already" in cluster.command("broker", "admit", str(VICTIM), check=False).stderr
