"""Scenarios as files: `chaos/scenarios/NAME.toml`. Everything has a default but what makes it a scenario: its steps.

about            one line
row              of the table of faults that it covers
workloads        w1, w4, w5
order            cycle: the steps one after the other; random: any of them, by the seed
fsync_delay_ms   every sync takes this much longer, so that more is written and not synced when power is cut
ends_offline     the first fault leaves every partition without a replica to believe: it must stay without a leader
proxied          links between brokers go through a proxy, which can cut them
[[steps]]        fault (a method of Faults), hold_s and rest_s [least, most]: how long it lasts, and how long after it
                 nothing happens; weight, for a random order; arguments, for the fault
[targets]        gap_p50_s, gap_p99_s, gap_max_s: seconds without an acknowledgement; gap_controller_p99_s: where the
                 victim led Raft, which the others leave out; unknown_max: sends not acknowledged in the end
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

FOLDER = Path(__file__).parent / "scenarios"

Seconds = Annotated[float, Meta(ge=0, le=3_600)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]


class ScenarioError(Exception):
    """The file is not a scenario; the text says why."""


class Step(Struct, frozen=True, forbid_unknown_fields=True):
    fault: str
    hold_s: tuple[Seconds, Seconds] = (0.5, 2.0)
    rest_s: tuple[Seconds, Seconds] = (0.3, 1.0)
    weight: Count = 1
    arguments: dict[str, Any] = {}


class Targets(Struct, frozen=True, forbid_unknown_fields=True):
    gap_p50_s: Seconds | None = None
    gap_p99_s: Seconds | None = None
    gap_max_s: Seconds | None = None
    gap_controller_p99_s: Seconds | None = None
    unknown_max: Annotated[int, Meta(ge=0)] | None = None


class Scenario(Struct, frozen=True, forbid_unknown_fields=True):
    about: str
    row: int
    steps: Annotated[list[Step], Meta(min_length=1)]
    order: Literal["cycle", "random"] = "cycle"
    workloads: list[Literal["w1", "w4", "w5"]] = field(default_factory=lambda: ["w1"])
    partitions: Count = 10
    replication: Count = 2
    per_second: Count = 500
    producers: Count = 2
    consumers: Count = 2
    proxied: bool = False
    ends_offline: bool = False
    tmpfs_mib: int = 0
    fsync_delay_ms: Annotated[int, Meta(ge=0, le=10_000)] = 0  # of every broker, all the time
    lag_s_max: Seconds = 40.0
    settings: dict[str, str] = {}
    targets: Targets = Targets()

    @property
    def loses_unsynced(self) -> bool:
        return self.settings.get("log.fsync", "always") != "always"


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Scenario:
    """By its name, or by the path of a file."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), Scenario)
    except OSError:
        raise ScenarioError(f"no scenario {name!r}; there are {', '.join(names())}") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ScenarioError(f"{path}: {error}") from None
