"""The checker of chaos histories: a clean one passes, each injected anomaly is called by its name."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest

from chaos.checker import Rules, Verdict, check, quantile
from chaos.history import FAIL, INFO, INVOKE, OK, Event, Recorder, read, read_file

KEY = "t-0"
PRODUCERS = (1, 2)
CONSUMER, FINAL, OTHER_FINAL, SAMPLER = 11, 21, 22, 31
COUNT = 40


class Story:
    """A history in the making; every event comes 10 ms after the one before."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, p: int, e: str, f: str, at: float | None = None, **more: object) -> Event:
        t = at if at is not None else (self.events[-1].t + 0.01 if self.events else 0.0)
        event = Event(t, p, e, f, **more)
        self.events.append(event)
        return event

    def send(self, v: int, o: int, p: int = 1, r: int = 2, a: int = -1) -> None:
        self.add(p, INVOKE, "send", k=KEY, v=v, a=a)
        self.add(p, OK, "send", k=KEY, v=v, o=o, r=r, a=a)

    def poll(self, p: int, *records: tuple[int, int]) -> None:
        self.add(p, INVOKE, "poll")
        row = [number for record in records for number in record]
        self.add(p, OK, "poll", rows=[(KEY, row)] if row else [])

    def finish(self, records: list[tuple[int, int]], end: int | None = None) -> None:
        for p in (FINAL, OTHER_FINAL):
            self.add(p, OK, "assign", ks=[KEY], os=[0], x="final")
            self.poll(p, *records)
            self.add(p, OK, "final", k=KEY, o=len(records) if end is None else end)


def good() -> Story:
    """Two producers in turn, one consumer behind them, two final reads, equal replicas: value 100 + o at offset o."""
    story = Story()
    story.add(CONSUMER, OK, "assign", ks=[KEY], os=[0])
    for o in range(COUNT):
        story.send(100 + o, o, p=PRODUCERS[o % 2])
        if o % 4 == 3:
            story.poll(CONSUMER, *((n, 100 + n) for n in range(o - 3, o + 1)))
            story.add(SAMPLER, INVOKE, "hw")
            story.add(SAMPLER, OK, "hw", rows=[(KEY, [o + 1])])
    story.finish([(o, 100 + o) for o in range(COUNT)])
    for broker in (0, 1):
        row = [number for base in range(0, COUNT, 4) for number in (base, 7 * base)]
        story.add(broker, OK, "replica", k=KEY, o=0, end=COUNT, rows=[(KEY, row)])
    return story


def names(story: Story, **rules: object) -> set[str]:
    return set(check(story.events, Rules(**rules)).counts)


def of(story: Story, f: str, e: str = OK) -> list[Event]:
    return [event for event in story.events if event.f == f and event.e == e]


def test_a_clean_history_passes() -> None:
    verdict = check(good().events)
    assert verdict.ok
    assert (verdict.sent, verdict.acked, verdict.acked_single, verdict.failed) == (COUNT, COUNT, 0, 0)
    assert verdict.polled == 3 * COUNT


def test_an_acknowledged_record_that_the_final_read_lacks_is_lost() -> None:
    story = good()
    story.events = [event for event in story.events if event.p not in (FINAL, OTHER_FINAL)]
    story.finish([(o, 100 + o) for o in range(COUNT - 1)])
    assert "LOST-WRITE" in names(story)


def test_a_record_that_one_of_the_final_reads_lacks_is_lost() -> None:
    story = good()
    del of(story, "poll")[-1].rows[0][1][-2:]
    assert names(story) == {"LOST-WRITE"}


def test_a_record_that_was_polled_without_acknowledgement_and_is_gone_is_lost() -> None:
    story = good()
    at = story.events.index(of(story, "assign")[1])
    head, story.events, tail = story.events[:at], story.events[:at], story.events[at:]
    story.add(1, INVOKE, "send", at=head[-1].t, k=KEY, v=999)
    story.poll(CONSUMER, (COUNT, 999))
    story.events += tail
    assert names(story) == {"LOST-WRITE"}


