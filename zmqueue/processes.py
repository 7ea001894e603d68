"""The broker processes of one data folder, as the operating system sees them.

Everything here works from any shell and needs no supervisor: the data folder is the meeting place. Per broker it holds

    pid       the process, with its start time, so that a recycled pid is never taken for the broker
    stopped   there while the broker is stopped on purpose: nobody restarts it until somebody starts it
    failed    why the supervisor gave it up
    control   a lock, held while somebody starts or stops the broker, so that two shells cannot start it twice

Not here: when to restart (supervisor), whether a broker serves (it is asked over its port), its own lock on its log.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from zmqueue.config import ENV_PREFIX, Member
from zmqueue.errors import DataFolderInUse
from zmqueue.model import KiB

STOP_S_MAX = 10.0

_RUN_FILE = "run.json"


class Process(NamedTuple):
    """A process that cannot be confused with another: `started` is in clock ticks since the boot `boot`."""

    pid: int
    started: int
    boot: str

    @property
    def age_s(self) -> float:
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, uptime_s - self.started / os.sysconf("SC_CLK_TCK"))


def process(pid: int) -> Process | None:
    """The process that has this pid now; None if there is none, or only a zombie."""
    try:
        # The second field, the name, may hold anything, blanks and parentheses included.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    return Process(pid, int(fields[19]), _boot())


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def is_running(known: Process) -> bool:
    return process(known.pid) == known


class BrokerFolder:
    """DATA_DIR/broker-N: who runs there, and how to start and stop it."""

    def __init__(self, data_dir: Path, broker_id: int) -> None:
        self.data_dir = data_dir.resolve()
        self.broker_id = broker_id
        self.path = self.data_dir / f"broker-{broker_id}"
        self.pid_file = self.path / "pid"
        self.log_file = self.path / "broker.log"
        self.stopped_file = self.path / "stopped"
        self.failed_file = self.path / "failed"

    # -- what is --------------------------------------------------------------------------------------------------

    def running(self) -> Process | None:
        known = read_pid_file(self.pid_file)
        if known is not None and is_running(known):
            return known
        # Whoever started it may have died before it could write the file.
        return next(self._search(), None)

    def _search(self) -> Iterator[Process]:
        wanted = broker_arguments(self.broker_id, self.data_dir)
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")[1:]
            except OSError:
                continue  # it ended while we looked
            if arguments[: len(wanted)] == wanted:
                found = process(int(entry.name))
                if found is not None:
                    yield found

    @property
    def is_stopped(self) -> bool:
        return self.stopped_file.exists()

    @property
    def failure(self) -> str | None:
        try:
            return self.failed_file.read_text().strip()
        except OSError:
            return None

    def log_end(self) -> int:
        try:
            return self.log_file.stat().st_size
        except OSError:
            return 0

    def log_tail(self, lines: int = 5, since: int = 0) -> list[str]:
        """The last lines of the broker's log, of those written after position `since`."""
        try:
            with self.log_file.open("rb") as file:
                file.seek(max(since, file.seek(0, os.SEEK_END) - 16_384))
                return file.read().decode(errors="replace").splitlines()[-lines:]
        except OSError:
            return []

    # -- starting and stopping ------------------------------------------------------------------------------------

    def start(self, *, on_purpose: bool = True) -> Process:
        """Starts the broker unless it runs.

        A restart that nobody asked for (`on_purpose` false) gives way to a stop that somebody did ask for.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with self._control():
            if on_purpose:
                self.stopped_file.unlink(missing_ok=True)
                self.failed_file.unlink(missing_ok=True)
            elif self.is_stopped:
                raise StoppedOnPurpose
            found = self.running()
            if found is not None:
                write_pid_file(self.pid_file, found)
                return found
            return self._spawn()

    def _spawn(self) -> Process:
        run = read_run(self.data_dir)
        command = [sys.executable, *broker_arguments(self.broker_id, self.data_dir)]
        if run.config is not None:
            command += ["--config", run.config]
        pid = spawn(command, self.log_file, {**_without_settings(os.environ), **run.environment})
        # Gone at once: all that is left is its exit status, which waits for its parent.
        started = process(pid) or Process(pid, 0, "gone")
        write_pid_file(self.pid_file, started)
        return started

    def stop(self, say: Callable[[str], None], timeout_s: float = STOP_S_MAX) -> bool:
        """Stops the broker and marks it as stopped on purpose. False if it was not running."""
        return self._end(lambda found: terminate({self.broker_id: found}, say, timeout_s))

    def kill(self) -> bool:
        """SIGKILL, and marked as stopped on purpose. False if it was not running."""

        def end(found: Process) -> None:
            send_signal(found, signal.SIGKILL)
            wait_for_exit([found], STOP_S_MAX)

        return self._end(end)

    def _end(self, end: Callable[[Process], None]) -> bool:
        self.path.mkdir(parents=True, exist_ok=True)
        with self._control():
            # The mark comes first: a watching supervisor must see it when it sees the exit.
            self.stopped_file.touch()
            found = self.running()
            if found is not None:
                end(found)
            self.pid_file.unlink(missing_ok=True)
            return found is not None

    def give_up(self, reason: str) -> None:
        replace_file(self.failed_file, reason.encode() + b"\n")

    @contextlib.contextmanager
    def _control(self) -> Iterator[None]:
        with (self.path / "control").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class StoppedOnPurpose(Exception):
    """The broker that was about to be restarted has been stopped by somebody else in the meantime."""


def broker_arguments(broker_id: int, data_dir: Path) -> list[str]:
    return ["-m", "zmqueue.broker", "--id", str(broker_id), "--data-dir", str(data_dir.resolve())]


def spawn(command: list[str], log: Path, env: Mapping[str, str]) -> int:
    """A process in a session of its own: Ctrl-C in our terminal, and our own end, are not its end."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        command[0],
        command,
        env,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE],
    )


