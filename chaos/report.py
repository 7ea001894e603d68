"""What a run showed: a table for the terminal, the same as JSON, and a picture of faults and throughput over time."""

from __future__ import annotations

import html
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

import msgspec

from chaos.checker import Gap, Verdict, quantile
from chaos.history import INVOKE, OK, Event
from chaos.scenario import Scenario, Targets

_BARS = " ▁▂▃▄▅▆▇█"
_STRIP_MAX = 100


class Injected(msgspec.Struct, frozen=True):
    """One fault: from when to when it lasted, and how many repetitions it stands for."""

    text: str
    begin_s: float
    end_s: float
    repetitions: int = 1


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
    repetitions: int
    verdict: Verdict
    anomalies: dict[str, int]
    gap_p50_s: float
    gap_p99_s: float
    gap_max_s: float
    measures: dict[str, float]
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


def latency_ratio(
    events: Iterable[Event], windows: Iterable[tuple[bool, float, float, frozenset[str]]]
) -> dict[str, float]:
    """The p99 of sends that began in calm windows and in the others, and how many times the one is the other."""
    begun: dict[int, float] = {}
    sends: list[tuple[float, float, str]] = []
    for event in events:
        if event.f == "send" and event.a != 1:
            if event.e == INVOKE:
                begun[event.v] = event.t
            elif event.e == OK and (at := begun.pop(event.v, None)) is not None:
                sends.append((at, event.t - at, event.k))
    sends.sort()
    found: dict[bool, list[float]] = {True: [], False: []}
    for calm, begin_s, end_s, keys in windows:
        some = sends[bisect_left(sends, (begin_s,)) : bisect_left(sends, (end_s,))]
        found[calm] += (latency_s for _, latency_s, key in some if not keys or key in keys)
    if not found[True] or not found[False]:
        return {}
    calm_s, pressed_s = quantile(found[True], 0.99), quantile(found[False], 0.99)
    return {
        "p99_calm_ms": round(1000 * calm_s, 1),
        "p99_pressed_ms": round(1000 * pressed_s, 1),
        "p99_ratio": round(pressed_s / max(calm_s, 1e-6), 2),
    }


def found(gaps: Iterable[Gap], unknown: int, measures: dict[str, float]) -> dict[str, float]:
    """Everything that targets may be set for, as far as it was measured."""
    plain, of_controllers = gaps_of(gaps)
    values = {**measures, "unknown": float(unknown)}
    if plain:
        values |= {
            "gap_p50_s": round(quantile(plain, 0.5), 3),
            "gap_p99_s": round(quantile(plain, 0.99), 3),
            "gap_max_s": round(max(plain), 3),
        }
    if of_controllers:
        values["gap_controller_p99_s"] = round(quantile(of_controllers, 0.99), 3)
    return values


def compare(targets: Targets, values: dict[str, float]) -> list[Target]:
    return [
        Target(name, goal, values[name], values[name] <= goal)
        for name, goal in targets.wanted().items()
        if name in values
    ]


def make(
    scenario: Scenario,
    name: str,
    seed: int,
    seconds: float,
    verdict: Verdict,
    more: dict[str, int],
    errors: dict[str, int],
    line: Timeline,
    measures: dict[str, float] | None = None,
) -> Report:
    """`more` are anomalies that no history shows: brokers that crashed, a cluster that did not become whole."""
    measures = measures or {}
    values = found(verdict.gaps, verdict.unknown + verdict.failed, measures)
    return Report(
        scenario=name,
        row=scenario.row,
        seed=seed,
        seconds=round(seconds, 1),
        faults=len(line.faults),
        repetitions=sum(fault.repetitions for fault in line.faults),
        verdict=verdict,
        anomalies={**verdict.counts, **{what: count for what, count in more.items() if count}},
        gap_p50_s=values.get("gap_p50_s", 0.0),
        gap_p99_s=values.get("gap_p99_s", 0.0),
        gap_max_s=values.get("gap_max_s", 0.0),
        measures=measures,
        targets=compare(scenario.targets, values),
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
        ("faults", f"{report.faults}, repetitions {report.repetitions}"),
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
    if report.measures:
        rows.append(("measured", ", ".join(f"{name} {value:g}" for name, value in sorted(report.measures.items()))))
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
