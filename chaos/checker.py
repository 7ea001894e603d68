"""Names what is wrong with a history. Pure: events in, a verdict out, one pass and a few sweeps.

A key is one partition. Values are unique per key. A record is *known* at offset o once a send with acks=all was
acknowledged there or a consumer polled it there. Then, for every key:

  LOST-WRITE            a send with acks=all was acknowledged, or a record was polled, and the final read lacks it.
                        Without a final read: acknowledged, never polled, though others were polled beyond its offset
  UNSEEN                acknowledged, never polled, nothing polled beyond it, and no final read: not proved to be there
  DUPLICATE             one value is known at two offsets
  INCONSISTENT-OFFSET   one offset is known with two values
  DIVERGENCE            two in-sync replicas, dumped at the end, differ in a batch below the high watermark, or one ends
                        before it
  ABORTED-READ          a value was polled whose send failed for certain
  PHANTOM               a value was polled that nobody had begun to send
  POLL-SKIP             a consumer went from one offset to a later one, and a record is known between them
  NONMONOTONIC-POLL     a consumer got an offset at or below its last one, without having been moved there
  NONMONOTONIC-SEND     of two sends of one producer, the later one has the lower offset
  REALTIME-ORDER        a send that began when a record was known at offset o ended at or below o
  LAG                   a poll began with a record acknowledged longer than `lag_s_max` ago that its consumer had yet to
                        get, in this poll or a later one
  HW-REGRESSED          a high watermark is lower than one that was seen before this was asked for
  TOPIC-LOST            a topic was created, nobody began to delete it, and at the end it is not there
  TOPIC-UNDEAD          a topic was deleted, and at the end it is there

Availability is measured, not judged: per fault, the longest time that a key it hit went without an acknowledgement,
counted from the fault.

What is forgiven, because nothing was promised:
- acks=1 (`a` is 1): such an acknowledgement is worth nothing here. Its record may be gone, twice there (its producer
  retries without idempotence), or elsewhere. What consumers were given is held to every rule.
- `single_copy_at_risk`: the run destroys disks without sparing sole in-sync replicas. Losses of records acknowledged by
  one replica are counted apart.
- After an `era` event everything known before may be gone; losses are counted, and offsets may be taken anew.
"""

from __future__ import annotations

import gc
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import msgspec

from chaos.history import FAIL, INFO, INVOKE, OK, Event

EXAMPLES_MAX = 10
NEVER = -1


class Rules(msgspec.Struct, frozen=True):
    lag_s_max: float = 30.0
    single_copy_at_risk: bool = False


class Anomaly(msgspec.Struct, frozen=True):
    name: str
    key: str
    text: str


class Gap(NamedTuple):
    """How long the keys that a fault hit went without an acknowledgement, at the worst."""

    fault: str
    at_s: float
    key: str
    gap_s: float
    recovered: bool


class Verdict(msgspec.Struct):
    anomalies: list[Anomaly] = []  # the first few of each name; `counts` has them all
    counts: dict[str, int] = {}
    events: int = 0
    sent: int = 0
    acked: int = 0
    acked_single: int = 0  # by one replica alone
    acked_leader: int = 0  # with acks=1
    failed: int = 0
    unknown: int = 0
    polled: int = 0
    lost_single: int = 0
    lost_leader: int = 0
    lost_allowed: int = 0  # in an era that ended in a power cut without fsync
    lag_s_max: float = 0.0
    gap_s_max: float = 0.0
    gaps: list[Gap] = []
    latency_ms: dict[str, float] = {}

    @property
    def ok(self) -> bool:
        return not self.counts


class _Sent(NamedTuple):
    p: int
    floor: int
    t: float


