"""What is decided about crashed brokers, how processes are told apart, and the supervisor over stand-in brokers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zmqueue import config, processes, supervisor
from zmqueue.errors import ConfigError, DataFolderInUse, PortInUse
from zmqueue.processes import BrokerFolder, Process
from zmqueue.status import BrokerStatus, ClusterStatus
from zmqueue.supervisor import GiveUp, Restart, RestartPolicy, Supervisor

# Ends on SIGTERM with 0, as a broker does; `stubborn` ignores it, `crash` and `refuse` end by themselves.
STAND_IN = """
import signal, sys, time
mode = open(sys.argv[1]).read().strip()
if mode == "crash": sys.exit("out of cheese")
if mode == "refuse": sys.exit(78)
signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "stubborn" else lambda *_: sys.exit(0))
print("up", flush=True)
while True: signal.pause()
"""


@pytest.fixture
def mode(tmp_path, monkeypatch) -> Iterator[Path]:
    """Brokers are stand-ins that behave as this file says when they start; none survives the test."""
    script, mode = tmp_path / "stand_in.py", tmp_path / "mode"
    script.write_text(STAND_IN)
    mode.write_text("good")
    started: list[int] = []
    spawn = processes.spawn

    def arguments(broker_id: int, data_dir: Path) -> list[str]:
        return [str(script), str(mode), "broker", "--id", str(broker_id), "--data-dir", str(data_dir.resolve())]

    def noted_spawn(*args, **kwargs) -> int:
        started.append(spawn(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(processes, "broker_arguments", arguments)
    monkeypatch.setattr(processes, "spawn", noted_spawn)
    yield mode
    for pid in started:
        found = processes.process(pid)
        if found is not None:
            processes.send_signal(found, signal.SIGKILL)
            processes.wait_for_exit([found], 5)
        processes.reap(pid)


@pytest.fixture
def child() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    children: list[subprocess.Popen[bytes]] = []

    def make(code: str = "import signal; print(flush=True); signal.pause()") -> subprocess.Popen[bytes]:
        children.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))
        stdout = children[-1].stdout
        assert stdout is not None
        stdout.readline()
        return children[-1]

    yield make
    for made in children:
        made.kill()
        made.wait()
        if made.stdout is not None:
            made.stdout.close()


def wait_until_up(folder: BrokerFolder) -> None:
    """A stand-in that has not set its handler yet would die of SIGTERM instead of obeying it."""
    deadline = threading.Event()
    for _ in range(500):
        if "up" in folder.log_tail():
            return
        deadline.wait(0.01)
    raise AssertionError(f"broker {folder.broker_id} did not come up: {folder.log_tail()}")


def identity(pid: int) -> Process:
    found = processes.process(pid)
    assert found is not None
    return found


# -- the policy --------------------------------------------------------------------------------------------------


def test_each_restart_comes_later_than_the_last():
    policy = RestartPolicy(crashes_max=6, delay_s_min=0.1, delay_s_max=0.5)
    delays = [policy.on_exit(1, now_s) for now_s in range(5)]
    assert delays == [Restart(0.1), Restart(0.2), Restart(0.4), Restart(0.5), Restart(0.5)]


def test_the_fifth_crash_in_a_minute_is_the_last():
    policy = RestartPolicy()
    assert all(isinstance(policy.on_exit(-9, now_s), Restart) for now_s in (0, 10, 20, 30))
    assert policy.on_exit(-9, 59) == GiveUp("it ended 5 times within 60 s")


def test_crashes_of_long_ago_do_not_count():
    policy = RestartPolicy()
    assert all(isinstance(policy.on_exit(1, now_s), Restart) for now_s in range(0, 1000, 16))
    assert policy.on_exit(1, 5000) == Restart(0.1)


def test_a_broker_that_somebody_took_care_of_starts_afresh():
    policy = RestartPolicy(crashes_max=2)
    assert isinstance(policy.on_exit(1, 0), Restart)
    policy.forget()
    assert isinstance(policy.on_exit(1, 1), Restart)


def test_a_refused_configuration_is_not_tried_again():
    assert isinstance(RestartPolicy().on_exit(78, 0), GiveUp)


def test_an_end_that_nobody_saw_counts_as_a_crash():
    assert RestartPolicy().on_exit(None, 0) == Restart(0.1)


@pytest.mark.parametrize(
    ("code", "words"),
    [(None, "ended"), (-9, "was killed by SIGKILL"), (0, "exited with code 0"), (3, "exited with code 3")],
)
def test_an_exit_is_described(code, words):
    assert supervisor.describe_exit(code) == words


# -- telling processes apart -------------------------------------------------------------------------------------


def test_a_pid_file_names_the_process_that_wrote_it(tmp_path, child):
    known = identity(child().pid)
    processes.write_pid_file(tmp_path / "pid", known)
    assert processes.read_pid_file(tmp_path / "pid") == known
    assert processes.is_running(known)


def test_a_recycled_pid_is_neither_running_nor_ever_signalled(child):
    running = child()
    known = identity(running.pid)
    for other in (known._replace(started=known.started - 1), known._replace(boot="another boot")):
        assert not processes.is_running(other)
        assert not processes.send_signal(other, signal.SIGKILL)
    assert running.poll() is None


def test_a_zombie_does_not_run(child):
    running = child()
    known = identity(running.pid)
    running.send_signal(signal.SIGKILL)
    assert processes.wait_for_exit([known], 5) == []
    assert not processes.is_running(known)  # and nobody has waited for it yet


@pytest.mark.parametrize("content", ["", "12", "x y z", "1 2 3 4"])
def test_a_damaged_pid_file_names_nobody(tmp_path, content):
    (tmp_path / "pid").write_text(content)
    assert processes.read_pid_file(tmp_path / "pid") is None


def test_waiting_returns_those_that_still_run(child):
    first, second = child(), child()
    known = [identity(first.pid), identity(second.pid)]
    first.kill()
    assert processes.wait_for_exit(known, 0.3) == known[1:]


def test_a_process_that_does_not_stop_is_killed_with_a_word(child):
    stubborn = child("import signal; signal.signal(15, signal.SIG_IGN); print(flush=True)\nwhile True: signal.pause()")
    said: list[str] = []
    processes.terminate({3: identity(stubborn.pid)}, said.append, timeout_s=0.1)
    assert stubborn.wait(5) == -signal.SIGKILL
    assert said == [f"broker 3 (pid {stubborn.pid}) did not stop within 0.1 s: killing it"]


# -- one broker --------------------------------------------------------------------------------------------------


def test_starting_twice_starts_once(tmp_path, mode):
    folder = BrokerFolder(tmp_path, 0)
    assert folder.start() == folder.start() == folder.running()


def test_a_broker_is_found_without_its_pid_file(tmp_path, mode):
    folder = BrokerFolder(tmp_path, 0)
    started = folder.start()
    wait_until_up(folder)  # before its exec, the child still has our own command line
    folder.pid_file.unlink()
    assert folder.running() == started
    assert BrokerFolder(tmp_path, 1).running() is None


def test_a_broker_runs_in_a_session_of_its_own(tmp_path, mode):
    assert os.getsid(BrokerFolder(tmp_path, 0).start().pid) != os.getsid(0)


def test_a_stopped_broker_stays_stopped_until_it_is_started(tmp_path, mode):
    folder = BrokerFolder(tmp_path, 0)
    started = folder.start()
    wait_until_up(folder)
    assert folder.stop(print) is True
    assert processes.reap(started.pid) == 0
    assert folder.is_stopped
    with pytest.raises(processes.StoppedOnPurpose):
        folder.start(on_purpose=False)
    folder.start()
    assert not folder.is_stopped
    assert folder.kill() is True
    assert folder.is_stopped
    assert folder.stop(print) is False


def test_what_up_was_given_reaches_a_broker_started_later(tmp_path, mode, monkeypatch):
    processes.write_run(tmp_path, Path("z.toml"), {"ZMQUEUE_LOG__FSYNC": "os", "ZMQUEUE_BOOTSTRAP": "x", "HOME": "y"})
    monkeypatch.setenv("ZMQUEUE_LOG__FSYNC", "always")
    monkeypatch.setenv("ZMQUEUE_RAFT__TICK_MS", "1")
    folder = BrokerFolder(tmp_path, 0)
    pid = folder.start().pid
    wait_until_up(folder)
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert [line for line in environment if line.startswith(b"ZMQUEUE_") and b"__" in line] == [
        b"ZMQUEUE_LOG__FSYNC=os"
    ]
    assert (
        Path(f"/proc/{pid}/cmdline")
        .read_bytes()
        .endswith(b"--config\0" + os.fsencode(Path("z.toml").resolve()) + b"\0")
    )


# -- the first start ---------------------------------------------------------------------------------------------


def loaded(data_dir: Path, **cluster: object) -> config.Loaded:
    flags = {
        "cluster.brokers": 2,
        "cluster.port_offset": free_offset(),
        **{f"cluster.{k}": v for k, v in cluster.items()},
    }
    return config.load(None, {}, {**flags, "cluster.data_dir": str(data_dir)})


def free_offset() -> int:
    """An offset below which nobody listens, as far as one can know."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1] % 20_000 + 1_000


