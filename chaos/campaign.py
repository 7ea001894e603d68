#!/usr/bin/env python3
"""`chaos/campaign.py [--quick] [--only NAME,...] [--write]`: every scenario, one after the other, and a table of them.

What runs, and how often, is in `chaos/campaign.toml`. The report of each run is kept as `RESULTS/SCENARIO-SEED.json`; a
run whose report is there is not repeated, so a campaign that was stopped goes on, and one that is finished is only
rendered again. Runs do not overlap: they would distort each other's gaps.

Exit codes: 0 all as expected, 1 anomalies where none may be (or none in a control), 2 usage, 130 interrupted. A missed
time target is shown, and is not a failure: machines are noisy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # started as a script
    sys.path[0] = str(ROOT)

from chaos import scenario, table  # noqa: E402

PLAN = ROOT / "chaos" / "campaign.toml"
PAGE = ROOT / "docs" / "chaos.md"
QUICK_SECONDS = 20.0


class Item(Struct, frozen=True, forbid_unknown_fields=True):
    """What is planned of one scenario; one of the first two."""

    faults: Annotated[int, Meta(ge=1)] | None = None
    seconds: Annotated[float, Meta(gt=0)] | None = None
    runs: Annotated[int, Meta(ge=1)] = 1

    def __post_init__(self) -> None:
        if (self.faults is None) == (self.seconds is None):
            raise ValueError("either faults or seconds")


class Planned(NamedTuple):
    name: str
    seed: int
    arguments: list[str]


def read_plan(path: Path = PLAN) -> dict[str, Item]:
    plan = msgspec.convert(tomllib.loads(path.read_text()), dict[str, Item])
    if unknown := [name for name in plan if name not in scenario.names()]:
        raise scenario.ScenarioError(f"{path}: no scenario {unknown[0]!r}")
    return plan


def planned(plan: dict[str, Item], only: list[str], *, quick: bool, first_seed: int) -> Iterator[Planned]:
    for name, item in plan.items():
        if only and name not in only:
            continue
        for seed in range(first_seed, first_seed + (1 if quick else item.runs)):
            if quick:
                bound = ["--seconds", f"{QUICK_SECONDS:g}"]
            elif item.faults is not None:
                bound = ["--faults", str(item.faults)]
            else:
                bound = ["--seconds", f"{item.seconds:g}"]
            yield Planned(name, seed, bound)


def run(one: Planned, results: Path) -> bool:
    """Keeps its report, whatever it says. False if there is none, as the harness itself failed."""
    command = [sys.executable, str(ROOT / "chaos" / "run.py"), one.name, "--seed", str(one.seed), *one.arguments]
    command += ["--check", "-o", "json"]
    with (results / f"{one.name}-{one.seed}.log").open("w") as log:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        return False
    fresh = results / f"{one.name}-{one.seed}.json.new"
    fresh.write_bytes(done.stdout)
    fresh.rename(results / f"{one.name}-{one.seed}.json")
    return True


def line(report: dict[str, Any]) -> str:
    missed = [target["name"] for target in report["targets"] if not target["met"]]
    named = ", ".join(f"{name} {count}" for name, count in report["anomalies"].items()) or "no anomalies"
    late = f"; MISSED {', '.join(missed)}" if missed else ""
    return f"{report['repetitions']} faults, {report['verdict']['acked']} records, {named}{late}"


def as_expected(report: dict[str, Any]) -> bool:
    return bool(report["anomalies"]) == scenario.load(report["scenario"]).control


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="chaos/campaign.py", description="Run every scenario and make the table.")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SECONDS:g} s of each scenario, once")
    parser.add_argument("--only", default="", metavar="NAME,...", help="these scenarios")
    parser.add_argument("--seed", type=int, default=1, help="the first one; default 1")
    parser.add_argument("--results", type=Path, default=Path("chaos-results"), help="where reports are kept")
    parser.add_argument("--render", action="store_true", help="run nothing: the table of the reports that are there")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    plan = read_plan()
    only = [name for name in options.only.split(",") if name]
    if unknown := [name for name in only if name not in plan]:
        parser.error(f"{unknown[0]!r} is not in the plan: {', '.join(plan)}")
    options.results.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    for one in planned(plan, only, quick=options.quick, first_seed=options.seed) if not options.render else ():
        kept = options.results / f"{one.name}-{one.seed}.json"
        began = time.monotonic()
        print(f"{one.name}, seed {one.seed}: ", end="", file=sys.stderr, flush=True)
        try:
            if not kept.exists() and not run(one, options.results):
                failed.append(one.name)
                print(f"failed, see {kept.with_suffix('.log')}", file=sys.stderr)
                continue
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        report = json.loads(kept.read_text())
        print(f"{line(report)} ({time.monotonic() - began:.0f} s)", file=sys.stderr)
        if not as_expected(report):
            failed.append(one.name)
    reports = [json.loads(path.read_text()) for path in sorted(options.results.glob("*.json"))]
    wanted = {name: item.faults * item.runs for name, item in plan.items() if item.faults is not None}
    text = table.render(reports, {} if options.quick else wanted)
    if options.write:
        table.write(PAGE, text)
    print(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