def test_without_a_final_read_a_record_is_lost_if_later_ones_were_polled_and_unseen_if_not() -> None:
    story = Story()
    for o in range(3):
        story.send(100 + o, o)
    story.add(CONSUMER, OK, "assign", ks=[KEY], os=[-1])
    story.poll(CONSUMER, (1, 101))
    assert check(story.events).counts == {"LOST-WRITE": 1, "UNSEEN": 1}


def test_one_value_at_two_offsets_is_a_duplicate() -> None:
    story = good()
    for event in of(story, "poll")[-2:]:
        event.rows[0][1].extend([COUNT, 100])
    assert names(story) == {"DUPLICATE"}


def test_two_values_at_one_offset_are_inconsistent() -> None:
    story = good()
    of(story, "poll")[-1].rows[0][1][1] = 139
    assert "INCONSISTENT-OFFSET" in names(story)


@pytest.mark.parametrize("damage", ["checksum", "missing", "short"])
def test_replicas_that_differ_below_the_end_diverge(damage: str) -> None:
    story = good()
    replica = of(story, "replica")[1]
    if damage == "checksum":
        replica.rows[0][1][5] += 1
    elif damage == "missing":
        del replica.rows[0][1][4:6]
    else:
        replica.end -= 1
    assert names(story) == {"DIVERGENCE"}


def test_replicas_may_differ_above_the_end() -> None:
    story = good()
    of(story, "replica")[1].rows[0][1].extend([COUNT, 12345])
    assert check(story.events).ok


def test_a_polled_value_whose_send_failed_is_an_aborted_read() -> None:
    story = good()
    ok = of(story, "send")[5]
    ok.e, ok.o = FAIL, -1
    assert names(story) == {"ABORTED-READ"}


def test_a_polled_value_whose_send_is_unknown_is_fine() -> None:
    story = good()
    ok = of(story, "send")[5]
    ok.e, ok.o = INFO, -1
    verdict = check(story.events)
    assert verdict.ok
    assert verdict.unknown == 1


def test_a_polled_value_that_nobody_sent_is_a_phantom() -> None:
    story = good()
    for event in of(story, "poll")[-2:]:
        event.rows[0][1].extend([COUNT, 4711])
    assert names(story) == {"PHANTOM"}


def test_a_consumer_that_passes_over_a_known_record_skips() -> None:
    story = good()
    del of(story, "poll")[2].rows[0][1][2:4]
    assert names(story) == {"POLL-SKIP"}


def test_a_consumer_that_begins_behind_its_start_skips() -> None:
    story = good()
    del of(story, "poll")[0].rows[0][1][:2]
    assert names(story) == {"POLL-SKIP"}


def test_offsets_that_nobody_knows_may_be_passed_over() -> None:
    story = Story()
    story.send(1, 0)
    story.send(2, 5)
    story.add(CONSUMER, OK, "assign", ks=[KEY], os=[0])
    story.poll(CONSUMER, (0, 1), (5, 2))
    assert check(story.events).ok


def test_an_offset_that_a_consumer_gets_again_is_nonmonotonic() -> None:
    story = good()
    of(story, "poll")[3].rows[0][1][:0] = [11, 111]
    assert names(story) == {"NONMONOTONIC-POLL"}


def test_a_consumer_that_was_assigned_anew_may_read_again() -> None:
    story = Story()
    story.send(1, 0)
    for _ in range(2):
        story.add(CONSUMER, OK, "assign", ks=[KEY], os=[0])
        story.poll(CONSUMER, (0, 1))
    assert check(story.events).ok


def test_sends_of_a_producer_that_end_in_another_order_are_nonmonotonic() -> None:
    story = Story()
    story.add(1, INVOKE, "send", k=KEY, v=1)
    story.add(1, INVOKE, "send", k=KEY, v=2)
    story.add(1, OK, "send", k=KEY, v=1, o=1, r=2)
    story.add(1, OK, "send", k=KEY, v=2, o=0, r=2)
    story.finish([(0, 2), (1, 1)])
    assert names(story) == {"NONMONOTONIC-SEND"}


