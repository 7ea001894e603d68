"""What a run showed: a table for the terminal, the same as JSON, and a picture of faults and throughput over time.

`python -m chaos.report FILE...` makes the table of docs/chaos.md from the JSON of runs.
"""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from chaos.checker import Gap, Verdict, quantile
from chaos.history import INVOKE, OK, Event
from chaos.scenario import Scenario

_BARS = " ▁▂▃▄▅▆▇█"
_STRIP_MAX = 100


class Injected(msgspec.Struct, frozen=True):
    """One fault: from when to when it lasted."""

    text: str
    begin_s: float
    end_s: float


class Timeline(msgspec.Struct):
    seconds: list[int] = []  # records acknowledged in each second
    faults: list[Injected] = []


class Target(msgspec.Struct, frozen=True):
    name: str
    wanted: float
    found: float
    met: bool


class Report(msgspec.Struct):
    scenario: str
    row: int
    seed: int
    seconds: float
    faults: int
    verdict: Verdict
    anomalies: dict[str, int]
    gap_p50_s: float
    gap_p99_s: float
    gap_max_s: float
    targets: list[Target]
    errors: dict[str, int]
    timeline: Timeline

    @property
    def ok(self) -> bool:
        return not self.anomalies

    @property
    def on_time(self) -> bool:
        return all(target.met for target in self.targets)


def timeline(events: Iterable[Event], faults: list[Injected]) -> Timeline:
    seconds: list[int] = []
    for event in events:
        if event.f == "send" and event.e in (OK, INVOKE):
            second = int(event.t)
            seconds.extend([0] * (second + 1 - len(seconds)))
            seconds[second] += event.e == OK
    return Timeline(seconds, faults)


def make(
    scenario: Scenario,
    name: str,
    seed: int,
    seconds: float,
    verdict: Verdict,
    more: dict[str, int],
    errors: dict[str, int],
    line: Timeline,
) -> Report:
    """`more` are anomalies that no history shows: brokers that crashed, a cluster that did not become whole."""
    gaps, of_controllers = gaps_of(verdict.gaps)
    p50, p99, most = quantile(gaps, 0.5), quantile(gaps, 0.99), max(gaps, default=0.0)
    wanted = scenario.targets
    pairs = [
        ("gap_p50_s", wanted.gap_p50_s, p50),
        ("gap_p99_s", wanted.gap_p99_s, p99),
        ("gap_max_s", wanted.gap_max_s, most),
        ("gap_controller_p99_s", wanted.gap_controller_p99_s, quantile(of_controllers, 0.99)),
        ("unknown", wanted.unknown_max, float(verdict.unknown + verdict.failed)),
    ]
    targets = [Target(what, goal, round(found, 3), found <= goal) for what, goal, found in pairs if goal is not None]
    return Report(
        scenario=name,
        row=scenario.row,
        seed=seed,
        seconds=round(seconds, 1),
        faults=len(line.faults),
        verdict=verdict,
        anomalies={**verdict.counts, **{what: count for what, count in more.items() if count}},
        gap_p50_s=round(p50, 3),
        gap_p99_s=round(p99, 3),
        gap_max_s=round(most, 3),
        targets=targets,
        errors=errors,
        timeline=line,
    )


def gaps_of(gaps: Iterable[Gap]) -> tuple[list[float], list[float]]:
    """Those where the victim did not lead Raft, and those where it did: that has a bound of its own."""
    plain: list[float] = []
    of_controllers: list[float] = []
    for gap in gaps:
        (of_controllers if "controller" in gap.fault else plain).append(gap.gap_s)
    return plain, of_controllers


def as_json(report: Report) -> dict[str, Any]:
    return {**msgspec.to_builtins(report), "ok": report.ok, "on_time": report.on_time}


# -- terminal ------------------------------------------------------------------------------------------------------


def as_text(report: Report) -> str:
    verdict = report.verdict
    rows = [
        ("scenario", f"{report.scenario} (row {report.row}), seed {report.seed}, {report.seconds:g} s"),
        ("faults", str(report.faults)),
        ("sent", f"{verdict.sent}: {verdict.failed} failed, {verdict.unknown} unknown"),
        ("acknowledged", f"{verdict.acked}, {verdict.acked_single} of them by one replica"),
        ("polled", f"{verdict.polled} records, largest lag {verdict.lag_s_max:.1f} s"),
        ("latency", ", ".join(f"{name} {value:g} ms" for name, value in verdict.latency_ms.items())),
        (
            "gaps",
            f"{len(verdict.gaps)}: p50 {report.gap_p50_s:g} s, p99 {report.gap_p99_s:g} s, max {report.gap_max_s:g} s"
            f" ({len(gaps_of(verdict.gaps)[1])} of controllers apart)",
        ),
    ]
    if verdict.acked_leader:
        rows.append(("acks=1", f"{verdict.acked_leader}, of them lost {verdict.lost_leader}"))
    if verdict.lost_single or verdict.lost_allowed:
        rows.append(("lost, allowed", f"{verdict.lost_single} sole copies, {verdict.lost_allowed} unsynced"))
    rows += [
        ("target", f"{target.name} {target.found:g} of {target.wanted:g}{'' if target.met else '  MISSED'}")
        for target in report.targets
    ]
    if report.errors:
        rows.append(("errors", ", ".join(f"{name} {count}" for name, count in sorted(report.errors.items()))))
    named = ", ".join(f"{name} {count}" for name, count in report.anomalies.items())
    rows.append(("anomalies", named or "none"))
    lines = [f"{name:>14}  {value}" for name, value in rows]
    lines += [f"{'':>14}  {a.name} {a.key}: {a.text}" for a in verdict.anomalies]
    return "\n".join([*lines, "", strip(report.timeline)])


