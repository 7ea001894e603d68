"""Starts the brokers of a data folder, watches them, and restarts those that crash.

It holds no truth: what runs is read from the data folder, so a killed supervisor stops nothing, and the next one adopts
what it finds. Whether to restart is decided by `RestartPolicy`, which sees only exit codes and times. Commands (of the
console, of another shell) act on the data folder as well; the supervisor notices what they did.

Ready means that every broker answers over its client port that it is not fenced, and that a controller is known.
"""

from __future__ import annotations

import os
import queue
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from zmqueue.config import (
    BROKERS_MAX,
    CLUSTER_FILE,
    SECRET_FILE,
    ClusterFile,
    Loaded,
    new_cluster_file,
    read_cluster_file,
    read_secret,
    with_cluster,
)
from zmqueue.errors import ConfigError, PortInUse, ZmqueueError
from zmqueue.processes import (
    STOP_S_MAX,
    BrokerFolder,
    Process,
    StoppedOnPurpose,
    check_not_up,
    check_writable,
    find_supervisor,
    lock_supervisor,
    open_pidfd,
    port_in_use,
    process,
    read_pid_file,
    reap,
    replace_file,
    send_signal,
    spawn,
    sync_folder,
    terminate,
    wait_for_exit,
    write_pid_file,
    write_run,
)
from zmqueue.status import Asker, ClusterStatus

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_TIMEOUT = 4
EXIT_BAD_CONFIG = 78
EXIT_INTERRUPTED = 130

REFUSED = "its configuration is refused (exit code 78)"

LOOK_S = 0.25
READY_POLL_S = 0.05

Say = Callable[[str], None]


# -- when to restart ---------------------------------------------------------------------------------------------


class Restart(NamedTuple):
    delay_s: float


class GiveUp(NamedTuple):
    reason: str


class RestartPolicy:
    """A crash is answered by a restart, each one later than the last, until they come too fast to be an accident."""

    def __init__(
        self,
        *,
        crashes_max: int = 5,
        window_s: float = 60.0,
        delay_s_min: float = 0.1,
        delay_s_max: float = 5.0,
    ) -> None:
        self._crashes_max = crashes_max
        self._window_s = window_s
        self._delay_s_min = delay_s_min
        self._delay_s_max = delay_s_max
        self._crashes: deque[float] = deque()

    def on_exit(self, code: int | None, now_s: float) -> Restart | GiveUp:
        """`code` is None when the process was not our child, so that nobody told us."""
        if code == EXIT_BAD_CONFIG:
            return GiveUp(REFUSED)
        self._crashes.append(now_s)
        while self._crashes[0] <= now_s - self._window_s:
            self._crashes.popleft()
        if len(self._crashes) >= self._crashes_max:
            return GiveUp(f"it ended {len(self._crashes)} times within {self._window_s:g} s")
        return Restart(min(self._delay_s_max, self._delay_s_min * 2 ** (len(self._crashes) - 1)))

    def forget(self) -> None:
        """Somebody took care of the broker: the past does not count any more."""
        self._crashes.clear()


def describe_exit(code: int | None) -> str:
    if code is None:
        return "ended"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


# -- the first start ---------------------------------------------------------------------------------------------


class FormatFolder(Protocol):
    def __call__(self, folder: Path, cluster_id: str, broker_id: int) -> object: ...


def prepare(data_dir: Path, loaded: Loaded, format_folder: FormatFolder | None = None) -> tuple[ClusterFile, Loaded]:
    """The cluster of this folder, made now if there is none. Nothing is written while something stands against it."""
    cluster = read_cluster_file(data_dir)
    if cluster is None:
        made = new_cluster_file(loaded.config, str(uuid.uuid4()))
        check_ports(data_dir, made)
        made = _create(data_dir, made, format_folder or _format_raft_folder)
        return made, with_cluster(loaded, made, data_dir)
    loaded = with_cluster(loaded, cluster, data_dir)
    read_secret(data_dir)
    check_ports(data_dir, cluster)
    return cluster, loaded