def reap(pid: int) -> int | None:
    """The exit code of an ended child (negative: the signal that killed it); None if it was not our child."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if ended else None


# -- signals and exits -------------------------------------------------------------------------------------------


def open_pidfd(known: Process) -> int | None:
    """A descriptor that stands for exactly this process and becomes readable when it ends; None if it has ended."""
    try:
        descriptor = os.pidfd_open(known.pid)
    except ProcessLookupError:
        return None
    if is_running(known):  # checked after opening: from here on the descriptor cannot mean another
        return descriptor
    os.close(descriptor)
    return None


def send_signal(known: Process, number: signal.Signals) -> bool:
    descriptor = open_pidfd(known)
    if descriptor is None:
        return False
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def wait_for_exit(processes: Iterable[Process], timeout_s: float) -> list[Process]:
    """Waits until all have ended; returns those that have not in time."""
    deadline = time.monotonic() + timeout_s
    waiting: dict[int, Process] = {}
    for known in processes:
        descriptor = open_pidfd(known)
        if descriptor is not None:
            waiting[descriptor] = known
    poller = select.poll()
    for descriptor in waiting:
        poller.register(descriptor, select.POLLIN)
    try:
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for descriptor, _ in poller.poll(left_s * 1000):
                poller.unregister(descriptor)
                os.close(descriptor)
                del waiting[descriptor]
        return list(waiting.values())
    finally:
        for descriptor in waiting:
            os.close(descriptor)


def terminate(brokers: Mapping[int, Process], say: Callable[[str], None], timeout_s: float = STOP_S_MAX) -> None:
    """SIGTERM to all at once, so that they stop side by side; SIGKILL to those that do not in time."""
    for known in brokers.values():
        send_signal(known, signal.SIGTERM)
        send_signal(known, signal.SIGCONT)  # one that is suspended hears the first only now
    late = wait_for_exit(brokers.values(), timeout_s)
    for broker_id, known in brokers.items():
        if known in late:
            say(f"broker {broker_id} (pid {known.pid}) did not stop within {timeout_s:g} s: killing it")
            send_signal(known, signal.SIGKILL)
    wait_for_exit(late, timeout_s)


# -- files -------------------------------------------------------------------------------------------------------


def replace_file(path: Path, content: bytes, mode: int = 0o644) -> None:
    """The file holds the old content or the new, also after a crash of the machine."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        # A failed write does not know its file, but whoever reads the message wants to.
        raise OSError(error.errno, error.strerror, str(path)) from None
    sync_folder(path.parent)


