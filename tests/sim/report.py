"""What was measured, as the text that docs/simulation.md shows. The tool writes it there, between two marks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.sim.mutations import DIRECTED, MUTATIONS
from tests.sim.runner import Measured, Total


def summary(totals: Sequence[Total], seconds: float) -> str:
    schedules = sum(total.schedules for total in totals)
    cpu_s = sum(total.cpu_s for total in totals)
    rows = {
        "schedules": f"{schedules:,}",
        "violations": f"{sum(len(total.failures) for total in totals):,}",
        "events": f"{sum(total.events for total in totals):,}",
        "faults injected": f"{sum(total.faults for total in totals):,}",
        "batches acknowledged with acks=all": f"{sum(total.acknowledged for total in totals):,}",
        "partitions that legally stayed offline": f"{sum(total.offline for total in totals):,}",
        "schedules per second of CPU": f"{schedules / cpu_s:.0f}" if cpu_s else "-",
        "wall clock": f"{seconds:.0f} s",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def mutations_table(rows: Sequence[Measured]) -> str:
    lines = ["| rule | what is taken out | found / schedules | as |", "|---|---|---|---|"]
    for row in rows:
        names = ", ".join(sorted(row.names, key=lambda name: -row.names[name]))
        if not row.found:
            names = f"directed test fails without it: {DIRECTED[row.name]}" if row.proved else "**nothing finds it**"
        rule, _, among = MUTATIONS[row.name]
        what, schedules = row.name.replace("-", " "), f"{row.schedules:,}{f' {among}' if among else ''}"
        lines.append(f"| {rule} | {what} | {row.found} / {schedules} | {names} |")
    return "\n".join(lines)


def merge(path: Path, rows: Sequence[Measured]) -> None:
    """Put these rows into the page's table, and keep those of mutations that were not measured this time."""
    fresh = mutations_table(rows).splitlines()
    lines = {_what(line): line for line in path.read_text().splitlines() if _what(line)}
    lines |= {_what(line): line for line in fresh[2:]}
    known = [name.replace("-", " ") for name in MUTATIONS]
    write(path, "mutations", "\n".join([*fresh[:2], *(lines[what] for what in known if what in lines)]))


def _what(line: str) -> str:
    """What a row of the mutations' table takes out; nothing for other lines."""
    cells = line.split(" | ")
    return cells[1] if len(cells) == 4 and " / " in cells[2] else ""


def write(path: Path, name: str, text: str) -> None:
    """Replace what lies between `<!-- name -->` and `<!-- /name -->`."""
    page = path.read_text()
    marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    assert marked.search(page), f"{path} has no place for {name}"
    path.write_text(marked.sub(lambda match: f"{match[1]}{text}\n{match[2]}", page))