class Formatted:
    def __init__(self, fail_at: int | None = None) -> None:
        self.calls: list[tuple[str, str, int]] = []
        self._fail_at = fail_at

    def __call__(self, folder: Path, cluster_id: str, broker_id: int) -> None:
        if broker_id == self._fail_at:
            raise OSError(28, "No space left on device", str(folder))
        folder.mkdir()
        self.calls.append((folder.parent.name, cluster_id, broker_id))


def test_the_first_start_makes_the_cluster_and_later_ones_keep_it(tmp_path):
    formatted = Formatted()
    asked = loaded(tmp_path)
    made, _ = supervisor.prepare(tmp_path, asked, formatted)
    assert formatted.calls == [("broker-0", made.cluster_id, 0), ("broker-1", made.cluster_id, 1)]
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    secret = config.read_secret(tmp_path)
    again, kept = supervisor.prepare(tmp_path, config.load(None, {}, {}), Formatted(fail_at=0))
    assert again == made == config.read_cluster_file(tmp_path)
    assert kept.config.cluster.port_offset == asked.config.cluster.port_offset
    assert config.read_secret(tmp_path) == secret


def test_a_first_start_that_was_cut_short_is_finished_by_the_next(tmp_path):
    asked = loaded(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        supervisor.prepare(tmp_path, asked, Formatted(fail_at=1))
    assert config.read_cluster_file(tmp_path) is None
    calls: list[tuple[str, int]] = []
    made, _ = supervisor.prepare(
        tmp_path, asked, lambda folder, cluster_id, broker_id: calls.append((cluster_id, broker_id))
    )
    assert calls == [(made.cluster_id, 0), (made.cluster_id, 1)]
    assert not list(tmp_path.glob("*.draft"))


def test_a_folder_that_lost_its_cluster_file_is_not_formatted_again(tmp_path):
    asked = loaded(tmp_path)
    supervisor.prepare(tmp_path, asked, Formatted())
    (tmp_path / "cluster.json").unlink()
    with pytest.raises(ConfigError, match=r"holds broker-0 but no cluster\.json"):
        supervisor.prepare(tmp_path, asked, Formatted())


def test_another_cluster_than_the_folder_holds_is_refused(tmp_path):
    asked = loaded(tmp_path)
    supervisor.prepare(tmp_path, asked, Formatted())
    with pytest.raises(ConfigError, match=r"--storage: cluster\.storage is memory, but .* was made with disk"):
        supervisor.prepare(tmp_path, config.load(None, {}, {"cluster.storage": "memory"}), Formatted())


def test_a_port_in_use_is_named_with_its_holder_and_nothing_is_written(tmp_path):
    asked = loaded(tmp_path)
    port = config.ports(asked.config, 1).raft
    message = rf"port {port} of broker 1 is in use by pid {os.getpid()}: "
    with socket.create_server(("127.0.0.1", port)), pytest.raises(PortInUse, match=message):
        supervisor.prepare(tmp_path, asked, Formatted())
    assert list(tmp_path.iterdir()) == []


def test_only_one_supervisor_has_the_folder(tmp_path):
    with processes.lock_supervisor(tmp_path):
        assert processes.find_supervisor(tmp_path) == identity(os.getpid())
        with pytest.raises(DataFolderInUse, match=rf"already up: another supervisor \(pid {os.getpid()}\)"):
            processes.lock_supervisor(tmp_path)
        with pytest.raises(DataFolderInUse):
            processes.check_not_up(tmp_path)
    processes.check_not_up(tmp_path)


# -- watching ----------------------------------------------------------------------------------------------------


class Watching:
    """A supervisor in a thread, and what it says."""

    def __init__(self, data_dir: Path) -> None:
        cluster = config.new_cluster_file(loaded(data_dir).config, "c1")
        self.folders = [BrokerFolder(data_dir, member.id) for member in cluster.members]
        self._said: list[str] = []
        self._news = threading.Condition()
        self.supervisor = Supervisor(data_dir, cluster, self._say)
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watching:
        self.supervisor.start_all()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.stop(7)
        self._thread.join(15)
        self.supervisor.close()

    def _run(self) -> None:
        self.code = self.supervisor.run()

    def _say(self, message: str) -> None:
        with self._news:
            self._said.append(message)
            self._news.notify_all()

    def wait_for(self, words: str, times: int = 1) -> None:
        def heard() -> bool:
            return sum(words in message for message in self._said) >= times

        with self._news:
            assert self._news.wait_for(heard, 10), f"never said {words!r}: {self._said}"

    def said(self, words: str) -> bool:
        return any(words in message for message in self._said)


def test_a_killed_broker_is_restarted_and_the_others_are_left_alone(tmp_path, mode):
    with Watching(tmp_path) as watching:
        first, second = (identity(f.start().pid) for f in watching.folders)
        processes.send_signal(first, signal.SIGKILL)
        watching.wait_for(f"broker 0 (pid {first.pid}) was killed by SIGKILL: restarting it in 0.1 s")
        watching.wait_for("broker 0 restarted, pid")
        assert watching.folders[0].running() not in (None, first)
        assert watching.folders[1].running() == second


def test_a_broker_stopped_from_another_shell_is_not_restarted_and_is_watched_again_when_started(tmp_path, mode):
    with Watching(tmp_path) as watching:
        folder = watching.folders[0]
        wait_until_up(folder)
        folder.stop(print)
        watching.wait_for("broker 0 (pid")
        assert watching.said("was stopped on purpose")
        assert folder.running() is None
        pid = folder.start().pid
        watching.wait_for(f"broker 0 was started, pid {pid}")
        processes.send_signal(identity(pid), signal.SIGKILL)
        watching.wait_for("broker 0 restarted")


def test_a_crash_loop_is_given_up_with_the_reason_and_the_log(tmp_path, mode):
    mode.write_text("crash")
    with Watching(tmp_path) as watching:
        watching.wait_for("GIVING UP broker 0: it ended 5 times within 60 s")
        watching.wait_for("    out of cheese")
        assert watching.folders[0].failure == "it ended 5 times within 60 s"
        mode.write_text("good")
        watching.folders[0].start()
        assert watching.folders[0].failure is None


def test_a_refused_configuration_is_given_up_at_once(tmp_path, mode):
    mode.write_text("refuse")
    with Watching(tmp_path) as watching:
        watching.wait_for("GIVING UP broker 0: its configuration is refused")
        assert not watching.said("restarting")


def test_the_end_of_the_supervisor_ends_its_brokers_and_tells_how(tmp_path, mode):
    with Watching(tmp_path) as watching:
        for folder in watching.folders:
            wait_until_up(folder)
    assert watching.code == 7
    assert [folder.running() for folder in watching.folders] == [None, None]
    assert all(folder.is_stopped and not folder.pid_file.exists() for folder in watching.folders)


def test_a_cluster_ends_with_the_process_that_it_was_started_for(tmp_path, mode, child):
    owner = child()
    with Watching(tmp_path) as watching:
        for folder in watching.folders:
            wait_until_up(folder)
        known = identity(owner.pid)
        watching.supervisor.call(lambda: watching.supervisor.end_with(known))
        heard = threading.Event()
        watching.supervisor.call(heard.set)
        assert heard.wait(10)
        owner.kill()
        watching.wait_for(f"pid {owner.pid} has ended")
        watching.wait_for("stopping 2 brokers")
    assert [folder.running() for folder in watching.folders] == [None, None]


def test_a_cluster_whose_owner_is_gone_already_ends_at_once(tmp_path, mode, child):
    owner = identity(child().pid)
    processes.send_signal(owner, signal.SIGKILL)
    processes.wait_for_exit([owner], 5)
    with Watching(tmp_path) as watching:
        watching.supervisor.call(lambda: watching.supervisor.end_with(owner))
        watching.wait_for("stopping 2 brokers")


def test_a_suspended_broker_hears_that_it_is_to_stop(tmp_path, mode):
    folder = BrokerFolder(tmp_path, 0)
    started = folder.start()
    wait_until_up(folder)
    processes.send_signal(started, signal.SIGSTOP)
    said: list[str] = []
    assert folder.stop(said.append)
    assert said == []
    assert processes.reap(started.pid) == 0


def test_brokers_that_already_run_are_adopted(tmp_path, mode):
    before = BrokerFolder(tmp_path, 1).start()
    with Watching(tmp_path) as watching:
        watching.wait_for(f"broker 1 runs already, pid {before.pid}")
        processes.send_signal(before, signal.SIGKILL)
        watching.wait_for("broker 1 restarted")


# -- a start in the background -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("failure", "code"), [(supervisor.REFUSED, 78), ("it ended 5 times within 60 s", 1)])
def test_a_broker_given_up_fails_the_start_with_its_own_words_and_kind(tmp_path, failure, code):
    folder = BrokerFolder(tmp_path, 0)
    folder.path.mkdir()
    folder.log_file.write_text("of an earlier run\n")
    start = supervisor._Start(tmp_path)
    with folder.log_file.open("a") as log:
        log.write("no such setting\n")
    broker = BrokerStatus(0, "dead", "127.0.0.1", {}, failure=failure)
    with pytest.raises(supervisor.StartFailed, match="broker 0 does not start: ") as caught:
        start._check_failures(ClusterStatus("c1", str(tmp_path), "disk", False, -1, None, [broker]))
    assert caught.value.exit_code == code
    assert caught.value.details == ["broker 0: no such setting"]