def check_ports(data_dir: Path, cluster: ClusterFile) -> None:
    """Refuses to start over ports that others use; a broker that already runs may well use its own."""
    for member in cluster.members:
        if BrokerFolder(data_dir, member.id).running() is None and (taken := port_in_use(member)):
            port, holder = taken
            raise PortInUse(
                f"port {port} of broker {member.id} is in use by {holder}: stop that, or use another --port-offset"
            )


def _create(data_dir: Path, cluster: ClusterFile, format_folder: FormatFolder) -> ClusterFile:
    """Secret, Raft folders, and last the cluster file: its presence says that all else was finished.

    A draft of it stands there meanwhile. Raft folders with neither mean a cluster whose file was lost: formatting it
    again would let brokers vote that have forgotten what they promised.
    """
    draft = data_dir / f"{CLUSTER_FILE}.draft"
    unfinished = read_cluster_file(data_dir, draft.name)
    if unfinished is not None:
        # Folders that were formatted already bear its id.
        cluster = msgspec.structs.replace(cluster, cluster_id=unfinished.cluster_id)
    elif left_over := sorted(data_dir.glob("broker-*/raft")):
        raise ConfigError(f"{data_dir} holds {left_over[0].parent.name} but no {CLUSTER_FILE}: restore that file")
    replace_file(draft, msgspec.json.format(msgspec.json.encode(cluster), indent=2) + b"\n")
    replace_file(data_dir / SECRET_FILE, secrets.token_bytes(32), mode=0o600)
    for member in cluster.members:
        folder = BrokerFolder(data_dir, member.id).path / "raft"
        folder.parent.mkdir(exist_ok=True)
        format_folder(folder, cluster.cluster_id, member.id)
    draft.replace(data_dir / CLUSTER_FILE)
    sync_folder(data_dir)
    return cluster


def _format_raft_folder(folder: Path, cluster_id: str, broker_id: int) -> None:
    from zmqueue.broker.raft_folder import format_folder

    format_folder(folder, cluster_id, broker_id)


# -- watching ----------------------------------------------------------------------------------------------------


class _Watched:
    """One broker: it runs (`pidfd` is there), waits for its restart (`restart_at_s`), or is left alone (neither)."""

    def __init__(self, folder: BrokerFolder, policy: RestartPolicy) -> None:
        self.folder = folder
        self.policy = policy
        self.process: Process | None = None
        self.pidfd: int | None = None
        self.restart_at_s: float | None = None