class _Key:
    """All that is known of one partition."""

    __slots__ = (
        "ack_offsets",
        "ack_times",
        "acked",
        "end_seen",
        "failed",
        "final",
        "forgiven",
        "log",
        "loose",
        "name",
        "newest",
        "polled",
        "replicas",
        "sent",
        "single",
        "where",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.log: dict[int, int] = {}  # offset: value
        self.where: dict[int, int] = {}  # value: offset
        self.sent: dict[int, _Sent] = {}  # in order of invocation
        self.failed: set[int] = set()
        self.loose: dict[int, int] = {}  # sent with acks=1: the offset it was acknowledged at, or NEVER
        self.acked: dict[int, int] = {}
        self.single: set[int] = set()
        self.forgiven: set[int] = set()  # known before an era ended
        self.polled: dict[int, int] = {}  # value: offset
        self.final: dict[int, int] | None = None  # process: the end up to which it has read all
        self.newest = NEVER  # the highest known offset
        self.end_seen = NEVER
        self.ack_times = array("d")
        self.ack_offsets = array("q")
        self.replicas: list[tuple[int, int, int, dict[int, int]]] = []


class _Position:
    """Where one consumer is in one key: the last offset that it got, and the oldest acknowledgement that it did not."""

    __slots__ = ("key", "last", "oldest")

    def __init__(self, key: _Key, last: int | None) -> None:
        self.key = key
        self.last = last  # None: somewhere
        self.oldest = len(key.ack_times)  # what was acknowledged before it came is no lag of its own


def check(events: Iterable[Event], rules: Rules | None = None) -> Verdict:
    collecting = gc.isenabled()
    gc.disable()  # nothing here is cyclic, and a million tuples are many to walk
    try:
        checker = _Checker(rules or Rules())
        checker.run(events)
        return checker.finish()
    finally:
        if collecting:
            gc.enable()


class _Checker:
    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._keys: dict[str, _Key] = {}
        self._verdict = Verdict()
        self._counts: Counter[str] = Counter()
        self._positions: dict[int, dict[str, _Position]] = {}
        self._begun: dict[int, float] = {}  # process: when its poll began
        self._ends_before: dict[int, dict[str, int]] = {}
        self._gaps: list[tuple[_Position, int, int]] = []
        self._finals: dict[int, dict[str, list[int]]] = {}
        self._faults: list[Event] = []
        self._topics: dict[str, set[str]] = {}  # what was done to each: "create ok", "delete invoke", ...
        self._latencies = array("d")
        self._last_s = 0.0

    def run(self, events: Iterable[Event]) -> None:
        key_of = self._key
        count = 0
        event = None
        for event in events:
            count += 1
            f, e = event.f, event.e
            if f == "send":
                key = self._keys.get(event.k) or key_of(event.k)
                if e == INVOKE:
                    key.sent[event.v] = _Sent(event.p, key.newest, event.t)
                    if event.a == 1:
                        key.loose[event.v] = NEVER
                elif e == OK:
                    self._acked(key, event)
                elif e == FAIL:
                    key.failed.add(event.v)
                elif e == INFO:
                    self._verdict.unknown += 1
            elif f == "poll":
                if e == INVOKE:
                    self._begun[event.p] = event.t
                elif e == OK:
                    self._polled(event)
            else:
                self._rare(event)
        self._verdict.events = count
        if event is not None:
            self._last_s = event.t

    def _key(self, name: str) -> _Key:
        return self._keys.setdefault(name, _Key(name))

    def _name(self, name: str, key: str, text: str) -> None:
        self._counts[name] += 1
        if self._counts[name] <= EXAMPLES_MAX:
            self._verdict.anomalies.append(Anomaly(name, key, text))

    # -- in passing ----------------------------------------------------------------------------------------------

    def _acked(self, key: _Key, event: Event) -> None:
        v, o = event.v, event.o
        sent = key.sent.get(v)
        if sent is None:
            self._name("PHANTOM", key.name, f"value {v} was acknowledged, and nobody had begun to send it")
            return
        key.ack_times.append(event.t)
        self._latencies.append(event.t - sent.t)
        if v in key.loose:
            key.ack_offsets.append(NEVER)  # what may be gone, nobody has to get
            key.loose[v] = o
            return
        key.ack_offsets.append(o)
        key.acked[v] = o
        if event.r == 1:
            key.single.add(v)
        self._observe(key, o, v)
        if o <= sent.floor:
            self._name("REALTIME-ORDER", key.name, f"value {v} at {o}, when {sent.floor} was known before it was sent")
        if o > key.newest:
            key.newest = o

    def _observe(self, key: _Key, o: int, v: int) -> None:
        known = key.log.setdefault(o, v)
        if known != v:
            self._name("INCONSISTENT-OFFSET", key.name, f"offset {o} holds {known} and {v}")
        at = key.where.setdefault(v, o)
        if at != o and v not in key.loose:
            self._name("DUPLICATE", key.name, f"value {v} at {at} and {o}")

    def _polled(self, event: Event) -> None:
        positions = self._positions.setdefault(event.p, {})
        final = self._finals.get(event.p)
        for name, row in event.rows or ():
            key = self._keys.get(name) or self._key(name)
            position = positions.get(name)
            if position is None:
                position = positions[name] = _Position(key, None)
            if final is not None and name in final:
                final[name] += row
            last, sent, log, where = position.last, key.sent, key.log, key.where
            offsets = iter(row)
            for o, v in zip(offsets, offsets, strict=True):
                if last is not None and o != last + 1:
                    if o <= last:
                        self._name("NONMONOTONIC-POLL", name, f"process {event.p} got {o} after {last}")
                    else:
                        self._gaps.append((position, last, o))
                last = o
                if v not in sent:
                    self._name("PHANTOM", name, f"value {v} at {o}, and nobody had begun to send it")
                # The two lookups of `_observe`, without its call for what is as it should be.
                if log.setdefault(o, v) != v or where.setdefault(v, o) != o:
                    self._observe(key, o, v)
                key.polled[v] = o
            position.last = last
            if last is not None and last > key.newest:
                key.newest = last
            self._verdict.polled += len(row) // 2
        self._lag(event, positions)

    def _lag(self, event: Event, positions: dict[str, _Position]) -> None:
        began = self._begun.get(event.p)
        if began is None:
            return
        for name, position in positions.items():
            if position.last is None:
                continue
            times, offsets = position.key.ack_times, position.key.ack_offsets
            oldest, count, last = position.oldest, len(offsets), position.last
            while oldest < count and offsets[oldest] <= last:
                oldest += 1
            position.oldest = oldest
            if oldest < count and (lag_s := began - times[oldest]) > self._verdict.lag_s_max:
                self._verdict.lag_s_max = lag_s
                if lag_s > self._rules.lag_s_max:
                    text = f"offset {offsets[oldest]}, acknowledged {lag_s:.1f} s before"
                    self._name("LAG", name, f"process {event.p} began to poll at {began:.2f} s and did not get {text}")

    def _rare(self, event: Event) -> None:
        match event.f, event.e:
            case "assign", _:
                starts = event.os or [NEVER] * len(event.ks or ())
                self._positions[event.p] = {
                    name: _Position(self._key(name), None if start == NEVER else start - 1)
                    for name, start in zip(event.ks or (), starts, strict=True)
                }
                if event.x == "final":
                    self._finals[event.p] = {name: [] for name in event.ks or ()}
            case "hw", "invoke":
                self._ends_before[event.p] = {name: key.end_seen for name, key in self._keys.items()}
            case "hw", "ok":
                self._watermarks(event)
            case "final", "ok":
                key = self._key(event.k)
                key.final = {**(key.final or {}), event.p: event.o}
            case "replica", "ok":
                row = event.rows[0][1] if event.rows else []
                batches = dict(zip(row[::2], row[1::2], strict=True))
                self._key(event.k).replicas.append((event.p, event.o, event.end, batches))
            case "topic", _:
                self._topics.setdefault(event.k, set()).add(f"{event.x} {event.e}")
            case "topics", "ok":
                self._check_topics(set(event.ks or ()))
            case "fault", "invoke":
                self._faults.append(event)
            case "era", _:
                self._forgive()

    def _watermarks(self, event: Event) -> None:
        before = self._ends_before.get(event.p, {})
        for name, (end,) in event.rows or ():
            key = self._key(name)
            if end < before.get(name, NEVER):
                self._name("HW-REGRESSED", name, f"{end} at {event.t:.3f} s, after {before[name]}")
            key.end_seen = max(key.end_seen, end)

    def _check_topics(self, there: set[str]) -> None:
        for name, done in self._topics.items():
            if "create ok" in done and "delete invoke" not in done and name not in there:
                self._name("TOPIC-LOST", name, "created, and not there")
            if "delete ok" in done and name in there:
                self._name("TOPIC-UNDEAD", name, "deleted, and there")

    def _forgive(self) -> None:
        for key in self._keys.values():
            key.forgiven |= key.acked.keys() | key.polled.keys()
            key.log, key.where, key.polled = {}, {}, {}
            key.newest = key.end_seen = NEVER
            # A send that is under way across the cut may end at any offset.
            for v in key.sent.keys() - key.acked.keys():
                key.sent[v] = key.sent[v]._replace(floor=NEVER)
        for positions in self._positions.values():
            for position in positions.values():
                position.last, position.oldest = None, len(position.key.ack_times)
        self._gaps.clear()
        self._ends_before.clear()

    # -- sweeps --------------------------------------------------------------------------------------------------

    def finish(self) -> Verdict:
        verdict = self._verdict
        self._find_skips()
        for key in self._keys.values():
            verdict.sent += len(key.sent)
            verdict.acked += len(key.acked)
            verdict.acked_single += len(key.single)
            verdict.acked_leader += sum(o != NEVER for o in key.loose.values())
            verdict.failed += len(key.failed)
            for v in key.failed & key.where.keys():
                self._name("ABORTED-READ", key.name, f"value {v} at {key.where[v]}, and its send had failed")
            self._find_disorder(key)
            self._find_lost(key)
            self._compare_replicas(key)
            verdict.gap_s_max = max(verdict.gap_s_max, _longest(key.ack_times))
        verdict.gaps = [gap for fault in self._faults if (gap := self._gap_of(fault)) is not None]
        verdict.latency_ms = {f"p{q:g}": round(1000 * quantile(self._latencies, q / 100), 1) for q in (50, 99, 99.9)}
        verdict.counts = dict(sorted(self._counts.items()))
        return verdict

    def _find_skips(self) -> None:
        offsets: dict[str, list[int]] = {}
        for position, last, o in self._gaps:
            key = position.key
            known = offsets.get(key.name)
            if known is None:
                known = offsets[key.name] = sorted(key.log)
            at = bisect_right(known, last)
            if at < len(known) and known[at] < o:
                missed = bisect_left(known, o) - at
                self._name("POLL-SKIP", key.name, f"from {last} to {o}, and {missed} are known between, as {known[at]}")

    def _find_disorder(self, key: _Key) -> None:
        last: dict[int, int] = {}
        for v, sent in key.sent.items():
            o = key.acked.get(v)
            if o is None or v in key.forgiven:
                continue
            before = last.get(sent.p, NEVER)
            if o <= before:
                text = f"producer {sent.p}: value {v} at {o}, and one sent before it at {before}"
                self._name("NONMONOTONIC-SEND", key.name, text)
            last[sent.p] = o

    def _find_lost(self, key: _Key) -> None:
        final: set[int] | None = None
        for p in key.final or ():
            row = self._finals.get(p, {}).get(key.name, [])
            final = set(row[1::2]) if final is None else final & set(row[1::2])
        if final is None:
            highest = max(key.polled.values(), default=NEVER)
            for v, o in key.acked.items():
                if v not in key.polled and v not in key.forgiven:
                    self._lose(key, v, o, "LOST-WRITE" if o <= highest else "UNSEEN")
            return
        for v, o in key.acked.items():
            if v not in final:
                self._lose(key, v, o, "LOST-WRITE")
        self._verdict.lost_leader += sum(o != NEVER and v not in final for v, o in key.loose.items())
        for v, o in key.polled.items():
            if v not in final and v not in key.acked:
                self._name("LOST-WRITE", key.name, f"value {v} was polled at {o}, and is gone")

    def _lose(self, key: _Key, v: int, o: int, name: str) -> None:
        if v in key.forgiven:
            self._verdict.lost_allowed += 1
        elif v in key.single and self._rules.single_copy_at_risk:
            self._verdict.lost_single += 1
        else:
            copies = " by one replica" if v in key.single else ""
            self._name(name, key.name, f"value {v}, acknowledged at {o}{copies}")

    def _compare_replicas(self, key: _Key) -> None:
        if not key.replicas:
            return
        end = max((key.final or {}).values(), default=min(end for _, _, end, _ in key.replicas))
        for broker, _, its_end, _ in key.replicas:
            if its_end < end:
                self._name("DIVERGENCE", key.name, f"broker {broker} ends at {its_end}, the partition at {end}")
        one, one_start, _, one_batches = key.replicas[0]
        for other, other_start, _, other_batches in key.replicas[1:]:
            start = max(one_start, other_start)
            for base in sorted(one_batches.keys() | other_batches.keys()):
                if start <= base < end and one_batches.get(base) != other_batches.get(base):
                    self._name("DIVERGENCE", key.name, f"brokers {one} and {other} differ in the batch at {base}")
                    break

    # -- availability --------------------------------------------------------------------------------------------

    def _gap_of(self, fault: Event) -> Gap | None:
        """The worst key, from this fault up to the next one or the end of the history."""
        later = [other.t for other in self._faults if other.t > fault.t]
        until = min(later, default=self._last_s)
        worst: Gap | None = None
        for name in fault.ks or ():
            key = self._keys.get(name)
            if key is None:
                continue
            times = key.ack_times
            at = bisect_right(times, fault.t)
            if at == len(times):
                # Nothing was acknowledged after it: the load may have ended. Only what followed another fault is known.
                gap = Gap(fault.x, fault.t, name, until - fault.t, False)
            else:
                gap_s, before, at = times[at] - fault.t, times[at], at + 1
                while at < len(times) and before < until:
                    # It had gone on, so what begins with the next fault is on account of that one.
                    gap_s, before, at = max(gap_s, min(times[at], until) - before), times[at], at + 1
                gap = Gap(fault.x, fault.t, name, gap_s, True)
            if worst is None or gap.gap_s > worst.gap_s:
                worst = gap
        return worst


def _longest(times: array[float]) -> float:
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


def quantile(values: Iterable[float], q: float) -> float:
    """The smallest value that is not exceeded by a share of `q` of them; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0
