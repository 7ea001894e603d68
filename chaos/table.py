"""The table of docs/chaos.md, from the JSON of runs: a line per scenario, its runs taken together.

A number of faults that the plan asks for is a target as the others are. A control has no targets: it must end with
anomalies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chaos import report, scenario
from chaos.checker import Gap, quantile
from chaos.report import Target

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"

HEADINGS = (
    "row",
    "scenario",
    "seeds",
    "minutes",
    "faults",
    "acknowledged",
    "anomalies",
    "gap p50 / p99 / max, s",
    "where Raft was led",
    "targets",
    "met",
)


class TableError(Exception):
    """The page has no place for the table."""


def render(runs: Iterable[dict[str, Any]], wanted: dict[str, int]) -> str:
    """`runs` as `report.as_json` gave them; `wanted`: how many faults, by scenario."""
    by_name: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for run in runs:
        by_name.setdefault((run["row"], run["scenario"]), []).append(run)
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    for (row, name), some in sorted(by_name.items()):
        lines.append(f"| {' | '.join(_cells(row, name, some, wanted.get(name, 0)))} |")
    return "\n".join(lines)


def _cells(row: int, name: str, some: list[dict[str, Any]], faults_wanted: int) -> list[str]:
    spec = scenario.load(name)
    gaps = [Gap(*gap) for run in some for gap in run["verdict"]["gaps"]]
    plain, of_controllers = report.gaps_of(gaps)
    anomalies: Counter[str] = Counter()
    for run in some:
        anomalies.update(run["anomalies"])
    repetitions = sum(run["repetitions"] for run in some)
    targets = report.compare(spec.targets, report.found(gaps, _unknown(some), _worst(some)))
    texts = [_text(target) for target in targets]
    met = all(target.met for target in targets) and bool(anomalies) == spec.control
    if faults_wanted:
        texts.insert(0, f"{faults_wanted:,} faults")
        met = met and repetitions >= faults_wanted
    if spec.control:
        texts.append("anomalies")
    named = ", ".join(f"{anomaly} {count:,}" for anomaly, count in sorted(anomalies.items()))
    return [
        str(row) if row else "",
        f"`{name}`",
        ", ".join(str(run["seed"]) for run in some),
        f"{sum(run['seconds'] for run in some) / 60:.1f}",
        f"{repetitions:,}",
        f"{sum(run['verdict']['acked'] for run in some):,}",
        named or "0",
        _spread(plain),
        _spread(of_controllers),
        "; ".join(texts),
        "yes" if met else "**no**",
    ]


def _unknown(some: list[dict[str, Any]]) -> int:
    return sum(run["verdict"]["unknown"] + run["verdict"]["failed"] for run in some)


def _worst(some: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for run in some:
        for name, value in run["measures"].items():
            found[name] = max(value, found.get(name, value))
    return found


def _text(target: Target) -> str:
    text = f"{target.name} {target.found:g} of {target.wanted:g}"
    return text if target.met else f"**{text}**"


def _spread(gaps: list[float]) -> str:
    if not gaps:
        return ""
    return f"{quantile(gaps, 0.5):.2f} / {quantile(gaps, 0.99):.2f} / {max(gaps):.2f} ({len(gaps)})"


def write(page: Path, text: str) -> None:
    """Between the two marks, and nothing else of the page. Lines of scenarios that were not run again stay."""
    old = page.read_text()
    before, begin, rest = old.partition(BEGIN)
    present, end, after = rest.partition(END)
    if not begin or not end:
        raise TableError(f"{page} has no lines {BEGIN} and {END}")
    lines = {place: line for line in (present + text).splitlines() if (place := _place(line)) is not None}
    headings = [line for line in text.splitlines() if _place(line) is None]
    table = "\n".join([*headings, *(lines[place] for place in sorted(lines))])
    page.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def _place(line: str) -> tuple[int, str] | None:
    """Row and name, by which the lines are ordered; None for what is no line of a scenario."""
    cells = [cell.strip() for cell in line.split("|")]
    if len(cells) != len(HEADINGS) + 2 or not cells[2].startswith("`"):
        return None
    return int(cells[1] or 0), cells[2].strip("`")
