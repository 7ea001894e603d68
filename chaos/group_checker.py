"""Names what is wrong with the history of a group. Pure: events in order of time in, a verdict out.

A *holding* is one member's time with one partition: from the event `assigned` to `revoked`, `lost`, or the member's
end. Its generations are those that the member had heard of meanwhile: up to the one in which it gave the partition
back, that one excluded, or, if it was taken from it, up to the last that it had heard of.

  MISSED            a record was acknowledged, and no member ever got it
  DOUBLE-OWNER      two members held a partition in one generation
  ZOMBIE-COMMIT     a commit was accepted that began when another member had been given the partition since
  COMMIT-REGRESSED  a commit was accepted below one that was accepted before it began; or a holding began to read below
                    what had been committed before it began
  NOT-SETTLED       members came or went, and to the end not every partition was held, or a new member held none

Measured, not judged:

  unmoved_gap_s     the longest time that a partition with one holder all along delivered nothing while an acknowledged
                    record waited. Not while that holder was suspended. From a fault of brokers to when all replicas are
                    in sync and leaders are back it is counted apart (`unmoved_gap_broker_s`): what is missing there
                    may be the partition's own leader
  rebalance_*_s     from when the coordinator knows to when every partition is held by a member that is alive, which
                    has been told so; after a join the new member must hold some. It knows of a join or a leave at the
                    latest when the member asks for it, which is where we begin; of a member that was killed or
                    suspended when it removes it, for which it logs a line
  zombies           members suspended for longer than their session that committed as before when they woke;
                    `zombies_refused` of these heard an error
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec

from chaos.checker import EXAMPLES_MAX, Anomaly, quantile
from chaos.history import FAIL, INVOKE, OK, Event

BROKER_FAULT_SETTLES_S = 3.0
ENDLESS = 1 << 62


class GroupVerdict(msgspec.Struct):
    anomalies: list[Anomaly] = []
    counts: dict[str, int] = {}
    measures: dict[str, float] = {}


class _Holding:
    __slots__ = ("begin_t", "end_t", "first", "generation", "key", "last", "last_t", "life", "member", "until")

    def __init__(self, member: int, key: str, life: str, generation: int, t: float) -> None:
        self.member, self.key, self.life = member, key, life
        self.generation, self.until = generation, ENDLESS  # [generation, until)
        self.last = generation  # the last generation that its member had heard of
        self.begin_t, self.end_t = t, float("inf")
        self.first = True  # nothing was delivered yet
        self.last_t = t  # of the last delivery


class _Commit:
    __slots__ = ("begin_t", "life", "rows", "zombie")

    def __init__(self, begin_t: float, life: str, rows: list[tuple[str, list[int]]], zombie: bool) -> None:
        self.begin_t, self.life, self.rows, self.zombie = begin_t, life, rows, zombie


class _Rebalance:
    __slots__ = ("begin_t", "joiner", "kind")

    def __init__(self, kind: str, begin_t: float, joiner: int | None = None) -> None:
        self.kind, self.begin_t, self.joiner = kind, begin_t, joiner


def check_group(events: Iterable[Event], partitions: int) -> GroupVerdict:
    checker = _Checker(partitions)
    for event in events:
        checker.on(event)
    return checker.finish()


class _Checker:
    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._anomalies: list[Anomaly] = []
        self._counts: Counter[str] = Counter()
        self._acked: dict[str, dict[int, float]] = defaultdict(dict)  # key: offset: when
        self._delivered: dict[str, set[int]] = defaultdict(set)
        self._holdings: dict[str, list[_Holding]] = defaultdict(list)
        self._open: dict[tuple[int, str], _Holding] = {}
        self._held_by: dict[str, set[int]] = defaultdict(set)  # by members that count as alive
        self._commits: dict[tuple[int, int], _Commit] = {}
        self._accepted: dict[str, list[tuple[float, int]]] = defaultdict(list)  # key: (when, the highest so far)
        self._suspended: dict[int, float] = {}
        self._zombie_lives: dict[int, str] = {}  # of members removed while suspended, that have not committed since
        self._leaving: set[int] = set()
        self._rebalances: list[_Rebalance] = []
        self._over = False
        self._took: dict[str, list[float]] = defaultdict(list)
        self._gaps: list[float] = []
        self._gaps_broker: list[float] = []
        self._broker_faults = 0
        self._calm_t = 0.0  # when what followed from faults of brokers was over
        self._refused = self._zombies = 0
        self._generation = 0
        self._commits_ok = 0

    def _found(self, name: str, key: str, text: str) -> None:
        self._counts[name] += 1
        if self._counts[name] <= EXAMPLES_MAX:
            self._anomalies.append(Anomaly(name, key, text))

    def on(self, event: Event) -> None:
        match event.f, event.e:
            case "send", "ok":
                self._acked[event.k].setdefault(event.o, event.t)
            case "poll", "ok" if event.v >= 0 and event.x:
                self._on_poll(event)
            case "assigned", _:
                self._on_assigned(event)
            case "end", _:
                self._on_end()
            case (("revoked" | "lost"), _):
                self._on_taken(event)
            case "commit", _:
                self._on_commit(event)
            case "join", _:
                self._begin_rebalance("join", event.t, event.p)
            case "leave", "invoke":
                self._give_up_joining(event.p)
                self._leaving.add(event.p)
                self._begin_rebalance("leave", event.t)
            case (("leave" | "killed"), "ok"):
                self._give_up_joining(event.p)
                self._end_of(event.p, event.t)
            case "removed", _:
                self._on_removed(event)
            case "suspended", "invoke":
                self._suspended[event.p] = event.t
            case "suspended", _:
                self._suspended.pop(event.p, None)
                for holding in self._of(event.p):
                    holding.last_t = event.t  # what it slept through is no gap
            case "fault", "invoke" if event.ks:
                self._broker_faults += 1
            case "whole", _ if self._broker_faults:
                self._calm_t = event.t + BROKER_FAULT_SETTLES_S
                self._broker_faults = 0

    def _of(self, member: int) -> list[_Holding]:
        return [holding for (p, _), holding in self._open.items() if p == member]

    # -- who holds what --------------------------------------------------------------------------------------------

    def _on_assigned(self, event: Event) -> None:
        self._generation = max(self._generation, event.v)
        for key in event.ks or []:
            holding = _Holding(event.p, key, event.x, event.v, event.t)
            self._holdings[key].append(holding)
            self._open[event.p, key] = holding
            self._held_by[key].add(event.p)
        self._settle(event.t)

    def _on_taken(self, event: Event) -> None:
        for key in event.ks or []:
            holding = self._open.pop((event.p, key), None)
            if holding is None:
                continue
            gave_back = event.f == "revoked" and event.p not in self._leaving and event.v >= 0
            self._close(holding, event.v if gave_back else holding.last + 1, event.t)
        self._settle(event.t)

    def _close(self, holding: _Holding, until: int, t: float) -> None:
        holding.until, holding.end_t = until, t
        self._held_by[holding.key].discard(holding.member)

    def _end_of(self, member: int, t: float) -> None:
        for holding in self._of(member):
            del self._open[member, holding.key]
            self._close(holding, holding.last + 1, t)

    def _on_removed(self, event: Event) -> None:
        """The coordinator has given this membership up: what it may believe to hold counts no more as held."""
        held = [holding for holding in self._of(event.p) if holding.life == event.x]
        if event.p in self._suspended and held:
            self._zombie_lives[event.p] = event.x
        for holding in held:
            self._held_by[holding.key].discard(event.p)
        self._begin_rebalance("expired", event.t)

    def _begin_rebalance(self, kind: str, t: float, joiner: int | None = None) -> None:
        if not self._over:
            self._rebalances.append(_Rebalance(kind, t, joiner))

    def _give_up_joining(self, member: int) -> None:
        self._rebalances = [rebalance for rebalance in self._rebalances if rebalance.joiner != member]

    def _settle(self, t: float) -> None:
        if not self._rebalances or sum(map(bool, self._held_by.values())) < self._partitions:
            return
        holders = set().union(*self._held_by.values())
        left = []
        for rebalance in self._rebalances:
            if rebalance.joiner is None or rebalance.joiner in holders:
                self._took[rebalance.kind].append(t - rebalance.begin_t)
            else:
                left.append(rebalance)
        self._rebalances = left

    def _on_end(self) -> None:
        """From here on everybody leaves."""
        self._over = True
        for rebalance in self._rebalances:
            self._found("NOT-SETTLED", "", f"{rebalance.kind} at {rebalance.begin_t:.3f} s")
        self._rebalances = []

    # -- records ---------------------------------------------------------------------------------------------------

    def _on_poll(self, event: Event) -> None:
        for key, row in event.rows or []:
            offsets = row[::2]
            self._delivered[key].update(offsets)
            holding = self._open.get((event.p, key))
            if holding is None:
                continue
            if holding.life == event.x:
                holding.last = max(holding.last, event.v)
            if holding.first:
                self._begins(holding, offsets[0])
            else:
                self._gap(holding, offsets, event.t)
            holding.last_t = event.t

    def _begins(self, holding: _Holding, offset: int) -> None:
        holding.first = False
        committed = self._committed(holding.key, holding.begin_t)
        if offset < committed:
            text = f"member {holding.member} began to read at {offset}, {committed} was committed"
            self._found("COMMIT-REGRESSED", holding.key, text)

    def _gap(self, holding: _Holding, offsets: list[int], t: float) -> None:
        acked = self._acked[holding.key]
        since = min((acked[offset] for offset in offsets if offset in acked), default=t)
        since = max(since, holding.last_t)
        if self._broker_faults or since < self._calm_t:
            self._gaps_broker.append(t - since)
        else:
            self._gaps.append(t - since)

    # -- commits ---------------------------------------------------------------------------------------------------

    def _on_commit(self, event: Event) -> None:
        if event.e == INVOKE:
            zombie = self._zombie_lives.pop(event.p, None) == event.x
            self._commits[event.p, event.o] = _Commit(event.t, event.x, event.rows or [], zombie)
            return
        commit = self._commits.pop((event.p, event.o), None)
        if commit is None:
            return
        if commit.zombie and event.e in (OK, FAIL):
            self._zombies += 1
            self._refused += event.e == FAIL
        if event.e == OK:
            self._commits_ok += 1
            for key, (offset,) in event.rows or commit.rows:
                self._on_accepted(event, commit, key, offset)

    def _on_accepted(self, event: Event, commit: _Commit, key: str, offset: int) -> None:
        own = [each for each in self._holdings[key] if each.member == event.p and each.life == commit.life]
        since = own[-1].generation if own else -1
        for other in self._holdings[key]:
            if other.member != event.p and other.generation > since and other.begin_t < commit.begin_t:
                text = f"member {event.p} committed {offset}, member {other.member} has it since {other.begin_t:.3f} s"
                self._found("ZOMBIE-COMMIT", key, text)
                break
        if offset < (before := self._committed(key, commit.begin_t)):
            self._found("COMMIT-REGRESSED", key, f"member {event.p} committed {offset} after {before}")
        accepted = self._accepted[key]
        accepted.append((event.t, max(offset, accepted[-1][1] if accepted else 0)))

    def _committed(self, key: str, t: float) -> int:
        """The highest offset whose commit had been accepted by then."""
        return next((offset for at, offset in reversed(self._accepted[key]) if at < t), 0)

    # -- the end ---------------------------------------------------------------------------------------------------

    def finish(self) -> GroupVerdict:
        for holding in self._open.values():
            holding.until = holding.last + 1
        for key, holdings in self._holdings.items():
            self._check_owners(key, holdings)
        for key, acked in self._acked.items():
            for offset in sorted(acked.keys() - self._delivered[key]):
                self._found("MISSED", key, f"offset {offset} was acknowledged at {acked[offset]:.3f} s")
        return GroupVerdict(self._anomalies, dict(self._counts), self._measures())

    def _check_owners(self, key: str, holdings: list[_Holding]) -> None:
        """In order of their first generation, each must begin where all before it have ended."""
        last: _Holding | None = None
        for holding in sorted(holdings, key=lambda each: (each.generation, each.begin_t)):
            if holding.until <= holding.generation:
                continue  # given back in the generation in which it was told of it: it never was an owner
            if last is not None and holding.generation < last.until and holding.member != last.member:
                text = f"members {last.member} and {holding.member} in generation {holding.generation}"
                self._found("DOUBLE-OWNER", key, text)
            if last is None or holding.until > last.until:
                last = holding

    def _measures(self) -> dict[str, float]:
        found: dict[str, float] = {
            "delivered": sum(map(len, self._delivered.values())),
            "commits": self._commits_ok,
            "generations": self._generation,
            "zombies": self._zombies,
            "zombies_refused": self._refused,
            "unmoved_gap_s": round(max(self._gaps, default=0.0), 3),
            "unmoved_gap_broker_s": round(max(self._gaps_broker, default=0.0), 3),
            "rebalances": sum(map(len, self._took.values())),
        }
        everything = [took for some in self._took.values() for took in some]
        for name, some in (*sorted(self._took.items()), ("all", everything)):
            if some:
                found[f"rebalance_{name}_p50_s"] = round(quantile(some, 0.5), 3)
                found[f"rebalance_{name}_p99_s"] = round(quantile(some, 0.99), 3)
                found[f"rebalance_{name}_max_s"] = round(max(some), 3)
        return found
