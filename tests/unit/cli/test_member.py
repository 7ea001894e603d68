"""`consume -g` as typed, against a stand-in of the consumer: what is committed when, and how it ends."""

from __future__ import annotations

from typing import Any

import pytest
from unit.cli.test_commands import Records, run, somebody_listens  # noqa: F401

import zmqueue
from zmqueue.errors import CommitFailed
from zmqueue.model import ConsumerRecord, OffsetAndMetadata, TopicPartition

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


class Member(Records):
    """Is given both partitions by its first poll, and loses one before the poll that `revoked_at` names."""

    settings: dict[str, Any]
    commits: list[tuple[str, dict[TopicPartition, int]]]
    revoked_at: int
    commit_error: Exception | None
    polls = 0

    listener: Any = None

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        Member.settings = settings

    def subscribe(self, topics: list[str], listener: Any) -> None:
        assert topics == ["t"]
        self.listener = listener

    def assignment(self) -> set[TopicPartition]:
        return set(self.positions)

    def poll(self, timeout_ms: int = 0, max_records: int | None = None) -> dict[TopicPartition, list[ConsumerRecord]]:
        self.polls += 1
        if self.polls == 1:
            self.positions = {T0: 2, T1: 2}
            self.listener.on_partitions_assigned([T0, T1])
            return {}
        if self.polls == self.revoked_at:
            self.listener.on_partitions_revoked([T0])
            del self.positions[T0]
        return super().poll(timeout_ms, max_records)

    def commit_async(self, offsets: dict[TopicPartition, OffsetAndMetadata]) -> None:
        self.commits.append(("async", {partition: at.offset for partition, at in offsets.items()}))

    def close(self) -> None:
        if self.listener is not None:
            self.listener.on_partitions_revoked(list(self.positions))

    def commit(self, offsets: dict[TopicPartition, OffsetAndMetadata], timeout_ms: int | None = None) -> None:
        self.commits.append(("sync", {partition: at.offset for partition, at in offsets.items()}))
        if self.commit_error is not None:
            raise self.commit_error


@pytest.fixture(autouse=True)
def member(monkeypatch: pytest.MonkeyPatch) -> type[Member]:
    Member.settings, Member.commits, Member.revoked_at, Member.commit_error = {}, [], 0, None
    monkeypatch.setattr(zmqueue, "Consumer", Member, raising=False)
    return Member


def test_what_was_printed_is_committed_right_after_and_at_the_end(member: type[Member]) -> None:
    result = run("consume", "t", "-g", "g", "-n", "4")
    assert (result.exit_code, result.stdout) == (0, "v0.2\nv0.3\nv0.4\nv1.2\n")
    assert member.commits == [
        ("async", {T0: 3}),
        ("async", {T0: 4}),
        ("async", {T0: 5}),
        ("async", {T1: 3}),
        ("sync", {T0: 5, T1: 3}),
    ]
    assert (member.settings["group_id"], member.settings["enable_auto_commit"]) == ("g", False)


@pytest.mark.parametrize(("where", "reset"), [([], "latest"), (["-o", "start"], "earliest"), (["-o", "end"], "latest")])
def test_where_to_begin_counts_where_nothing_is_committed(member: type[Member], where: list[str], reset: str) -> None:
    run("consume", "t", "-g", "g", "-n", "1", *where)
    assert member.settings["auto_offset_reset"] == reset


def test_a_member_stops_at_the_end_of_what_it_was_given(member: type[Member]) -> None:
    result = run("consume", "t", "-g", "g", "-e")
    assert (result.exit_code, len(result.stdout.split())) == (0, 6)
    assert member.commits[-1] == ("sync", {T0: 5, T1: 5})


def test_an_interrupted_member_commits_what_it_has_printed(member: type[Member]) -> None:
    result = run("consume", "t", "-g", "g")
    assert result.exit_code == 130
    assert member.commits[-1] == ("sync", {T0: 5, T1: 5})


def test_what_was_printed_of_a_partition_is_committed_before_it_goes_to_another(member: type[Member]) -> None:
    member.revoked_at = 4
    run("consume", "t", "-g", "g", "-e")
    revoked = member.commits.index(("sync", {T0: 4}))
    assert all(T0 not in offsets for _, offsets in member.commits[revoked + 1 :])


def test_a_record_that_did_not_leave_is_not_committed(member: type[Member], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_the_third(record: ConsumerRecord) -> bytes:
        if record.offset == 4:
            raise BrokenPipeError(32, "Broken pipe")
        return b""

    monkeypatch.setattr("zmqueue.cli.consume.compile_format", lambda text: refuse_the_third)
    assert run("consume", "t", "-g", "g").exit_code == 0
    assert member.commits[-1] == ("sync", {T0: 4})


def test_a_last_commit_that_comes_too_late_is_told(member: type[Member]) -> None:
    member.commit_error = CommitFailed("others have t-0")
    result = run("consume", "t", "-g", "g", "-n", "1")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "v0.2\n", "zmqueue: others have t-0\n")
    assert run("consume", "t", "-g", "g").exit_code == 130, "an interruption stays one"


@pytest.mark.parametrize(
    "args", [["-p", "0"], ["--where", "x"], ["--reverse"], ["-o", "5"], ["-o", "-5"], ["-o", "@0"]]
)
def test_what_does_not_go_with_a_group_is_refused(member: type[Member], args: list[str]) -> None:
    assert run("consume", "t", "-g", "g", *args).exit_code == 2
    assert member.settings == {}


def test_a_topic_that_is_not_there() -> None:
    assert run("consume", "tt", "-g", "g").stderr == "zmqueue: no topic 'tt', the nearest is t\n"
