"""Scenarios as files: `chaos/scenarios/NAME.toml`. Everything has a default but what makes it a scenario: its steps.

about            one line
row              of the table of faults that it covers
workloads        w1, w4, w5
order            cycle: the steps one after the other; random: any of them, by the seed
pair_share       of the steps with `pairs`, in a random order: how many are joined by another such while they last
fsync_delay_ms   every sync takes this much longer, so that more is written and not synced when power is cut
accepts_loss     a fault leaves every partition without a replica to believe: it must stay without a leader until an
                 operator accepts the loss
control          must end with anomalies: what it does, nothing can survive
proxied          links between brokers go through a proxy, which can cut them; clients_proxied: those of clients as well
clocks           brokers' wall clocks can be moved (libfaketime)
members          so many consumers of one group, each a process, read w1 and are what faults disturb
settle_s         latency is compared: during faults, from so long after their beginning, with that between them
rest_s           [least, most]: how long nothing happens after a fault; a step may have its own
[[steps]]        fault (a method of Faults); hold_s [least, most]: how long it lasts; weight, for a random order; pairs,
                 see above; arguments, for the fault
[targets]        none may be exceeded. gap_p50_s, gap_p99_s, gap_max_s: seconds without an acknowledgement;
                 gap_controller_p99_s: where the victim led Raft, which the others leave out; whole_s: until all
                 replicas are in sync again; unknown: sends not acknowledged in the end; p99_ratio: of latency under
                 pressure to that in calm; rss_growth_mib, fds_left, clear_s: see chaos/faults/pressure.py;
                 unmoved_gap_s, rebalance_all_p99_s: see chaos/group_checker.py
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
Bound = Annotated[float, Meta(ge=0)]


class ScenarioError(Exception):
    """The file is not a scenario; the text says why."""


class Step(Struct, frozen=True, forbid_unknown_fields=True):
    fault: str
    hold_s: tuple[Seconds, Seconds] = (0.5, 2.0)
    rest_s: tuple[Seconds, Seconds] | None = None
    weight: Count = 1
    pairs: bool = False
    arguments: dict[str, Any] = {}


class Targets(Struct, frozen=True, forbid_unknown_fields=True):
    """Upper bounds, each named as what is measured for it."""

    gap_p50_s: Seconds | None = None
    gap_p99_s: Seconds | None = None
    gap_max_s: Seconds | None = None
    gap_controller_p99_s: Seconds | None = None
    whole_s: Seconds | None = None
    unknown: Bound | None = None
    p99_ratio: Bound | None = None
    rss_growth_mib: Bound | None = None
    fds_left: Bound | None = None
    clear_s: Seconds | None = None
    unmoved_gap_s: Seconds | None = None
    rebalance_all_p99_s: Seconds | None = None

    def wanted(self) -> dict[str, float]:
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


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
    members: Annotated[int, Meta(ge=0, le=100)] = 0
    rest_s: tuple[Seconds, Seconds] = (0.3, 1.0)
    pair_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    proxied: bool = False
    clients_proxied: bool = False
    clocks: bool = False
    control: bool = False
    accepts_loss: bool = False
    tmpfs_mib: int = 0
    raft_tmpfs_mib: int = 0
    settle_s: Seconds | None = None
    delivery_timeout_ms: Count = 30_000
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
