"""Scenario files, reports and the proxy: the parts of chaos that need no broker."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from chaos import report, run, scenario
from chaos.checker import Gap, Verdict
from chaos.faults import Faults
from chaos.history import INVOKE, OK, Event
from chaos.proxy import Proxy, Route
from chaos.report import Injected, Timeline
from chaos.scenario import Scenario, ScenarioError, Step, Targets


@pytest.mark.parametrize("name", scenario.names())
def test_every_scenario_loads_and_names_faults_that_exist(name: str) -> None:
    spec = scenario.load(name)
    assert spec.about
    for step in spec.steps:
        assert callable(getattr(Faults, step.fault))
        assert step.hold_s[0] <= step.hold_s[1]
        assert step.rest_s[0] <= step.rest_s[1]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("about = 'x'\nrow = 1\nsteps = []", "steps"),
        ("about = 'x'\nrow = 1\nstep = []", "step"),
        ("about = 'x'\nrow = 1\nsteps = [{ fault = 'kill_all', hold = 1 }]", "hold"),
        ("about =", "Invalid"),
    ],
)
def test_a_file_that_is_no_scenario_says_why(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ScenarioError, match=why):
        scenario.load(str(path))


def test_an_unknown_scenario_names_those_there_are() -> None:
    with pytest.raises(ScenarioError, match="swarm"):
        scenario.load("nonsense")


def test_a_fault_that_does_not_exist_is_found_before_anything_starts(tmp_path: Path) -> None:
    spec = Scenario("x", 1, [Step("kill_the_operator")])
    with pytest.raises(ScenarioError, match="kill_the_operator"):
        run.Run("x", spec, 1, 1.0, tmp_path, print)


def test_usage_errors_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(["nonsense", "--folder", str(tmp_path)])
    assert ended.value.code == 2
    assert list(tmp_path.iterdir()) == []
    assert "no scenario" in capsys.readouterr().err


def some_report(**anomalies: int) -> report.Report:
    spec = Scenario("x", 1, [Step("kill_all")], targets=Targets(gap_p50_s=1.0, gap_max_s=2.0))
    verdict = Verdict(acked=7, gaps=[Gap("kill 1", 1.0, "t-0", 0.5, True), Gap("kill 2", 2.0, "t-0", 2.5, True)])
    line = Timeline([5, 0, 5, 5], [Injected("kill <1>", 1.0, 1.9)])
    return report.make(spec, "x", 3, 4.0, verdict, anomalies, {"BUSY": 2}, line)


def test_a_report_compares_gaps_with_their_targets() -> None:
    made = some_report()
    assert made.ok
    assert not made.on_time
    assert [(target.name, target.met) for target in made.targets] == [("gap_p50_s", False), ("gap_max_s", False)]
    assert "MISSED" in report.as_text(made)


def test_anomalies_that_no_history_shows_count_as_well() -> None:
    made = some_report(CRASH=2, CLIENT=0)
    assert not made.ok
    assert made.anomalies == {"CRASH": 2}
    assert json.loads(json.dumps(report.as_json(made)))["anomalies"] == {"CRASH": 2}


def test_gaps_of_brokers_that_led_raft_count_apart() -> None:
    spec = Scenario("x", 1, [Step("kill_all")], targets=Targets(gap_p99_s=1.0, gap_controller_p99_s=3.0))
    gaps = [Gap("kill leader 1", 1.0, "t-0", 0.5, True), Gap("kill leader 2 (controller)", 2.0, "t-0", 2.5, True)]
    assert report.make(spec, "x", 3, 4.0, Verdict(gaps=gaps), {}, {}, Timeline()).on_time


def test_runs_of_one_scenario_share_a_line_of_the_table() -> None:
    runs = [report.as_json(some_report()), report.as_json(some_report(CRASH=1))]
    *_, line = report.as_markdown(runs).splitlines()
    assert "| 2 (3, 3) |" in line
    assert "| CRASH 1 |" in line
    assert "0.50 / 2.50" not in line
    assert "2.50 / 2.50 / 2.50 (4)" in line


def test_the_strip_shows_throughput_and_faults_in_the_same_columns() -> None:
    bars, faults = report.strip(some_report().timeline).splitlines()
    assert bars.startswith("  acks/s  █ ██")
    assert faults == "  faults   x  "


def test_the_picture_is_well_formed() -> None:
    ElementTree.fromstring(report.as_svg(some_report()))


def test_a_timeline_counts_acknowledgements_by_the_second() -> None:
    events = [Event(0.1, 1, INVOKE, "send"), Event(0.2, 1, OK, "send"), Event(2.5, 1, OK, "send")]
    assert report.timeline(events, []).seconds == [1, 0, 1]


# -- proxy ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def link() -> Iterator[tuple[Proxy, socket.socket, socket.socket]]:
    """A connection from broker 0 to broker 1 through the proxy, and both of its ends."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as probe:
        port, free = server.getsockname()[1], probe.getsockname()[1]
        probe.close()
        proxy = Proxy("127.0.0.1", [Route(0, 1, free, port)])
        proxy.start()
        try:
            with socket.create_connection(("127.0.0.1", free), timeout=5) as near:
                far, _ = server.accept()
                with far:
                    far.settimeout(5)
                    yield proxy, near, far
        finally:
            proxy.close()


def hears(sock: socket.socket, timeout_s: float = 0.2) -> bytes:
    sock.settimeout(timeout_s)
    try:
        return sock.recv(100)
    except TimeoutError:
        return b""


def test_a_link_carries_both_ways(link: tuple[Proxy, socket.socket, socket.socket]) -> None:
    _, near, far = link
    near.sendall(b"there")
    assert hears(far, 5) == b"there"
    far.sendall(b"back")
    assert hears(near, 5) == b"back"


def test_a_cut_holds_one_direction_until_it_is_healed(link: tuple[Proxy, socket.socket, socket.socket]) -> None:
    proxy, near, far = link
    proxy.cut([(0, 1)])
    near.sendall(b"held")
    far.sendall(b"back")
    assert hears(near, 5) == b"back"
    assert hears(far) == b""
    proxy.heal()
    assert hears(far, 5) == b"held"
