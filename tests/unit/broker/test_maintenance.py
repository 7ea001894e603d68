"""Requests that change what a topic keeps, and the work beside serving, over real logs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from tests.unit.broker.test_shell import CLIENT, KEY, TOPIC_ID, Shell
from zmqueue import errors
from zmqueue.broker.maintenance import Chore, Maintenance, Worker
from zmqueue.config import Config, LogConfig
from zmqueue.errors import CorruptLog, JobFailed, StorageFull
from zmqueue.log.jobs import Failed
from zmqueue.log.partition_log import PartitionLog
from zmqueue.model import PartitionKey
from zmqueue.wire import messages as m
from zmqueue.wire.frames import Operation

LOG = LogConfig(maintenance_ms=100, maintenance_files_max=2, segment_bytes_max=1 << 20)


class Kept(Shell):
    """A shell with a maintenance loop, and a clock of the wall."""

    def __init__(self, folder: Path, chores: list[Chore] | None = None, worker: Worker | None = None) -> None:
        super().__init__(folder, Config(log=LOG))
        self.wall_ms = 1_000_000
        self.maintenance = Maintenance(
            self.node, self.logs, LOG, self.executor.run, lambda: self.wall_ms, chores or [], worker
        )
        self.lead()

    @property
    def log(self) -> PartitionLog:
        return self.logs[KEY]

    def alter(self, changes: dict[str, str | None], version: int = 0, topic_id: bytes = TOPIC_ID) -> Any:
        self.ask(Operation.ALTER_TOPIC, m.AlterTopicRequest("t", topic_id, version, changes))
        self.turn()
        return self.answer

    def delete(self, offset: int) -> Any:
        self.ask(Operation.DELETE_RECORDS, m.DeleteRecordsRequest(TOPIC_ID, 0, offset))
        return self.answer

    def fill(self, count: int) -> None:
        for _ in range(count):
            self.produce(b"v" * 600)
        self.commit()
        self.answers.sent.clear()

    def tick(self, ms: int = 100) -> None:
        self.now_ms += ms
        self.wall_ms += ms
        self.maintenance.on_tick(self.now_ms)


@pytest.fixture
def shell(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def of_log(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.log"))


# -- settings ----------------------------------------------------------------------------------------------------


def test_altered_settings_reach_the_log_at_once(shell: Kept) -> None:
    assert shell.log.settings.segment_bytes == 1 << 20
    assert isinstance(shell.alter({"segment.bytes": "1024", "quota.bytes": "5000"}), m.Done)
    assert (shell.log.settings.segment_bytes, shell.log.settings.quota_bytes) == (1024, 5000)
    assert isinstance(shell.alter({"segment.bytes": None}, version=1), m.Done)
    assert (shell.log.settings.segment_bytes, shell.log.settings.quota_bytes) == (1 << 20, 5000)


@pytest.mark.parametrize(
    "changes",
    [
        {"retention.ms": "soon"},
        {"retention.msec": "1"},
        {"storage.mode": "memory"},
        {"min.insync.replicas": "3"},
        {"segment.bytes": "10"},
    ],
)
def test_settings_that_cannot_be_are_refused_and_change_nothing(shell: Kept, changes: dict[str, str | None]) -> None:
    before = shell.state.topics[TOPIC_ID].config
    assert shell.alter(changes).code == errors.InvalidConfig.code
    assert shell.state.topics[TOPIC_ID].config == before
    assert shell.state.topics[TOPIC_ID].config_version == 0


def test_a_change_that_arrives_late_changes_nothing(shell: Kept) -> None:
    shell.alter({"retention.ms": "1"})
    shell.alter({"retention.ms": "2"}, version=1)
    assert shell.alter({"retention.ms": "1"}).code == errors.StaleCommand.code
    assert shell.alter({"retention.ms": "1"}, version=2, topic_id=b"o" * 16).code == errors.StaleCommand.code
    assert shell.state.topics[TOPIC_ID].config == {"retention.ms": "2"}


def test_metadata_tells_the_version_of_the_settings(shell: Kept) -> None:
    shell.alter({"retention.ms": "1"})
    shell.ask(Operation.METADATA, m.MetadataRequest(["t"]))
    (topic,) = shell.answer.topics
    assert (topic.config, topic.config_version) == ({"retention.ms": "1"}, 1)


# -- deleting on demand ------------------------------------------------------------------------------------------


def test_deleted_records_are_never_served_again(shell: Kept) -> None:
    shell.fill(10)
    assert shell.delete(4).log_start == 4
    assert shell.node.replicas[KEY].log.log_start == 4
    shell.fetch(3)
    (result,) = shell.answer.results
    assert (result.error, result.log_start) == (errors.OffsetOutOfRange.code, 4)
    assert shell.delete(2).log_start == 4, "again, or late, it does no harm"
    assert shell.delete(-1).log_start == 10
    assert shell.delete(11).code == errors.OffsetOutOfRange.code


def test_only_the_leader_deletes(shell: Kept) -> None:
    shell.ask(Operation.DELETE_RECORDS, m.DeleteRecordsRequest(b"x" * 16, 0, 1))
    assert shell.answer.code == errors.UnknownTopicId.code
    shell.ask(Operation.DELETE_RECORDS, m.DeleteRecordsRequest(TOPIC_ID, 9, 1))
    assert shell.answer.code == errors.UnknownTopicId.code


def test_without_room_to_write_it_down_nothing_is_deleted(shell: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.fill(10)

    def full(offset: int) -> None:
        raise StorageFull

    monkeypatch.setattr(shell.log, "delete_before", full)
    assert shell.delete(4).code == errors.StorageFull.code
    assert shell.node.replicas[KEY].log.log_start == 0


# -- quotas ------------------------------------------------------------------------------------------------------


def test_over_its_quota_a_partition_refuses_records(shell: Kept) -> None:
    shell.alter({"quota.bytes": "1000"})
    shell.fill(2)  # the second one was begun below the quota
    shell.produce(b"x")
    assert shell.answer.results[0].error == errors.QuotaExceeded.code
    assert shell.log.log_end == 2
    shell.alter({"quota.bytes": "10000"}, version=1)
    assert not shell.handlers.records._over_quota(KEY)


# -- beside serving ----------------------------------------------------------------------------------------------


def test_retention_takes_full_segments_a_few_files_at_a_time(shell: Kept, tmp_path: Path) -> None:
    shell.alter({"segment.bytes": "1024", "retention.bytes": "1500"})
    shell.fill(8)
    assert len(of_log(tmp_path)) == 8
    shell.tick()
    assert shell.log.log_start == shell.node.replicas[KEY].log.log_start == 5
    assert len(of_log(tmp_path)) == 6
    shell.tick(50)
    assert len(of_log(tmp_path)) == 6, "not before its time"
    for _ in range(3):
        shell.tick()
    assert len(of_log(tmp_path)) == 3
    counters = shell.maintenance.counters
    assert (counters.segments_removed, counters.bytes_removed > 3_000) == (5, True)


def test_an_idle_partition_ends_its_segment_and_then_its_records_go(shell: Kept, tmp_path: Path) -> None:
    shell.alter({"segment.ms": "1000", "retention.ms": "5000"})
    shell.fill(3)
    shell.tick()
    assert shell.log.segment_count == 1
    shell.tick(1_000)
    # The timestamps of its records are of 0 ms, and long over.
    assert (shell.log.log_start, shell.maintenance.counters.segments_rolled) == (3, 1)
    shell.tick(100_000)
    shell.tick()
    assert (shell.log.segment_count, shell.maintenance.counters.segments_rolled) == (1, 1)
    assert len(of_log(tmp_path)) == 1


def test_what_is_not_committed_stays(shell: Kept) -> None:
    shell.alter({"segment.bytes": "1024", "retention.bytes": "0"})
    for _ in range(5):
        shell.produce(b"v" * 600)
    shell.tick()
    assert shell.log.log_start == 0
    shell.commit()
    shell.tick()
    assert shell.log.log_start == 4


def test_what_the_core_does_not_know_to_be_durable_stays(shell: Kept) -> None:
    shell.alter({"segment.bytes": "1024", "retention.bytes": "0"})
    shell.fill(5)
    shell.node.replicas[KEY].log.durable_end = 2
    shell.tick()
    assert shell.log.log_start == 2


def test_a_damaged_log_is_reported_once(shell: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[PartitionKey] = []

    def damaged(now_ms: int) -> bool:
        raise CorruptLog("damaged")

    monkeypatch.setattr(shell.log, "roll_if_old", damaged)
    monkeypatch.setattr(shell.node, "on_lost", lost.append)
    shell.tick()
    shell.tick()
    assert lost == [KEY]


def test_a_topic_that_does_not_delete_keeps_everything(shell: Kept) -> None:
    shell.alter({"segment.bytes": "1024", "retention.bytes": "0", "cleanup.policy": "compact"})
    shell.fill(5)
    shell.tick()
    assert shell.log.log_start == 0


def test_a_full_disk_is_told_once_and_tried_again(
    shell: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shell.alter({"segment.bytes": "1024", "retention.bytes": "0"})
    shell.fill(5)
    really = shell.log.delete_before

    def full(offset: int) -> None:
        raise StorageFull("no room")

    monkeypatch.setattr(shell.log, "delete_before", full)
    shell.tick()
    shell.tick()
    assert [record.getMessage() for record in caplog.records if "no room" in record.getMessage()] == [
        f"partition {KEY}: maintenance has to wait: no room"
    ]
    monkeypatch.setattr(shell.log, "delete_before", really)
    shell.tick()
    assert shell.log.log_start == 4


# -- jobs --------------------------------------------------------------------------------------------------------


class Count(Struct):
    end: int


class Counting:
    """Plans a job for every log that has grown, and remembers what came of it."""

    def __init__(self) -> None:
        self.seen = 0
        self.finished: list[Any] = []

    def plan(self, log: PartitionLog, high_watermark: int, now_ms: int) -> Struct | None:
        return Count(high_watermark) if high_watermark > self.seen else None

    def finish(self, log: PartitionLog, job: Any, result: Any) -> None:
        if not isinstance(result, Failed):
            self.seen = job.end
        self.finished.append(result)


class Waiting:
    def __init__(self) -> None:
        self.jobs: list[tuple[Any, Callable[[Struct | None], None]]] = []

    def submit(self, job: Struct, done: Callable[[Any], None]) -> None:
        self.jobs.append((job, done))


def test_one_job_is_under_way_and_its_chore_finishes_it(tmp_path: Path) -> None:
    chore, worker = Counting(), Waiting()
    shell = Kept(tmp_path, [chore], worker)
    shell.fill(3)
    shell.tick()
    shell.tick()
    ((job, done),) = worker.jobs
    assert job == Count(3)
    done(Count(99))
    assert chore.finished == [Count(99)]
    shell.tick()
    assert len(worker.jobs) == 1, "there is nothing more to do"
    assert shell.maintenance.counters.jobs == 1


def test_a_job_that_came_to_nothing_is_planned_again(tmp_path: Path) -> None:
    chore, worker = Counting(), Waiting()
    shell = Kept(tmp_path, [chore], worker)
    shell.fill(3)
    shell.tick()
    worker.jobs.pop()[1](Failed(JobFailed.code, "it ended"))
    assert shell.maintenance.counters.jobs_failed == 1
    shell.tick()
    assert len(worker.jobs) == 1


def test_a_job_of_a_log_that_is_gone_is_dropped(tmp_path: Path) -> None:
    chore, worker = Counting(), Waiting()
    shell = Kept(tmp_path, [chore], worker)
    shell.fill(3)
    shell.tick()
    shell.ask(Operation.DELETE_TOPIC, m.DeleteTopicRequest("t", TOPIC_ID))
    shell.turn()
    worker.jobs.pop()[1](Count(1))
    assert chore.finished == []
    shell.tick()
    assert not worker.jobs


def test_nobody_is_left_waiting(shell: Kept) -> None:
    shell.fill(2)
    shell.delete(1)
    shell.alter({"retention.ms": "1"})
    assert shell.handlers.waiting == 0
    assert CLIENT not in shell.handlers._replies._by_connection
