"""`zmqueue group` and `zmqueue consume -g` as an operator uses them, against real brokers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.integration


def committed(cluster: Any, group: str) -> int:
    return sum(row["committed"] or 0 for row in cluster.json("group", "describe", group)["partitions"])


def test_a_group_is_read_described_moved_and_removed(zmqueue_cluster: Any) -> None:
    cluster = zmqueue_cluster
    topic, group = cluster.topic("orders", partitions=2), cluster.name("billing")
    cluster.command("produce", topic, stdin="".join(f"{n}\n" for n in range(20)))

    first = cluster.command("consume", topic, "-g", group, "-o", "start", "-n", "7").stdout.split()
    assert len(first) == 7
    described = cluster.json("group", "describe", group)
    assert (described["state"], described["members"], committed(cluster, group)) == ("empty", [], 7)
    assert described["lag"] == 13
    assert any(row["lag_seconds"] > 0 for row in described["partitions"] if row["lag"])
    rest = cluster.command("consume", topic, "-g", group, "-e").stdout.split()
    assert sorted(map(int, first + rest)) == list(range(20))
    assert [row["group"] for row in cluster.json("group", "ls")["groups"] if row["group"] == group] == [group]

    planned = cluster.json("group", "seek", group, "--to", "start", "--dry-run")["partitions"]
    assert committed(cluster, group) == 20, "a dry run changes nothing"
    assert cluster.json("group", "seek", group, "--to", "start")["partitions"] == planned
    assert committed(cluster, group) == 0
    assert len(cluster.command("consume", topic, "-g", group, "-e").stdout.split()) == 20

    cluster.command("group", "rm", group)
    gone = cluster.command("group", "describe", group, check=False)
    assert (gone.returncode, gone.stdout) == (3, "")
    assert gone.stderr.startswith(f"zmqueue: no group {group!r}")


def test_a_member_that_is_interrupted_has_committed_what_it_printed(zmqueue_cluster: Any) -> None:
    cluster = zmqueue_cluster
    topic, group = cluster.topic("orders"), cluster.name("watching")
    cluster.command("produce", topic, stdin="".join(f"{n}\n" for n in range(5)))
    with subprocess.Popen(
        [sys.executable, "-m", "zmqueue", "consume", topic, "-g", group, "-o", "start", "-f", "json"],
        env={**os.environ, "ZMQUEUE_BOOTSTRAP": cluster.bootstrap_servers},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as member:
        try:
            assert member.stdout is not None
            printed = [json.loads(member.stdout.readline())["offset"] for _ in range(5)]
            assert printed == list(range(5))
            refused = cluster.command("group", "seek", group, "--to", "start", check=False)
            assert refused.returncode == 1
            assert refused.stderr == (
                f"zmqueue: group {group!r} has 1 member (zmqueue-consume), who would go on where they are: "
                "stop them, seek, and start them again\n"
            )
            assert cluster.command("group", "rm", group, check=False).returncode == 1
            member.send_signal(signal.SIGINT)
            _, errors = member.communicate(timeout=60)
        finally:
            member.kill()
    assert (member.returncode, errors) == (130, "zmqueue: interrupted\n")
    assert committed(cluster, group) == 5
    assert cluster.json("group", "describe", group)["members"] == [], "it has left, and is not waited for"
