"""What the pytest plugin decides, over a stand-in for clusters. Real ones: tests/integration/test_testing.py."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from zmqueue.testing import cluster

pytest_plugins = ["pytester"]


class StandIn(cluster.Cluster):
    """Runs nothing; what is done with it is noted. A use of one that `breaks` does not end well."""

    noted: list[str] = []
    breaks = False

    def up(self, timeout_s: float = 0) -> None:
        self.noted.append(f"up {self.brokers} {self._storage} {sorted(self._environment.items())}")

    def down(self) -> None:
        self.noted.append("down")

    @contextlib.contextmanager
    def use(self, topic_prefix: str) -> Iterator[cluster.Cluster]:
        self.topic_prefix = topic_prefix
        yield self
        if self.breaks:
            raise cluster.NotHealthy("beyond repair")

    def log_ends(self) -> dict[int, list[str]]:
        return {0: ["panic in the disco"], 1: []}


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done with clusters, which are stand-ins. pytest runs within this process, so it gets them as well."""
    monkeypatch.setattr(cluster, "Cluster", StandIn)
    monkeypatch.setattr(StandIn, "noted", [])
    return StandIn.noted


def test_tests_share_one_cluster_and_have_names_of_their_own(pytester: pytest.Pytester, noted: list[str]) -> None:
    pytester.makepyfile(
        """
        def test_one(zmqueue_cluster, request):
            request.config.first = zmqueue_cluster, zmqueue_cluster.name("group")

        def test_two(zmqueue_cluster, request):
            first, name = request.config.first
            assert zmqueue_cluster is first
            assert zmqueue_cluster.name("group") != name
        """
    )
    pytester.runpytest_inprocess().assert_outcomes(passed=2)
    assert noted == ["up 3 disk []", "down"]


def test_a_cluster_beyond_repair_is_an_error_and_is_replaced(pytester: pytest.Pytester, noted: list[str]) -> None:
    pytester.makepyfile(
        """
        def test_breaks(zmqueue_cluster, request):
            request.config.first = zmqueue_cluster
            zmqueue_cluster.breaks = True

        def test_next(zmqueue_cluster, request):
            assert zmqueue_cluster is not request.config.first
        """
    )
    done = pytester.runpytest_inprocess()
    done.assert_outcomes(passed=2, errors=1)
    done.stdout.fnmatch_lines(["*NotHealthy: beyond repair*"])
    assert noted == ["up 3 disk []", "down"] * 2


def test_nothing_is_started_for_tests_that_ask_for_none(pytester: pytest.Pytester, noted: list[str]) -> None:
    pytester.makepyfile("def test_alone(): pass")
    pytester.runpytest_inprocess().assert_outcomes(passed=1)
    assert noted == []


def test_options_win_over_the_ini_file(pytester: pytest.Pytester, noted: list[str]) -> None:
    pytester.makeini("[pytest]\nzmqueue_brokers = 5\nzmqueue_storage = memory\nzmqueue_config =\n  log.fsync = os\n")
    pytester.makepyfile("def test_one(zmqueue_cluster): pass")
    pytester.runpytest_inprocess("--zmqueue-brokers=1").assert_outcomes(passed=1)
    pytester.runpytest_inprocess("--zmqueue-storage=disk").assert_outcomes(passed=1)
    fsync = "[('ZMQUEUE_LOG__FSYNC', 'os')]"
    assert noted == [f"up 1 memory {fsync}", "down", f"up 5 disk {fsync}", "down"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("zmqueue_brokers = 10", "zmqueue_brokers: '10' is not a number in 1..9"),
        ("zmqueue_storage = tape", "zmqueue_storage: 'tape' is neither disk nor memory"),
        ("zmqueue_config = log.fsync", "zmqueue_config: 'log.fsync' is not SECTION.NAME = VALUE"),
        ("zmqueue_config = log.fsink=os", "ZMQUEUE_LOG__FSINK: unknown setting"),
    ],
)
def test_a_wrong_setting_is_named(pytester: pytest.Pytester, noted: list[str], line: str, problem: str) -> None:
    pytester.makeini(f"[pytest]\n{line}\n")
    pytester.makepyfile("def test_one(zmqueue_cluster): pass")
    done = pytester.runpytest_inprocess()
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines([f"*{problem}*".replace("[", "[[]")])
    assert noted == []


def test_a_failed_test_shows_the_ends_of_the_logs_of_the_clusters_it_used(
    pytester: pytest.Pytester, noted: list[str]
) -> None:
    pytester.makepyfile(
        """
        def test_uses(zmqueue_cluster): assert False
        def test_makes(zmqueue_cluster_factory):
            zmqueue_cluster_factory(brokers=1)
            assert False
        def test_uses_none(): assert False
        """
    )
    done = pytester.runpytest_inprocess()
    done.assert_outcomes(failed=3)
    shown = done.stdout.str()
    assert shown.count("panic in the disco") == shown.count("log of broker 0") == 2
    assert "log of broker 1" not in shown
    assert "panic" not in shown.partition("test_uses_none")[2]


def test_clusters_of_the_factory_end_with_the_test(pytester: pytest.Pytester, noted: list[str]) -> None:
    pytester.makepyfile(
        """
        def test_makes(zmqueue_cluster_factory):
            one = zmqueue_cluster_factory(brokers=2, storage="memory", config={"log.fsync": "os"})
            other = zmqueue_cluster_factory(brokers=1)
            assert one.bootstrap_servers.split(",")[0] != other.bootstrap_servers
            assert one.data_dir != other.data_dir
            one.noted.append("used")

        def test_next(zmqueue_cluster):
            zmqueue_cluster.noted.append("the next")
        """
    )
    pytester.runpytest_inprocess().assert_outcomes(passed=2)
    fsync = "[('ZMQUEUE_LOG__FSYNC', 'os')]"
    assert noted[:5] == [f"up 2 memory {fsync}", "up 1 disk []", "used", "down", "down"]
    assert noted[-2:] == ["the next", "down"]


def test_it_may_also_be_asked_for_by_name(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["zmqueue.testing"]')
    pytester.runpytest_inprocess("--fixtures").stdout.fnmatch_lines(["zmqueue_cluster -- *"])


@pytest.mark.parametrize("module", ["zmqueue", "zmqueue.testing", "zmqueue.testing.cluster"])
def test_pytest_is_imported_by_the_plugin_alone(module: str) -> None:
    probe = f"import sys, {module}; print('pytest' in sys.modules, 'zmq' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
