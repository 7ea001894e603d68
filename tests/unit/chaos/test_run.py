"""Scenario files, reports and the proxy: the parts of chaos that need no broker."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from chaos import campaign, report, run, scenario, table
from chaos.checker import Gap, Verdict
from chaos.faults import Window, is_fault
from chaos.history import INVOKE, OK, Event
from chaos.proxy import Proxy, Route
from chaos.report import Injected, Timeline
from chaos.scenario import Scenario, ScenarioError, Step, Targets


@pytest.mark.parametrize("name", scenario.names())
def test_every_scenario_loads_and_names_faults_that_exist(name: str) -> None:
    spec = scenario.load(name)
    assert spec.about
    for step in spec.steps:
        assert is_fault(step.fault)
        assert step.hold_s[0] <= step.hold_s[1]
        assert step.rest_s is None or step.rest_s[0] <= step.rest_s[1]


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


def test_the_latency_of_sends_under_pressure_is_compared_with_calm() -> None:
    events = []
    for v in range(20):
        k, took_s = ("hit", 0.3) if v == 15 else ("t", 0.1 if v < 10 else 0.2)
        events += [Event(v, 1, INVOKE, "send", k=k, v=v), Event(v + took_s, 1, OK, "send", k=k, v=v)]
    calm, pressed = Window(True, 0, 10), Window(False, 10, 15)
    assert report.latency_ratio(events, [calm, pressed]) == {
        "p99_calm_ms": 100.0,
        "p99_pressed_ms": 200.0,
        "p99_ratio": 2.0,
    }
    assert report.latency_ratio(events, [calm, Window(False, 10, 20, frozenset({"hit"}))])["p99_ratio"] == 3.0
    assert report.latency_ratio(events, [calm]) == {}


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    assert report.compare(Targets(gap_p99_s=1.0, clear_s=2.0), {"clear_s": 2.5}) == [
        report.Target("clear_s", 2.0, 2.5, False)
    ]


def test_a_pair_is_made_of_steps_that_allow_it(tmp_path: Path) -> None:
    steps = [Step("kill_all"), Step("kill_leader", pairs=True), Step("pause_leader", pairs=True)]
    made = run.Run("x", Scenario("x", 1, steps, order="random", pair_share=0.5), 1, 1.0, tmp_path, print)
    chosen = [[step.fault for step in made._choose(n)] for n in range(200)]
    assert {len(some) for some in chosen} == {1, 2}
    assert not any("kill_all" in some for some in chosen if len(some) == 2)
    assert ["kill_all"] in chosen


# -- campaigns -------------------------------------------------------------------------------------------------------


def of_kill_leader(seed: int, **anomalies: int) -> dict[str, Any]:
    spec = scenario.load("kill-leader")
    gaps = [
        Gap("kill leader 1", 1.0, "w1-0", 0.5 * seed, True),
        Gap("kill leader 2 (controller)", 2.0, "w1-0", 3, True),
    ]
    line = Timeline([5], [Injected("kill", 1.0, 1.9), Injected("kill", 2.0, 2.5)])
    made = report.make(spec, "kill-leader", seed, 60.0, Verdict(acked=1000, gaps=gaps), anomalies, {}, line)
    return report.as_json(made)


def test_runs_of_one_scenario_share_a_line_of_the_table() -> None:
    *_, line = table.render([of_kill_leader(1), of_kill_leader(4)], {"kill-leader": 4}).splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:9] == [
        *("1", "`kill-leader`", "1, 4", "2.0", "4", "2,000", "0"),
        *("2.00 / 2.00 / 2.00 (2)", "3.00 / 3.00 / 3.00 (2)"),
    ]
    assert cells[9].startswith("4 faults; **gap_p50_s 2 of 1**; gap_p99_s 2 of 2.5")
    assert cells[10] == "**no**"


@pytest.mark.parametrize(
    ("wanted", "anomalies", "met"), [(2, {}, "yes"), (3, {}, "**no**"), (2, {"CRASH": 1}, "**no**")]
)
def test_too_few_faults_and_anomalies_are_not_as_wanted(wanted: int, anomalies: dict[str, int], met: str) -> None:
    *_, line = table.render([of_kill_leader(1, **anomalies)], {"kill-leader": wanted}).splitlines()
    assert line.endswith(f"| {met} |")


def test_a_control_must_show_anomalies() -> None:
    spec = scenario.load("lying-disks")
    for anomalies, met in (({"LOST-WRITE": 3}, "yes"), ({}, "**no**")):
        made = report.as_json(report.make(spec, "lying-disks", 1, 5.0, Verdict(), anomalies, {}, Timeline()))
        assert campaign.as_expected(made) == bool(anomalies)
        assert table.render([made], {}).endswith(f"| {met} |")


def test_lines_of_scenarios_that_were_not_run_again_stay(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{table.BEGIN}\n{table.END}\n")
    table.write(page, table.render([of_kill_leader(1), {**of_kill_leader(2), "scenario": "kill-all", "row": 5}], {}))
    before = page.read_text().splitlines()
    table.write(page, table.render([of_kill_leader(7)], {}))
    after = page.read_text().splitlines()
    assert [line for line in after if line not in before] == [table.render([of_kill_leader(7)], {}).splitlines()[-1]]
    assert len(after) == len(before)
    assert after[-2] == before[-2], "in the order of their rows"


def test_the_table_takes_the_place_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    fresh = table.render([of_kill_leader(1)], {})
    table.write(page, fresh)
    assert page.read_text() == f"before\n{table.BEGIN}\n{fresh}\n{table.END}\nafter\n"
    page.write_text("nothing")
    with pytest.raises(table.TableError):
        table.write(page, "new")


def test_the_plan_covers_every_scenario() -> None:
    assert set(campaign.read_plan()) == set(scenario.names())


def test_a_quick_campaign_runs_everything_once_for_a_short_time() -> None:
    plan = {"kill-leader": campaign.Item(faults=200), "swarm": campaign.Item(seconds=300, runs=2)}
    quick = list(campaign.planned(plan, [], quick=True, first_seed=1))
    assert [one.name for one in quick] == ["kill-leader", "swarm"]
    full = list(campaign.planned(plan, [], quick=False, first_seed=5))
    assert full == [
        campaign.Planned("kill-leader", 5, ["--faults", "200"]),
        campaign.Planned("swarm", 5, ["--seconds", "300"]),
        campaign.Planned("swarm", 6, ["--seconds", "300"]),
    ]
    assert [one.name for one in campaign.planned(plan, ["swarm"], quick=True, first_seed=1)] == ["swarm"]


def test_a_run_that_has_a_report_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kill-leader-1.json").write_text(json.dumps(of_kill_leader(1)))
    monkeypatch.setattr(campaign, "run", lambda *_: pytest.fail("it ran again"))
    assert campaign.main(["--only", "kill-leader", "--results", str(tmp_path)]) == 0
    assert "`kill-leader`" in capsys.readouterr().out


# -- pictures --------------------------------------------------------------------------------------------------------


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