class Supervisor:
    """The loop that watches. `stop` and `call` may be used from other threads and from signal handlers."""

    def __init__(self, data_dir: Path, cluster: ClusterFile, say: Say) -> None:
        self.data_dir = data_dir
        self.cluster = cluster
        self._say = say
        self._watched = {m.id: _Watched(BrokerFolder(data_dir, m.id), RestartPolicy()) for m in cluster.members}
        self._selector = selectors.DefaultSelector()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._on_wake)
        self._owner: int | None = None
        self._exit_code: int | None = None
        self._look_at_s = 0.0

    def call(self, function: Callable[[], None]) -> None:
        """Runs `function` in the loop's thread, soon."""
        self._calls.put(function)
        try:
            self._wake_in.send(b"\0")
        except BlockingIOError:
            return  # the loop has plenty of reasons to wake already

    def stop(self, exit_code: int = EXIT_OK) -> None:
        def end() -> None:
            self._exit_code = exit_code

        self.call(end)

    def end_with(self, known: Process) -> None:
        """Stop when this process ends, in whatever way: what was started for it alone must not outlive it."""
        self._owner = open_pidfd(known)
        if self._owner is None:
            self.stop()
            return

        def ended() -> None:
            self._say(f"pid {known.pid} has ended")
            self._unwatch_owner()
            self.stop()

        self._selector.register(self._owner, selectors.EVENT_READ, ended)

    def start_all(self) -> None:
        for broker_id, watched in self._watched.items():
            found = watched.folder.running()
            if found is not None:
                write_pid_file(watched.folder.pid_file, found)
                self._watch(watched, found)
                self._say(f"broker {broker_id} runs already, pid {found.pid}")
            else:
                self._watch(watched, watched.folder.start())

    def run(self) -> int:
        """Watches until `stop`, then stops the brokers. Returns the exit code."""
        while self._exit_code is None:
            now_s = time.monotonic()
            due = [w.restart_at_s for w in self._watched.values() if w.restart_at_s is not None]
            wait_s = max(0.0, min([*due, self._look_at_s]) - now_s)
            for key, _ in self._selector.select(wait_s):
                key.data()
            self._on_time(time.monotonic())
        self.stop_all()
        return self._exit_code

    def close(self) -> None:
        for watched in self._watched.values():
            self._unwatch(watched)
        self._unwatch_owner()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    # -- events ---------------------------------------------------------------------------------------------------

    def _on_wake(self) -> None:
        self._wake_out.recv(4096)
        while not self._calls.empty():
            self._calls.get()()

    def _on_time(self, now_s: float) -> None:
        for watched in self._watched.values():
            if watched.restart_at_s is not None and watched.restart_at_s <= now_s:
                self._restart(watched)
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            for watched in self._watched.values():
                if watched.pidfd is None:
                    self._look(watched)

    def _on_exit(self, watched: _Watched) -> None:
        assert watched.process is not None
        broker_id, pid = watched.folder.broker_id, watched.process.pid
        self._unwatch(watched)
        code = reap(pid)
        if watched.folder.is_stopped:
            watched.policy.forget()
            self._say(f"broker {broker_id} (pid {pid}) was stopped on purpose")
            return
        match watched.policy.on_exit(code, time.monotonic()):
            case Restart(delay_s):
                self._say(f"broker {broker_id} (pid {pid}) {describe_exit(code)}: restarting it in {delay_s:g} s")
                watched.restart_at_s = time.monotonic() + delay_s
            case GiveUp(reason):
                self._give_up(watched, reason)

    def _give_up(self, watched: _Watched, reason: str) -> None:
        broker_id = watched.folder.broker_id
        watched.folder.give_up(reason)
        self._say(f"GIVING UP broker {broker_id}: {reason}; the end of {watched.folder.log_file}:")
        for line in watched.folder.log_tail():
            self._say(f"    {line}")
        self._say(f"when it is mended: zmqueue broker start {broker_id} --data-dir {self.data_dir}")

    def _restart(self, watched: _Watched) -> None:
        watched.restart_at_s = None
        try:
            self._watch(watched, watched.folder.start(on_purpose=False))
        except StoppedOnPurpose:
            watched.policy.forget()
        except OSError as error:
            self._give_up(watched, f"it cannot be started: {error}")
        else:
            pid = watched.process.pid if watched.process else "unknown"
            self._say(f"broker {watched.folder.broker_id} restarted, pid {pid}")

    def _look(self, watched: _Watched) -> None:
        """Somebody else may have started, or stopped, what we do not watch."""
        known = read_pid_file(watched.folder.pid_file)
        if known is not None and self._watch(watched, known, gone_is_an_exit=False):
            watched.restart_at_s = None
            watched.policy.forget()
            self._say(f"broker {watched.folder.broker_id} was started, pid {known.pid}")
        elif watched.restart_at_s is not None and watched.folder.is_stopped:
            watched.restart_at_s = None

    def _watch(self, watched: _Watched, known: Process, *, gone_is_an_exit: bool = True) -> bool:
        pidfd = open_pidfd(known)
        if pidfd is None:
            if gone_is_an_exit:
                watched.process = known
                self._on_exit(watched)
            return False
        watched.process, watched.pidfd = known, pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._on_exit(watched))
        return True

    def _unwatch(self, watched: _Watched) -> None:
        if watched.pidfd is not None:
            self._selector.unregister(watched.pidfd)
            os.close(watched.pidfd)
        watched.process, watched.pidfd = None, None

    def _unwatch_owner(self) -> None:
        if self._owner is not None:
            self._selector.unregister(self._owner)
            os.close(self._owner)
        self._owner = None

    def stop_all(self) -> None:
        # Looked up anew: another shell may have started one a moment ago.
        running = {i: found for i, w in self._watched.items() if (found := w.folder.running())}
        if running:
            self._say(f"stopping {len(running)} brokers")
        for broker_id in running:
            self._watched[broker_id].folder.stopped_file.touch()  # else they would be shown as dead
        terminate(running, self._say)
        for broker_id, known in running.items():
            reap(known.pid)
            self._watched[broker_id].folder.pid_file.unlink(missing_ok=True)