def check_writable(folder: Path) -> None:
    """An OSError that names the place if nothing can be written there, be it for rights or for room."""
    probe = folder / "probe"
    replace_file(probe, bytes(64 * KiB))
    probe.unlink()


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_pid_file(path: Path, known: Process) -> None:
    replace_file(path, f"{known.pid} {known.started} {known.boot}\n".encode())


def read_pid_file(path: Path) -> Process | None:
    """What the file says, whether or not it still runs; a damaged file says nothing."""
    try:
        pid, started, boot = path.read_text().split()
        return Process(int(pid), int(started), boot)
    except (OSError, ValueError):
        return None


class Run(msgspec.Struct, frozen=True):
    """What `up` was given and a broker started later from another shell must get as well."""

    config: str | None = None
    environment: dict[str, str] = {}


def write_run(data_dir: Path, config: Path | None, env: Mapping[str, str]) -> None:
    settings = {key: value for key, value in env.items() if _is_setting(key)}
    run = Run(None if config is None else str(config.resolve()), settings)
    replace_file(data_dir / _RUN_FILE, msgspec.json.encode(run) + b"\n")


def read_run(data_dir: Path) -> Run:
    try:
        return msgspec.json.decode((data_dir / _RUN_FILE).read_bytes(), type=Run)
    except (FileNotFoundError, msgspec.DecodeError):
        return Run()


def _is_setting(variable: str) -> bool:
    return variable.startswith(ENV_PREFIX) and "__" in variable


def _without_settings(env: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in env.items() if not _is_setting(key)}


# -- the supervisor's place --------------------------------------------------------------------------------------

_LOCK_FILE = "supervisor.lock"


def lock_supervisor(data_dir: Path) -> IO[bytes]:
    """The lock of the one supervisor of this folder, held until the returned file is closed."""
    file = _locked(data_dir)
    # Written in place: replacing the file would leave the lock on the old one.
    me = process(os.getpid())
    assert me is not None
    file.truncate(0)
    file.write(f"{me.pid} {me.started} {me.boot}\n".encode())
    file.flush()
    return file


def check_not_up(data_dir: Path) -> None:
    _locked(data_dir).close()


def _locked(data_dir: Path) -> IO[bytes]:
    path = data_dir / _LOCK_FILE
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        holder = read_pid_file(path)
        pid = f" (pid {holder.pid})" if holder else ""
        raise DataFolderInUse(f"{data_dir} is already up: another supervisor{pid} holds {path}") from None
    return file


def find_supervisor(data_dir: Path) -> Process | None:
    found = read_pid_file(data_dir / _LOCK_FILE)
    return found if found is not None and is_running(found) else None


# -- ports -------------------------------------------------------------------------------------------------------


def port_in_use(member: Member) -> tuple[int, str] | None:
    """A port of this broker that somebody else listens on, and who, as far as that is easily known."""
    for port in (member.client, member.push, member.raft, member.peer):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT are no listeners
            try:
                probe.bind((member.host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                return port, _holder_of(port)
    return None


def _holder_of(port: int) -> str:
    inodes = {
        f"socket:[{fields[9]}]"
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if (fields := line.split())[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port
    }
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if any(os.readlink(link) in inodes for link in (entry / "fd").iterdir()):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"pid {entry.name}: {command:.80}"
        except OSError:
            continue  # another user's, or gone
    return "an unknown process"