def strip(line: Timeline) -> str:
    """Throughput as bars, and below it where faults were (the column of each begins with its mark)."""
    width = min(_STRIP_MAX, max(1, len(line.seconds)))
    per = max(1, -(-len(line.seconds) // width))
    columns = [sum(line.seconds[at : at + per]) / per for at in range(0, len(line.seconds), per)]
    most = max(columns, default=0) or 1
    bars = "".join(_BARS[min(8, round(8 * value / most))] for value in columns)
    marks = [" "] * len(columns)
    for fault in line.faults:
        for at in range(int(fault.begin_s) // per, min(len(marks), int(fault.end_s) // per + 1)):
            marks[at] = "-" if marks[at] == " " else marks[at]
        if int(fault.begin_s) // per < len(marks):
            marks[int(fault.begin_s) // per] = "x"
    return f"  acks/s  {bars}  (full: {most:.0f}/s; a column: {per} s)\n  faults  {''.join(marks)}"


# -- picture -------------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _TOP = 1000, 260, 50, 30


def as_svg(report: Report) -> str:
    """Throughput as an area, faults as bands; the text of each shows under the pointer."""
    seconds = report.timeline.seconds or [0]
    most = max(seconds) or 1
    step = (_WIDTH - _LEFT - 10) / len(seconds)
    floor = _HEIGHT - 30

    def x(t: float) -> float:
        return round(_LEFT + t * step, 1)

    def y(count: float) -> float:
        return round(floor - (floor - _TOP) * count / most, 1)

    verdict = ", ".join(report.anomalies) or "no anomalies"
    title = f"{report.scenario}, seed {report.seed}: {report.faults} faults, {report.verdict.acked} records, {verdict}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-size="13">{html.escape(title)}</text>',
    ]
    for fault in report.timeline.faults:
        width = max(2.0, (fault.end_s - fault.begin_s) * step)
        parts.append(
            f'<rect x="{x(fault.begin_s)}" y="{_TOP}" width="{width:.1f}" height="{floor - _TOP}" fill="#d33"'
            f' fill-opacity="0.25"><title>{html.escape(fault.text)}</title></rect>'
        )
    points = " ".join(f"{x(at + 0.5)},{y(count)}" for at, count in enumerate(seconds))
    parts.append(f'<polyline points="{points}" fill="none" stroke="#247" stroke-width="1.5"/>')
    parts.append(f'<line x1="{_LEFT}" y1="{floor}" x2="{_WIDTH - 10}" y2="{floor}" stroke="#888"/>')
    parts.append(f'<text x="4" y="{_TOP + 8}" font-size="11">{most}/s</text>')
    ticks = range(0, len(seconds), max(1, len(seconds) // 10))
    parts += [f'<text x="{x(at)}" y="{_HEIGHT - 12}" font-size="11">{at} s</text>' for at in ticks]
    return "\n".join([*parts, "</svg>", ""])


# -- several runs ----------------------------------------------------------------------------------------------------


def as_markdown(runs: Iterable[dict[str, Any]]) -> str:
    """One line per scenario, from what `as_json` gave."""
    by_name: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for run in runs:
        by_name.setdefault((run["row"], run["scenario"]), []).append(run)
    lines = [
        "| row | scenario | runs (seeds) | seconds | faults | acknowledged | by one replica | unknown | anomalies"
        " | gap p50 / p99 / max, s | where Raft was led, s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (row, name), some in sorted(by_name.items()):
        verdicts = [run["verdict"] for run in some]
        plain, of_controllers = gaps_of(Gap(*gap) for verdict in verdicts for gap in verdict["gaps"])
        named: dict[str, int] = {}
        for run in some:
            for anomaly, count in run["anomalies"].items():
                named[anomaly] = named.get(anomaly, 0) + count
        cells = [
            row,
            f"`{name}`",
            f"{len(some)} ({', '.join(str(run['seed']) for run in some)})",
            round(sum(run["seconds"] for run in some)),
            sum(run["faults"] for run in some),
            sum(verdict["acked"] for verdict in verdicts),
            sum(verdict["acked_single"] for verdict in verdicts),
            sum(verdict["unknown"] + verdict["failed"] for verdict in verdicts),
            ", ".join(f"{anomaly} {count}" for anomaly, count in sorted(named.items())) or "0",
            _spread(plain),
            _spread(of_controllers),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _spread(gaps: list[float]) -> str:
    if not gaps:
        return ""
    return f"{quantile(gaps, 0.5):.2f} / {quantile(gaps, 0.99):.2f} / {max(gaps):.2f} ({len(gaps)})"


if __name__ == "__main__":
    print(as_markdown(json.loads(Path(name).read_text()) for name in sys.argv[1:]))