# -- up ----------------------------------------------------------------------------------------------------------


def up(
    data_dir: Path,
    loaded: Loaded,
    config_file: Path | None,
    say: Say,
    *,
    on_ready: Callable[[ClusterStatus], None],
    console: Callable[[Supervisor], None] | None = None,
    owner: Process | None = None,
) -> int:
    """Runs the cluster of `data_dir` until a signal, the console, or the end of its owner ends it."""
    data_dir.mkdir(parents=True, exist_ok=True)
    with lock_supervisor(data_dir):
        cluster, _ = prepare(data_dir, loaded)
        write_run(data_dir, config_file, os.environ)
        supervisor = Supervisor(data_dir, cluster, say)
        _end_on_signals(supervisor)
        if owner is not None:
            supervisor.end_with(owner)
        try:
            supervisor.start_all()
        except OSError:
            supervisor.stop_all()  # half a cluster is worse than none
            raise
        threading.Thread(target=_announce, args=(supervisor, on_ready), name="ready", daemon=True).start()
        if console is not None:
            console(supervisor)
        try:
            return supervisor.run()
        finally:
            supervisor.close()


def _end_on_signals(supervisor: Supervisor) -> None:
    def end(number: int, _frame: object) -> None:
        supervisor.stop(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_OK)
        # Whoever asks twice does not want to wait for the clean way.
        signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


def _announce(supervisor: Supervisor, on_ready: Callable[[ClusterStatus], None]) -> None:
    with Asker(supervisor.data_dir, supervisor.cluster) as asker:
        while not (status := asker.status()).ready:
            time.sleep(READY_POLL_S)
    supervisor.call(lambda: on_ready(status))