def test_acknowledgements_of_a_producer_may_arrive_in_another_order() -> None:
    story = Story()
    story.add(1, INVOKE, "send", k=KEY, v=1)
    story.add(1, INVOKE, "send", k=KEY, v=2)
    story.add(1, OK, "send", k=KEY, v=2, o=1, r=2)
    story.add(1, OK, "send", k=KEY, v=1, o=0, r=2)
    story.finish([(0, 1), (1, 2)])
    assert check(story.events).ok


def test_a_send_that_ends_below_what_was_known_when_it_began_breaks_real_time_order() -> None:
    story = Story()
    story.send(1, 5, p=1)
    story.send(2, 4, p=2)
    story.finish([(4, 2), (5, 1)], end=6)
    assert names(story) == {"REALTIME-ORDER"}


def test_a_consumer_that_does_not_get_what_was_acknowledged_long_ago_lags() -> None:
    story = Story()
    story.add(CONSUMER, OK, "assign", ks=[KEY], os=[0])
    story.send(1, 0)
    story.add(CONSUMER, INVOKE, "poll", at=100.0)
    story.add(CONSUMER, OK, "poll", rows=[])
    story.finish([(0, 1)])
    assert names(story, lag_s_max=30.0) == {"LAG"}
    assert names(story, lag_s_max=120.0) == set()
    assert check(story.events, Rules(lag_s_max=120.0)).lag_s_max == pytest.approx(99.98)


def test_a_watermark_that_falls_has_regressed() -> None:
    story = good()
    of(story, "hw")[-1].rows[0][1][0] = 3
    assert names(story) == {"HW-REGRESSED"}


def test_watermarks_that_were_asked_for_at_the_same_time_may_come_in_any_order() -> None:
    story = Story()
    story.send(1, 0)
    story.add(31, INVOKE, "hw")
    story.add(32, INVOKE, "hw")
    story.add(31, OK, "hw", rows=[(KEY, [1])])
    story.add(32, OK, "hw", rows=[(KEY, [0])])
    story.finish([(0, 1)])
    assert check(story.events).ok


def test_acks_of_one_leader_promise_nothing() -> None:
    story = Story()
    story.send(1, 5, a=1)
    story.send(2, 5, a=1)
    story.send(3, 2, a=1)
    story.finish([(0, 3), (1, 3)])
    verdict = check(story.events)
    assert verdict.ok
    assert (verdict.acked, verdict.acked_leader, verdict.lost_leader) == (0, 3, 2)


def test_losses_of_single_copies_count_apart_where_disks_are_destroyed() -> None:
    story = Story()
    story.send(1, 0)
    story.send(2, 1, r=1)
    story.finish([(0, 1)])
    assert names(story) == {"LOST-WRITE"}
    verdict = check(story.events, Rules(single_copy_at_risk=True))
    assert verdict.ok
    assert (verdict.acked_single, verdict.lost_single) == (1, 1)


def test_what_was_known_before_an_era_ended_may_be_gone_and_its_offsets_taken_anew() -> None:
    story = Story()
    story.add(CONSUMER, OK, "assign", ks=[KEY], os=[0])
    story.send(1, 0)
    story.send(2, 1)
    story.poll(CONSUMER, (0, 1), (1, 2))
    story.add(0, OK, "era")
    story.send(3, 1)
    story.poll(CONSUMER, (1, 3))
    story.finish([(0, 1), (1, 3)])
    verdict = check(story.events)
    assert verdict.counts == {}
    assert verdict.lost_allowed == 1


@pytest.mark.parametrize(
    ("done", "there", "named"),
    [
        (["create invoke", "create ok"], False, {"TOPIC-LOST"}),
        (["create invoke", "create info"], False, set()),
        (["create invoke", "create ok", "delete invoke", "delete info"], True, set()),
        (["create invoke", "create ok", "delete invoke", "delete ok"], True, {"TOPIC-UNDEAD"}),
        (["create invoke", "create ok", "delete invoke", "delete ok"], False, set()),
    ],
)
def test_topics_are_there_or_not_as_was_said(done: list[str], there: bool, named: set[str]) -> None:
    story = Story()
    for step in done:
        x, e = step.split()
        story.add(1, e, "topic", k="a", x=x)
    story.add(1, OK, "topics", ks=["a"] if there else [])
    assert names(story) == named


