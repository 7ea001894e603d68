"""Commands as typed, against stand-ins of the client: what they print where, and how they end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from click.testing import CliRunner, Result

import zmqueue
from zmqueue import config
from zmqueue.cli import options
from zmqueue.cli.main import cli
from zmqueue.errors import (
    DeliveryTimeout,
    NoBrokersAvailable,
    NotEnoughReplicas,
    TopicExists,
    UnknownTopicOrPartition,
)
from zmqueue.model import ConsumerRecord, OffsetAndTimestamp, RecordMetadata, TopicPartition
from zmqueue.status import Asker


def run(*args: str, stdin: bytes | str | None = None, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(
        cli, list(args), input=stdin, env={"ZMQUEUE_DATA_DIR": None, "ZMQUEUE_BOOTSTRAP": None, **(env or {})}
    )


class Closing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.closed = True


@pytest.fixture(autouse=True)
def somebody_listens(monkeypatch, tmp_path):
    """Stand-ins have no port. And whatever ./data may hold is none of ours."""
    monkeypatch.setattr(options, "listens", lambda host, port: True)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cluster(tmp_path) -> Path:
    made = config.new_cluster_file(config.load(None, {}, {"cluster.brokers": 3}).config, "c1")
    (tmp_path / "cluster.json").write_bytes(msgspec.json.encode(made))
    return tmp_path


# -- the frame ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["completion", "csh"],
        ["group", "seek", "g"],
        ["group", "seek", "g", "--to", "yesterday"],
        ["group", "seek", "g", "--to", "end", "-p", "0"],
        ["group", "seek", "g", "--to", "end", "-p", "0", "--topic", "a", "--topic", "b"],
        ["topic", "add-partitions", "t"],
        ["topic", "add-partitions", "t", "0"],
        ["status", "--nonsense"],
        ["broker", "stop"],
        ["broker", "stop", "one"],
        ["topic", "create", "t", "-p", "0"],
        ["topic", "create", "t", "-c", "no-equals-sign"],
        ["topic", "rm", "t"],
        ["topic", "alter", "t"],
        ["topic", "alter", "t", "-c", "a=1", "--unset", "a"],
        ["topic", "delete-records", "t", "-p", "0", "--before", "5"],
        ["topic", "delete-records", "t", "--before", "5", "--yes"],
        ["topic", "delete-records", "t", "-p", "0", "--before", "-2", "--yes"],
        ["topic", "ls", "--bootstrap", "nowhere"],
        ["produce", "t", "v", "--acks", "2"],
        ["produce", "t", "v", "-H", "nocolon"],
        ["produce", "t", "v", "--key-separator", ":"],
        ["consume", "t", "-o", "yesterday"],
        ["consume", "t", "-o", "@yesterday"],
        ["consume", "t", "-f", "%z"],
        ["consume", "t", "--where", "x", "--reverse"],
        ["up", "--brokers", "many"],
    ],
)
def test_a_usage_error_is_one_line_on_stderr_and_exit_2(args):
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("zmqueue: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [["-h"], ["up", "--help"], ["broker", "-h"], ["broker", "stop", "-h"], ["consume", "-h"], ["group", "seek", "-h"]],
)
def test_every_command_explains_itself(args):
    result = run(*args)
    assert result.exit_code == 0
    assert "Usage: zmqueue" in result.stdout


def test_a_command_that_is_not_there_is_told_with_the_nearest_name():
    assert run("tpoic").stderr == "zmqueue: no command 'tpoic', the nearest is topic (see zmqueue --help)\n"


def test_version():
    assert run("version").stdout == f"zmqueue {zmqueue.__version__}\n"
    assert json.loads(run("version", "-o", "json").stdout)["zmqueue"] == zmqueue.__version__


# -- the data folder ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["status", "health", "down"])
def test_a_folder_without_a_cluster_is_not_found(tmp_path, command):
    result = run(command, "--data-dir", str(tmp_path))
    assert result.exit_code == 3
    assert result.stderr.startswith(f"zmqueue: no cluster in {tmp_path}")


@pytest.mark.parametrize(
    "args",
    [
        ["--data-dir", "DIR", "broker", "stop", "1"],
        ["broker", "--data-dir", "DIR", "stop", "1"],
        ["broker", "stop", "--data-dir", "DIR", "1"],
        ["broker", "stop", "1", "--data-dir", "DIR"],
    ],
)
def test_the_data_folder_may_be_named_anywhere(cluster, args):
    result = run(*(str(cluster) if arg == "DIR" else arg for arg in args))
    assert (result.exit_code, result.stdout) == (0, "broker 1 was not running\n")
    assert (cluster / "broker-1" / "stopped").exists()


def test_the_data_folder_may_come_from_the_environment(cluster):
    result = run("broker", "kill", "2", "-o", "json", env={"ZMQUEUE_DATA_DIR": str(cluster)})
    assert json.loads(result.stdout) == {"broker": 2, "action": "kill", "was_running": False}


def test_a_broker_that_is_not_of_the_cluster_is_not_found(cluster):
    result = run("broker", "stop", "3", "--data-dir", str(cluster))
    assert result.exit_code == 3
    assert result.stderr == "zmqueue: no broker 3 in this cluster: there are 0 to 2\n"


def test_status_of_a_cluster_that_does_not_run(cluster):
    run("broker", "stop", "1", "--data-dir", str(cluster))
    result = run("status", "--data-dir", str(cluster))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["BROKER", "STATE", "PID", "PORTS", "UPTIME", "LEADING", "REPLICAS", "RAFT"]
    assert [line.split()[:2] for line in lines[1:4]] == [["0", "dead"], ["1", "stopped"], ["2", "dead"]]
    assert "not ready: broker 0 is dead, broker 1 is stopped, broker 2 is dead" in lines[4]
    document = json.loads(run("status", "--data-dir", str(cluster), "-o", "json").stdout)
    assert [broker["state"] for broker in document["brokers"]] == ["dead", "stopped", "dead"]
    assert document["ready"] is False


def test_an_unhealthy_cluster_exits_5_and_says_why(cluster):
    result = run("health", "--data-dir", str(cluster), "--wait", "0.01", "-o", "json")
    assert result.exit_code == 5
    assert json.loads(result.stdout)["healthy"] is False
    assert result.stderr.startswith("zmqueue: unhealthy: broker 0 is dead, ")


class Answer(msgspec.Struct):
    fenced: bool = False
    epoch: int = 1
    partitions: int = 4
    leading: int = 2
    under_replicated: int = 0
    offline: int = 0
    controller: int = 1


@pytest.fixture
def answers(monkeypatch, cluster) -> dict[int, Answer]:
    """Every broker seems to run (it is this process) and answers what is here."""
    import os

    from zmqueue import processes

    given = {broker_id: Answer() for broker_id in range(3)}
    monkeypatch.setattr(Asker, "ask", lambda self, member: given.get(member.id))
    monkeypatch.setattr(processes.BrokerFolder, "running", lambda self: processes.process(os.getpid()))
    return given


def test_a_healthy_cluster_exits_0(cluster, answers):
    result = run("health", "--data-dir", str(cluster))
    assert (result.exit_code, result.stdout) == (0, "healthy\n")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (Answer(fenced=True), "broker 0 is fenced"),
        (Answer(under_replicated=2), "partitions short of in-sync replicas: 2"),
        (Answer(offline=1), "partitions without a leader: 1"),
        (None, "broker 0 is s"),  # starting or silent, by the age of this process
    ],
)
def test_what_makes_a_cluster_unhealthy(cluster, answers, answer, problem):
    if answer is None:
        del answers[0]
    else:
        answers[0] = answer
    result = run("health", "--data-dir", str(cluster))
    assert result.exit_code == 5
    assert problem in result.stderr


def test_status_marks_the_controller(cluster, answers):
    document = json.loads(run("status", "--data-dir", str(cluster), "-o", "json").stdout)
    assert document["ready"] is True
    assert [broker["controller"] for broker in document["brokers"]] == [False, True, False]
    assert [
        broker["id"] for broker in json.loads(run("broker", "list", "--data-dir", str(cluster), "-o", "json").stdout)
    ] == [0, 1, 2]


# -- up, before anything is started ------------------------------------------------------------------------------


def test_a_wrong_setting_ends_up_with_78_and_writes_nothing(tmp_path):
    file = tmp_path / "z.toml"
    file.write_text("[log]\nfsynk = 'os'\n")
    result = run("up", "--data-dir", str(tmp_path / "data"), "--config", str(file))
    assert result.exit_code == 78
    assert result.stderr == f"zmqueue: {file}:log.fsynk: unknown setting, the nearest is log.fsync\n"
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_another_number_of_brokers_than_before_ends_up_with_78(cluster, detach):
    result = run("up", "--data-dir", str(cluster), "--brokers", "5", *detach)
    assert result.exit_code == 78
    assert result.stderr == (
        f"zmqueue: --brokers: cluster.brokers is 5, but the cluster in {cluster} was made with 3\n"
    )


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_up_twice_is_one_line_and_exit_1(cluster, detach):
    from zmqueue.processes import lock_supervisor

    with lock_supervisor(cluster):
        result = run("up", "--data-dir", str(cluster), *detach)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"zmqueue: {cluster} is already up: another supervisor (pid ")
    assert result.stderr.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    result = run("up", "--data-dir", str(tmp_path / "file" / "data"))
    assert result.exit_code == 1
    assert result.stderr == f"zmqueue: {tmp_path / 'file' / 'data'}: Not a directory\n"


# -- config ------------------------------------------------------------------------------------------------------


def test_config_show_tells_where_values_come_from(cluster):
    args = ["config", "show", "--origin", "--data-dir", str(cluster)]
    result = run(*args, "-o", "json", env={"ZMQUEUE_LOG__FSYNC": "os"})
    shown = json.loads(result.stdout)
    assert shown["log"]["fsync"] == {"value": "os", "origin": "ZMQUEUE_LOG__FSYNC"}
    assert shown["cluster"]["brokers"] == {"value": 3, "origin": str(cluster / "cluster.json")}
    assert 'fsync = "always"                        # default' in run(*args).stdout


def test_config_show_prints_a_file_that_can_be_loaded(tmp_path):
    file = tmp_path / "z.toml"
    file.write_text(run("config", "show", "--data-dir", "./data").stdout)
    assert config.load(file, {}, {}).config == config.Config()


# -- topics ------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    partition: int
    leader: int = 1
    leader_epoch: int = 3
    replicas: list[int] = [1, 2]
    isr: list[int] = [1]
    elr: list[int] = []
    log_start: int = 0
    high_watermark: int = 7
    log_end: int | None = None


class Copy(NamedTuple):
    partition: int
    broker: int
    log_end: int
    last_epoch: int


class Topic(NamedTuple):
    name: str
    topic_id: bytes = b"\x01" * 16
    replication_factor: int = 2
    config: dict[str, str] = {"retention.ms": "5"}
    partitions: list[Part] = [Part(0), Part(1, leader=-1, high_watermark=-1)]


@pytest.fixture
def admin(monkeypatch) -> Any:
    class Admin(Closing):
        calls: list[Any] = []
        error: Exception | None = None

        def __init__(self, **settings: Any) -> None:
            self.calls.append(settings)

        def _call(self, *call: Any) -> None:
            self.calls.append(call)
            if self.error is not None:
                raise self.error

        def create_topic(self, *args: Any, **kwargs: Any) -> None:
            self._call("create", *args, kwargs)

        def delete_topic(self, name: str) -> None:
            self._call("delete", name)

        def list_topics(self, *, internal: bool = False) -> list[str]:
            self._call("list")
            return ["b", "a", "topic-of-some-length"]

        def describe_topic(self, name: str) -> Topic:
            self._call("describe", name)
            if name.startswith("topic-of-som-"):
                raise UnknownTopicOrPartition(f"no topic {name!r}")
            return Topic(name)

        def create_partitions(self, name: str, total: int) -> Topic:
            self._call("add-partitions", name, total)
            return Topic(name, partitions=[Part(number) for number in range(total)])

        def describe_replicas(self, name: str) -> list[Copy]:
            return [Copy(0, 1, 9, 3), Copy(1, 1, 7, 3), Copy(1, 2, 5, 4)]

        def alter_topic_config(self, name: str, changes: dict[str, str | None]) -> dict[str, str]:
            self._call("alter", name, changes)
            return {key: value for key, value in changes.items() if value is not None}

        def delete_records(self, before: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
            self._call("delete-records", before)
            return {partition: max(offset, 7) for partition, offset in before.items()}

        def elect_unclean(self, name: str, partition: int, broker: int) -> None:
            self._call("elect", name, partition, broker)

    Admin.calls = []
    monkeypatch.setattr(zmqueue, "Admin", Admin, raising=False)
    return Admin


def test_topic_create_passes_everything_on(admin):
    result = run("topic", "create", "t", "-p", "3", "-r", "2", "-c", "a=1", "-c", "b=x=y", "--bootstrap", "127.0.0.1:1")
    assert (result.exit_code, result.stdout) == (0, "created topic t\n")
    settings = {"num_partitions": 3, "replication_factor": 2, "config": {"a": "1", "b": "x=y"}}
    assert admin.calls == [{"bootstrap_servers": "127.0.0.1:1"}, ("create", "t", settings)]


def test_the_bootstrap_may_come_from_the_environment(admin):
    run("topic", "ls", env={"ZMQUEUE_BOOTSTRAP": "127.0.0.1:5,127.0.0.1:6"})
    assert admin.calls[0] == {"bootstrap_servers": "127.0.0.1:5,127.0.0.1:6"}


def test_the_fellows_of_the_default_broker_are_asked_as_well(admin, cluster):
    run("--data-dir", str(cluster), "topic", "ls")
    assert admin.calls[0] == {"bootstrap_servers": "127.0.0.1:9092,127.0.0.1:9093,127.0.0.1:9094"}


def test_nobody_there_is_told_soon(admin, monkeypatch):
    monkeypatch.setattr(options, "listens", lambda host, port: False)
    monkeypatch.setattr(options, "REACHABLE_S_MAX", 0)
    result = run("topic", "ls")
    assert result.exit_code == 1
    assert result.stderr.startswith("zmqueue: no broker listens at 127.0.0.1:9092: is the cluster up?")
    assert admin.calls == []


def test_topic_ls(admin):
    assert run("topic", "ls").stdout == "a\nb\ntopic-of-some-length\n"
    assert json.loads(run("topic", "ls", "-o", "json").stdout) == ["a", "b", "topic-of-some-length"]
    assert admin.calls[0] == {"bootstrap_servers": "127.0.0.1:9092"}


def test_topic_describe(admin):
    lines = run("topic", "describe", "t").stdout.splitlines()
    assert lines[0] == "t: 2 partitions, replication factor 2, retention.ms=5"
    assert lines[2].split() == ["0", "1", "3", "1,2", "1", "0", "7"]
    assert lines[3].split() == ["1", "none", "3", "1,2", "1", "0", "-"]
    document = json.loads(run("topic", "describe", "t", "-o", "json").stdout)
    assert document["topic_id"] == "01" * 16
    assert document["partitions"][1]["high_watermark"] is None


def test_topic_recover_shows_what_would_lead_and_changes_nothing(admin):
    result = run("topic", "recover", "t")
    assert result.exit_code == 5
    assert result.stdout.splitlines()[1].split() == ["1", "1", "1", "(7,", "3)", "2", "(5,", "4)", "2"]
    assert admin.calls[-1] == ("describe", "t")


def test_topic_recover_lets_the_copy_of_the_latest_epoch_lead_where_nobody_does(admin):
    result = run("topic", "recover", "t", "--accept-data-loss", "-o", "json")
    assert result.exit_code == 0
    assert [row["chosen"] for row in json.loads(result.stdout)] == [2]
    assert admin.calls[-1] == ("elect", "t", 1, 2)


def test_topic_rm_needs_a_yes(admin):
    assert run("topic", "rm", "t").exit_code == 2
    assert admin.calls == []
    assert run("topic", "rm", "t", "--yes").stdout == "deleted topic t\n"


def test_topic_alter_sets_and_takes_back(admin):
    result = run("topic", "alter", "t", "-c", "retention.ms=5", "-c", "quota.bytes=9", "--unset", "segment.ms")
    assert (result.exit_code, result.stdout) == (0, "t: quota.bytes=9, retention.ms=5\n")
    assert admin.calls[-1] == ("alter", "t", {"retention.ms": "5", "quota.bytes": "9", "segment.ms": None})
    assert run("topic", "alter", "t", "--unset", "segment.ms").stdout == "t: all settings at their defaults\n"
    assert json.loads(run("topic", "alter", "t", "-c", "a=1", "-o", "json").stdout)["config"] == {"a": "1"}


def test_topic_add_partitions_warns_that_keys_move(admin):
    result = run("topic", "add-partitions", "t", "6")
    assert (result.exit_code, result.stdout) == (0, "t has 6 partitions\n")
    assert "keys map to other partitions" in result.stderr
    assert admin.calls[-1] == ("add-partitions", "t", 6)
    document = json.loads(run("topic", "add-partitions", "t", "6", "-o", "json").stdout)
    assert document == {"name": "t", "action": "add-partitions", "before": 2, "partitions": 6}


def test_a_topic_that_is_not_there_is_told_with_the_nearest_name(admin):
    result = run("topic", "describe", "topic-of-som-lenght")
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == "zmqueue: no topic 'topic-of-som-lenght', the nearest is topic-of-some-length\n"


def test_topic_delete_records_says_where_the_partition_begins_then(admin):
    result = run("topic", "delete-records", "t", "-p", "3", "--before", "50", "--yes")
    assert (result.exit_code, result.stdout) == (0, "t-3 begins at offset 50\n")
    assert admin.calls[-1] == ("delete-records", {TopicPartition("t", 3): 50})
    document = json.loads(
        run("topic", "delete-records", "t", "-p", "3", "--before", "-1", "--yes", "-o", "json").stdout
    )
    assert document == {"name": "t", "action": "delete-records", "partition": 3, "log_start": 7}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnknownTopicOrPartition("no topic 't'"), 3),
        (TopicExists("topic 't' exists"), 1),
        (NoBrokersAvailable("none of 127.0.0.1:9092 answers"), 1),
        (DeliveryTimeout("too late"), 4),
        (PermissionError(13, "Permission denied", "/x"), 1),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(32, "Broken pipe"), 0),
    ],
)
def test_errors_become_one_line_and_an_exit_code(admin, error, code):
    admin.error = error
    result = run("topic", "describe", "t")
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.count("\n") == (1 if code else 0)


def test_an_error_is_a_json_document_too_where_json_was_asked_for(admin):
    admin.error = UnknownTopicOrPartition("no topic 't'")
    result = run("topic", "describe", "t", "-o", "json")
    assert result.exit_code == 3
    name = "UNKNOWN_TOPIC_OR_PARTITION"
    assert json.loads(result.stdout) == {"error": {"name": name, "message": "no topic 't'", "exit_code": 3}}


# -- produce -----------------------------------------------------------------------------------------------------


@pytest.fixture
def producer(monkeypatch) -> Any:
    class Future:
        def __init__(self, outcome: Any) -> None:
            self._outcome = outcome

        def get(self, timeout: float | None = None) -> Any:
            if isinstance(self._outcome, Exception):
                raise self._outcome
            return self._outcome

    class Producer(Closing):
        settings: dict[str, Any] = {}
        sent: list[dict[str, Any]] = []
        fail_at = -1

        def __init__(self, **settings: Any) -> None:
            Producer.settings = settings

        def partitions_for(self, topic: str, timeout: float) -> set[int]:
            if topic == "nosuch":
                raise UnknownTopicOrPartition(f"no topic {topic!r}")
            return {4}

        def send(self, topic: str, **record: Any) -> Future:
            self.sent.append(record)
            count = len(self.sent)
            if count == self.fail_at:
                return Future(NotEnoughReplicas("one replica is not enough"))
            return Future(RecordMetadata(topic, 4, 99 + count, 5))

        def flush(self, timeout: float | None = None) -> None:
            pass

    Producer.sent = []
    monkeypatch.setattr(zmqueue, "Producer", Producer, raising=False)
    return Producer


def sent(producer: Any) -> list[tuple[bytes | None, bytes]]:
    return [(record["key"], record["value"]) for record in producer.sent]


def test_produce_takes_values_from_the_line(producer):
    result = run("produce", "t", "a", "b", "-k", "key", "-H", "h:x:y", "-p", "4", "--acks", "1", "-z", "lz4")
    assert (result.exit_code, result.stdout) == (0, "4 100\n4 101\n")
    assert sent(producer) == [(b"key", b"a"), (b"key", b"b")]
    assert producer.sent[0]["headers"] == [("h", b"x:y")]
    assert producer.sent[0]["partition"] == 4
    assert (producer.settings["acks"], producer.settings["compression_type"]) == (1, "lz4")


def test_produce_takes_one_record_per_line_of_stdin_byte_for_byte(producer):
    result = run("produce", "t", stdin=b"\xff\x00\n\nlast without newline")
    assert result.stdout == "4 100\n4 101\n4 102\n"
    assert sent(producer) == [(None, b"\xff\x00"), (None, b""), (None, b"last without newline")]


def test_produce_to_no_topic_is_not_found_before_anything_is_read(producer, admin):
    result = run("produce", "nosuch", stdin=b"v\n")
    assert result.exit_code == 3
    assert not producer.sent


def test_produce_splits_lines_into_key_and_value(producer):
    run("produce", "t", "--key-separator", ": ", stdin=b"k: v: w\n: empty key\n")
    assert sent(producer) == [(b"k", b"v: w"), (b"", b"empty key")]


def test_a_line_without_its_separator_stops_produce_after_what_came_before(producer):
    result = run("produce", "t", "--key-separator", ":", stdin=b"k:v\noops\n")
    assert (result.exit_code, result.stdout) == (1, "4 100\n")
    assert result.stderr == "zmqueue: line 2 has no key separator ':'\n"


def test_a_record_that_fails_is_told_and_fails_the_command(producer):
    producer.fail_at = 2
    result = run("produce", "t", "a", "b", "c")
    assert result.exit_code == 1
    assert result.stdout == "4 100\n"
    assert result.stderr == "zmqueue: one replica is not enough\n"


def test_produce_as_json_is_one_document(producer):
    document = json.loads(run("produce", "t", "a", "b", "-o", "json").stdout)
    assert document["topic"] == "t"
    assert document["records"][1] == {"partition": 4, "offset": 101, "timestamp": 5}
    assert json.loads(run("produce", "t", "-o", "json", stdin=b"").stdout) == {"topic": "t", "records": []}


def test_produce_as_json_is_a_valid_document_when_it_fails(producer):
    producer.fail_at = 2
    result = run("produce", "t", "a", "b", "-o", "json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert [record["offset"] for record in document["records"]] == [100]
    assert document["error"]["name"] == "NOT_ENOUGH_REPLICAS"


def test_produce_as_json_tells_of_an_input_that_was_refused(producer):
    result = run("produce", "t", "--key-separator", ":", "-o", "json", stdin=b"k:v\noops\n")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert len(document["records"]) == 1
    assert document["error"]["message"] == "line 2 has no key separator ':'"


def test_produce_without_a_broker_is_an_error_document(monkeypatch):
    def refuse(**_: Any) -> None:
        raise NoBrokersAvailable("nobody")

    monkeypatch.setattr(zmqueue, "Producer", refuse, raising=False)
    result = run("produce", "t", "v", "-o", "json")
    assert (result.exit_code, json.loads(result.stdout)["error"]["message"]) == (1, "nobody")


def test_a_topic_name_that_is_not_allowed_is_refused_before_anything_is_asked(producer):
    result = run("produce", "a/b", "v")
    assert result.exit_code == 1
    assert "is not allowed" in result.stderr


# -- consume -----------------------------------------------------------------------------------------------------


class Records(Closing):
    """A consumer over partitions that hold offsets 2 to 4."""

    def __init__(self, **_: Any) -> None:
        self.positions: dict[TopicPartition, int] = {}

    def topics(self) -> set[str]:
        return {"t"}

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return {0, 1} if topic == "t" else None

    def assign(self, partitions: list[TopicPartition]) -> None:
        self.positions = dict.fromkeys(partitions, 0)

    def beginning_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, 2)

    def end_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, 5)

    def offsets_for_times(self, times: dict[TopicPartition, int]) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        return {tp: OffsetAndTimestamp(max(2, ms // 10), ms) if ms <= 40 else None for tp, ms in times.items()}

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self.positions[partition] = offset

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        self.positions |= dict.fromkeys(partitions, 2)

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        self.positions |= dict.fromkeys(partitions, 5)

    def position(self, partition: TopicPartition) -> int:
        return self.positions[partition]

    def record(self, tp: TopicPartition, offset: int) -> ConsumerRecord:
        value = b"v%d.%d" % (tp.partition, offset)
        return ConsumerRecord(*tp, offset, offset * 10, 0, b"\xff", value, [("h", b"1")])

    def find(self, topic, value, partitions, limit, offsets) -> list[ConsumerRecord]:
        """Even offsets have the value `even`."""
        (tp,) = [TopicPartition(topic, number) for number in partitions]
        matching = [o for o in range(max(2, offsets[tp]), 5) if value == b"even" and o % 2 == 0]
        return [self.record(tp, offset) for offset in matching[:limit]]

    def read_backward(self, tp: TopicPartition, before: int | None, count: int) -> list[ConsumerRecord]:
        end = 5 if before is None else before
        return [self.record(tp, offset) for offset in range(end - 1, 1, -1)][:count]

    def poll(self, timeout_ms: int = 0, max_records: int | None = None) -> dict[TopicPartition, list[ConsumerRecord]]:
        for tp, offset in self.positions.items():
            if offset < 5:
                self.positions[tp] += 1
                return {tp: [self.record(tp, offset)]}
        raise KeyboardInterrupt


@pytest.fixture
def consumer(monkeypatch) -> None:
    monkeypatch.setattr(zmqueue, "Consumer", Records, raising=False)


@pytest.mark.parametrize(
    ("where", "first"),
    [
        ("start", 2),
        ("3", 3),
        ("-1", 4),
        ("-100", 2),
        ("@30", 3),
        ("@41", 5),
        ("end", 5),
        ("@1970-01-01T00:00:00.040Z", 4),
    ],
)
def test_consume_begins_where_it_is_told(consumer, where, first):
    result = run("consume", "t", "-o", where, "-p", "0", "-e")
    assert result.exit_code == 0
    assert result.stdout.split() == [f"v0.{offset}" for offset in range(first, 5)]


def test_consume_reads_every_partition_to_its_end(consumer):
    assert len(run("consume", "t", "-o", "start", "-e").stdout.split()) == 6


def test_consume_stops_after_a_count(consumer):
    assert run("consume", "t", "-o", "start", "-n", "4").stdout == "v0.2\nv0.3\nv0.4\nv1.2\n"


def test_consume_goes_on_until_interrupted(consumer):
    result = run("consume", "t", "-o", "4")
    assert (result.exit_code, result.stdout) == (130, "v0.4\nv1.4\n")


def test_consume_in_a_format(consumer):
    result = run("consume", "t", "-o", "4", "-n", "1", "-f", r"%t/%p/%o %T %k=%v [%h] 100%%\t\x41\\\n")
    assert result.stdout_bytes == b"t/0/4 40 \xff=v0.4 [h=1] 100%\tA\\\n"


def test_consume_as_json_is_an_object_a_line(consumer):
    lines = run("consume", "t", "-o", "3", "-n", "2", "-f", "json").stdout.splitlines()
    assert json.loads(lines[0]) == {
        "topic": "t",
        "partition": 0,
        "offset": 3,
        "timestamp": 30,
        "key": {"base64": "/w=="},
        "value": "v0.3",
        "headers": [["h", "1"]],
    }
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("args", "printed"),
    [
        (["--where", "even"], "v0.2 v0.4 v1.2 v1.4"),
        (["--where", "even", "-n", "3"], "v0.2 v0.4 v1.2"),
        (["--where", "even", "-o", "3"], "v0.4 v1.4"),
        (["--where", "even", "-o", "-1", "-p", "1"], "v1.4"),
        (["--where", "even", "-o", "end"], ""),
        (["--where", "odd"], ""),
        (["--reverse"], "v0.4 v1.4 v0.3 v1.3 v0.2 v1.2"),
        (["--reverse", "-n", "3"], "v0.4 v1.4 v0.3"),
        (["--reverse", "-o", "4", "-p", "0"], "v0.3 v0.2"),
        (["--reverse", "-o", "@30", "-p", "0"], "v0.2"),
        (["--reverse", "-o", "@99", "-p", "0", "-n", "1"], "v0.4"),
        (["--reverse", "-o", "start"], ""),
    ],
)
def test_consume_by_value_or_backwards(consumer, args, printed):
    result = run("consume", "t", *args)
    assert (result.exit_code, result.stdout.split()) == (0, printed.split())


@pytest.mark.parametrize("args", [["nothing"], ["t", "-p", "2"]])
def test_consume_of_what_is_not_there_is_not_found(consumer, args):
    assert run("consume", *args).exit_code == 3
