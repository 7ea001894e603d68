"""What the pytest plugin decides, over a stand-in for clusters. Real ones: tests/integration/test_testing.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

# Clusters that run nothing; what was done with them goes to `log`. A use that is told to break does not end well.
STAND_IN = """
import contextlib
import pytest
from pathlib import Path
from zmqueue.testing import cluster, plugin

LOG = Path(__file__).parent / "log"

def note(text):
    with LOG.open("a") as file:
        file.write(text + "\\n")

class StandIn(cluster.Cluster):
    breaks = False

    def up(self, timeout_s=0):
        note(f"up {self.brokers} {self._storage} {sorted(self._environment.items())}")

    def down(self):
        note("down")

    @contextlib.contextmanager
    def use(self, prefix):
        self.topic_prefix = prefix
        yield self
        if self.breaks:
            raise cluster.NotHealthy("beyond repair")

    def log_ends(self):
        return {0: ["panic in the disco"], 1: []}

cluster.Cluster = StandIn
"""


@pytest.fixture
def with_stand_in(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(STAND_IN)
    return pytester


def noted(pytester: pytest.Pytester) -> list[str]:
    return (pytester.path / "log").read_text().splitlines()


def test_tests_share_one_cluster_and_have_names_of_their_own(with_stand_in: pytest.Pytester) -> None:
    with_stand_in.makepyfile(
        """
        def test_one(zmqueue_cluster, request):
            request.config.first = zmqueue_cluster, zmqueue_cluster.name("group")

        def test_two(zmqueue_cluster, request):
            first, name = request.config.first
            assert zmqueue_cluster is first
            assert zmqueue_cluster.name("group") != name
        """
    )
    with_stand_in.runpytest_subprocess().assert_outcomes(passed=2)
    assert noted(with_stand_in) == ["up 3 disk []", "down"]


def test_a_cluster_beyond_repair_is_an_error_and_is_replaced(with_stand_in: pytest.Pytester) -> None:
    with_stand_in.makepyfile(
        """
        def test_breaks(zmqueue_cluster, request):
            request.config.first = zmqueue_cluster
            zmqueue_cluster.breaks = True

        def test_next(zmqueue_cluster, request):
            assert zmqueue_cluster is not request.config.first
        """
    )
    done = with_stand_in.runpytest_subprocess()
    done.assert_outcomes(passed=2, errors=1)
    done.stdout.fnmatch_lines(["*NotHealthy: beyond repair*"])
    assert noted(with_stand_in) == ["up 3 disk []", "down"] * 2


def test_nothing_is_started_for_tests_that_ask_for_none(with_stand_in: pytest.Pytester) -> None:
    with_stand_in.makepyfile("def test_alone(): pass")
    with_stand_in.runpytest_subprocess().assert_outcomes(passed=1)
    assert not (with_stand_in.path / "log").exists()


def test_options_win_over_the_ini_file(with_stand_in: pytest.Pytester) -> None:
    with_stand_in.makeini(
        "[pytest]\nzmqueue_brokers = 5\nzmqueue_storage = memory\nzmqueue_config =\n  log.fsync = os\n"
    )
    with_stand_in.makepyfile("def test_one(zmqueue_cluster): pass")
    with_stand_in.runpytest_subprocess("--zmqueue-brokers=1").assert_outcomes(passed=1)
    with_stand_in.runpytest_subprocess("--zmqueue-storage=disk").assert_outcomes(passed=1)
    fsync = "[('ZMQUEUE_LOG__FSYNC', 'os')]"
    assert noted(with_stand_in) == [f"up 1 memory {fsync}", "down", f"up 5 disk {fsync}", "down"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("zmqueue_brokers = 10", "zmqueue_brokers: '10' is not a number in 1..9"),
        ("zmqueue_storage = tape", "zmqueue_storage: 'tape' is neither disk nor memory"),
        ("zmqueue_config = log.fsync", "zmqueue_config: 'log.fsync' is not SECTION.NAME = VALUE"),
        ("zmqueue_config = log.fsink=os", "ZMQUEUE_LOG__FSINK: unknown setting"),
    ],
)
def test_a_wrong_setting_is_named(with_stand_in: pytest.Pytester, line: str, problem: str) -> None:
    with_stand_in.makeini(f"[pytest]\n{line}\n")
    with_stand_in.makepyfile("def test_one(zmqueue_cluster): pass")
    done = with_stand_in.runpytest_subprocess()
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines([f"*{problem}*".replace("[", "[[]")])
    assert not (with_stand_in.path / "log").exists()


def test_a_failed_test_shows_the_ends_of_the_logs_of_the_clusters_it_used(with_stand_in: pytest.Pytester) -> None:
    with_stand_in.makepyfile(
        """
        def test_uses(zmqueue_cluster): assert False
        def test_makes(zmqueue_cluster_factory):
            zmqueue_cluster_factory(brokers=1)
            assert False
        def test_uses_none(): assert False
        """
    )
    done = with_stand_in.runpytest_subprocess()
    done.assert_outcomes(failed=3)
    shown = done.stdout.str()
    assert shown.count("panic in the disco") == shown.count("log of broker 0") == 2
    assert "log of broker 1" not in shown
    assert "panic" not in shown.partition("test_uses_none")[2]


def test_clusters_of_the_factory_end_with_the_test(with_stand_in: pytest.Pytester) -> None:
    with_stand_in.makepyfile(
        """
        from pathlib import Path
        def test_makes(zmqueue_cluster_factory):
            one = zmqueue_cluster_factory(brokers=2, storage="memory", config={"log.fsync": "os"})
            other = zmqueue_cluster_factory(brokers=1)
            assert one.bootstrap_servers.split(",")[0] != other.bootstrap_servers
            assert one.data_dir != other.data_dir

        def test_next():
            assert Path("log").read_text().count("down") == 2
        """
    )
    with_stand_in.runpytest_subprocess().assert_outcomes(passed=2)
    assert noted(with_stand_in)[0] == "up 2 memory [('ZMQUEUE_LOG__FSYNC', 'os')]"


def test_it_may_also_be_asked_for_by_name(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["zmqueue.testing"]')
    pytester.runpytest_subprocess("--fixtures").stdout.fnmatch_lines(["zmqueue_cluster -- *"])


@pytest.mark.parametrize("module", ["zmqueue", "zmqueue.testing", "zmqueue.testing.cluster"])
def test_pytest_is_imported_by_the_plugin_alone(module: str) -> None:
    probe = f"import sys, {module}; print('pytest' in sys.modules, 'zmq' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
