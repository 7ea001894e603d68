"""The pytest plugin as its users run it: what a test breaks is whole for the next, and nothing outlives pytest."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zmqueue.processes import Process, is_running, process

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.integration

WAIT_S = 60.0

# Tells who its processes are, breaks a broker in each way, and stays until it is ended.
STAYS = """
import os, time
from pathlib import Path

def test_stays(zmqueue_cluster):
    pids = [broker["pid"] for broker in zmqueue_cluster.json("status")["brokers"]]
    pids.append(zmqueue_cluster.json("status")["supervisor_pid"])
    zmqueue_cluster.pause(0)
    Path("pids.new").write_text(" ".join(map(str, pids)))
    Path("pids.new").rename("pids")
    time.sleep(600)
"""


def test_what_one_test_breaks_is_whole_for_the_next(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nzmqueue_config =\n    log.fsync = os\n")
    pytester.makepyfile(
        """
        def is_whole(cluster):
            return cluster.json("health")["healthy"] and not cluster.admin().list_topics()

        def pids(cluster):
            return {broker["pid"] for broker in cluster.json("status")["brokers"]}

        def test_breaks(zmqueue_cluster, request):
            orders = zmqueue_cluster.topic("orders", partitions=3, config={"retention.ms": 60000})
            producer = zmqueue_cluster.producer(linger_ms=0)
            producer.send(orders, b"one", partition=1).get(30)
            consumer = zmqueue_cluster.consumer(orders)
            assert next(consumer).value == b"one"
            request.config.before = pids(zmqueue_cluster)
            zmqueue_cluster.kill(zmqueue_cluster.leader(orders, 1))
            producer.send(orders, b"two", partition=1).get(30)
            assert next(consumer).value == b"two"
            zmqueue_cluster.pause(zmqueue_cluster.leader(orders, 1))
            producer.send(orders, b"never awaited", partition=1)

        def test_finds_it_whole(zmqueue_cluster, request):
            assert is_whole(zmqueue_cluster)
            assert len(pids(zmqueue_cluster) & request.config.before) == 2, "it is the same cluster"
            zmqueue_cluster.stop(0, 1, 2)

        def test_finds_it_whole_again(zmqueue_cluster):
            assert is_whole(zmqueue_cluster)
            zmqueue_cluster.command("down")

        def test_finds_it_up(zmqueue_cluster):
            assert is_whole(zmqueue_cluster)
        """
    )
    pytester.runpytest_subprocess("--zmqueue-brokers", "3").assert_outcomes(passed=4)


def test_workers_of_xdist_have_a_cluster_each(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.parametrize("n", range(2))
        def test_notes_it(zmqueue_cluster, tmp_path_factory, worker_id, n):
            path = tmp_path_factory.getbasetemp().parent / f"servers-{worker_id}"
            path.write_text(zmqueue_cluster.bootstrap_servers)
        """
    )
    done = pytester.runpytest_subprocess(
        "-n2", "--dist=each", "--zmqueue-brokers=1", "--zmqueue-storage=memory", f"--basetemp={pytester.path / 'base'}"
    )
    done.assert_outcomes(passed=4)
    assert len({path.read_text() for path in (pytester.path / "base").glob("servers-*")}) == 2


def test_a_cluster_of_ones_own_ends_with_its_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from pathlib import Path

        def test_one(zmqueue_cluster_factory):
            cluster = zmqueue_cluster_factory(brokers=1, storage="memory", config={"topics.default_partitions": 7})
            cluster.command("topic", "create", "t")
            assert len(cluster.admin().describe_topic("t").partitions) == 7
            pids = [broker["pid"] for broker in cluster.json("status")["brokers"]]
            Path("pids").write_text(" ".join(map(str, pids)))

        def test_the_next():
            for pid in Path("pids").read_text().split():
                assert not Path(f"/proc/{pid}").exists()
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=2)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_an_ended_pytest(pytester: pytest.Pytester, how: signal.Signals) -> None:
    pytester.makepyfile(STAYS)
    command = [sys.executable, "-m", "pytest", "--zmqueue-brokers=2", f"--basetemp={pytester.path / 'base'}"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        started = [known for pid in noted(pytester.path / "pids", running) if (known := process(pid))]
        assert len(started) == 3
        running.send_signal(how)
        said = running.communicate(timeout=WAIT_S)[0].decode()
    finally:
        running.kill()
        running.wait()
    if how == signal.SIGINT:
        assert running.returncode == pytest.ExitCode.INTERRUPTED, said
        assert left(started, 0) == []
    assert left(started, WAIT_S) == []


def noted(path: Path, by: subprocess.Popen[bytes]) -> list[int]:
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        assert by.poll() is None, by.communicate()[0].decode()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [int(pid) for pid in path.read_text().split()]


def left(known: list[Process], timeout_s: float) -> list[Process]:
    """Those that still run after so long at the most."""
    deadline = time.monotonic() + timeout_s
    while (running := [each for each in known if is_running(each)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return running