class StartFailed(ZmqueueError):
    """The cluster did not get ready; `exit_code` says which kind of failure, `details` are lines from the logs."""

    def __init__(self, message: str, exit_code: int = EXIT_ERROR, details: list[str] | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.details = details or []


def up_detached(data_dir: Path, arguments: list[str], timeout_s: float, env: Mapping[str, str]) -> ClusterStatus:
    """Starts `zmqueue up ARGUMENTS` in the background and returns when the cluster is ready, or stops it all again."""
    data_dir.mkdir(parents=True, exist_ok=True)
    # What can be known beforehand should not have to come out of a log.
    check_not_up(data_dir)
    check_writable(data_dir)
    for stale in data_dir.glob("broker-*/failed"):
        stale.unlink()
    start = _Start(data_dir)
    child = start.spawn(arguments, env)
    try:
        return start.await_ready(child, timeout_s)
    except BaseException:
        # Also when interrupted: what was asked for did not come, so nothing of it stays.
        send_signal(child, signal.SIGTERM)
        wait_for_exit([child], STOP_S_MAX + 5)
        raise


class _Start:
    """A start in the background, seen from the foreground. Only what the logs say from now on is about it."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._log = data_dir / "supervisor.log"
        self._log_seen = self._log.stat().st_size if self._log.exists() else 0
        self._seen = [BrokerFolder(data_dir, broker_id).log_end() for broker_id in range(BROKERS_MAX)]

    def spawn(self, arguments: list[str], env: Mapping[str, str]) -> Process:
        pid = spawn([sys.executable, "-m", "zmqueue", "up", *arguments], self._log, env)
        return process(pid) or Process(pid, 0, "gone")

    def await_ready(self, child: Process, timeout_s: float) -> ClusterStatus:
        deadline_s = time.monotonic() + timeout_s
        asker: Asker | None = None
        status: ClusterStatus | None = None
        try:
            # Waiting for the supervisor's end is the pause between two looks at the brokers.
            while wait_for_exit([child], READY_POLL_S):
                if asker is None and (cluster := read_cluster_file(self._data_dir)) is not None:
                    asker = Asker(self._data_dir, cluster)
                status = asker.status() if asker is not None else None
                if status is not None and status.ready and status.supervisor_pid == child.pid:
                    return status
                self._check_failures(status)
                if time.monotonic() >= deadline_s:
                    raise self._timed_out(status, timeout_s)
        finally:
            if asker is not None:
                asker.close()
        raise self._supervisor_ended(reap(child.pid))

    def _check_failures(self, status: ClusterStatus | None) -> None:
        for broker in status.brokers if status is not None else []:
            if broker.failure is not None:
                message = f"broker {broker.id} does not start: {broker.failure}"
                code = EXIT_BAD_CONFIG if broker.failure == REFUSED else EXIT_ERROR
                raise StartFailed(message, code, self._tail(broker.id, 20))

    def _timed_out(self, status: ClusterStatus | None, timeout_s: float) -> StartFailed:
        why = status.unready() if status is not None else "the supervisor did not start"
        troubled = [broker.id for broker in status.brokers if broker.state != "ready"] if status is not None else []
        details = [line for broker_id in troubled for line in self._tail(broker_id, 3)]
        return StartFailed(f"not ready within {timeout_s:g} s: {why}", EXIT_TIMEOUT, details)

    def _supervisor_ended(self, code: int | None) -> StartFailed:
        with self._log.open("rb") as file:
            file.seek(self._log_seen)
            lines = file.read().decode(errors="replace").splitlines()
        reason = lines.pop().removeprefix("zmqueue: ") if lines else f"the supervisor {describe_exit(code)}"
        return StartFailed(reason, code if code is not None and code > 0 else EXIT_ERROR, lines[-20:])

    def _tail(self, broker_id: int, lines: int) -> list[str]:
        tail = BrokerFolder(self._data_dir, broker_id).log_tail(lines, self._seen[broker_id])
        return [f"broker {broker_id}: {line}" for line in tail]


# -- down --------------------------------------------------------------------------------------------------------


def down(data_dir: Path, cluster: ClusterFile, say: Say) -> int:
    """Stops the supervisor, which stops its brokers, and then whatever still runs. Returns how many processes ran."""
    folders = {member.id: BrokerFolder(data_dir, member.id) for member in cluster.members}
    ran = sum(folder.running() is not None for folder in folders.values())
    supervisor = find_supervisor(data_dir)
    if supervisor is not None:
        send_signal(supervisor, signal.SIGTERM)
        if wait_for_exit([supervisor], STOP_S_MAX + 5):
            say(f"the supervisor (pid {supervisor.pid}) did not stop: killing it")
            send_signal(supervisor, signal.SIGKILL)
    left = {broker_id: found for broker_id, folder in folders.items() if (found := folder.running())}
    for broker_id in left:
        folders[broker_id].stopped_file.touch()
    terminate(left, say)
    for folder in folders.values():
        folder.pid_file.unlink(missing_ok=True)
    return ran + (supervisor is not None)