def test_gaps_are_counted_from_the_fault_to_the_worst_wait_for_an_acknowledgement() -> None:
    story = Story()
    for o, t in enumerate((0.5, 0.9, 2.4, 2.5, 9.0)):
        story.add(1, INVOKE, "send", at=t - 0.01, k=KEY, v=o)
        story.add(1, OK, "send", at=t, k=KEY, v=o, o=o, r=2)
        if t == 0.9:
            story.add(0, INVOKE, "fault", at=1.0, x="kill 3", ks=[KEY, "unused-1"])
        if t == 2.5:
            story.add(0, INVOKE, "fault", at=3.0, x="kill 4", ks=[KEY])
    assert gaps_in(story) == [("kill 3", 1.4, True), ("kill 4", 6.0, True)], "each has what came of it"


def test_a_gap_that_outlasts_the_next_fault_belongs_to_both() -> None:
    story = Story()
    for o, t in enumerate((0.9, 9.0)):
        story.add(1, INVOKE, "send", at=t - 0.01, k=KEY, v=o)
        story.add(1, OK, "send", at=t, k=KEY, v=o, o=o, r=2)
        if o == 0:
            story.add(0, INVOKE, "fault", at=1.0, x="kill 3", ks=[KEY])
            story.add(0, INVOKE, "fault", at=3.0, x="kill 4", ks=[KEY])
    assert gaps_in(story) == [("kill 3", 8.0, True), ("kill 4", 6.0, True)]


def gaps_in(story: Story) -> list[tuple[str, float, bool]]:
    return [(gap.fault, round(gap.gap_s, 3), gap.recovered) for gap in check(story.events).gaps]


def test_quantiles() -> None:
    assert quantile([], 0.5) == 0.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile(range(100), 0.99) == 99


def test_a_history_survives_its_file_and_a_torn_last_line_is_left_out(tmp_path) -> None:
    path = tmp_path / "history.jsonl"
    with Recorder(path) as recorder:
        recorder.add(1, INVOKE, "send", k=KEY, v=1)
        recorder.add(1, OK, "send", k=KEY, v=1, o=0, r=2)
        assert recorder.acked == 1
    recorder.add(1, INVOKE, "send", k=KEY, v=2)
    assert [event.e for event in read_file(path)] == [INVOKE, OK]
    assert [event.e for event in read([*path.read_bytes().splitlines(keepends=True), b'{"t": 1'])] == [INVOKE, OK]


def long_history(count: int, keys: int = 10) -> Iterator[bytes]:
    """`count` events of a clean history: sends of four producers, polls of ten records."""
    encode = msgspec.json.Encoder().encode
    ends = [0] * keys
    unread: list[list[int]] = [[] for _ in range(keys)]
    t, number = 0.0, 0
    yield encode(Event(t, 9, OK, "assign", ks=[f"t-{n}" for n in range(keys)], os=[0] * keys)) + b"\n"
    while number < count - 1:
        which = (number // 2) % keys
        v, o, p = number, ends[which], which % 4
        ends[which] += 1
        t += 0.0001
        yield encode(Event(t, p, INVOKE, "send", k=f"t-{which}", v=v)) + b"\n"
        yield encode(Event(t, p, OK, "send", k=f"t-{which}", v=v, o=o, r=2)) + b"\n"
        number += 2
        unread[which] += [o, v]
        if len(unread[which]) == 20:
            yield encode(Event(t, 9, INVOKE, "poll")) + b"\n"
            yield encode(Event(t, 9, OK, "poll", rows=[(f"t-{which}", unread[which])])) + b"\n"
            unread[which] = []
            number += 2


@pytest.mark.slow
def test_a_million_events_take_less_than_five_seconds() -> None:
    lines = list(long_history(1_000_000))
    began = time.process_time()
    verdict: Verdict = check(read(lines))
    spent_s = time.process_time() - began
    assert verdict.events >= 1_000_000
    assert set(verdict.counts) <= {"UNSEEN"}
    assert spent_s < 5, f"{spent_s:.1f} s"
