"""A real cluster for tests: a supervisor and brokers as processes, on free ports, in a folder of their own.

Invariants: nothing of it outlives the process that started it (the supervisor watches that process, `up --with-pid`),
and nothing that one use of it did is seen by the next: `use` ends by bringing back whoever was killed, stopped or
paused, closing clients, deleting topics, and waiting until the cluster is healthy.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zmqueue.config import ENV_PREFIX, Storage, load, read_cluster_file, variable_for
from zmqueue.processes import BrokerFolder, find_supervisor, send_signal
from zmqueue.status import Asker, ClusterStatus
from zmqueue.supervisor import StartFailed, down, up_detached
from zmqueue.testing.ports import BASE_PORTS, HOST, reserved_offset

if TYPE_CHECKING:
    from zmqueue import Admin, Consumer, Producer

START_S_MAX = 60.0
HEAL_S_MAX = 60.0
CLOSE_S_MAX = 5.0
POLL_S = 0.05
LOG_LINES = 25
NAME_MAX = 80


class NotHealthy(AssertionError):
    """The cluster did not become healthy in time."""


class Cluster:
    """Brokers 0 to `brokers` - 1. Whoever makes one reserves the ports, and closes it."""

    def __init__(
        self,
        data_dir: Path,
        port_offset: int,
        *,
        brokers: int = 3,
        storage: Storage = "disk",
        config: Mapping[str, object] | None = None,
    ) -> None:
        self.data_dir = data_dir
        self.port_offset = port_offset
        self.brokers = brokers
        self.topic_prefix = "test-"
        self._storage = storage
        self._environment = _environment(config or {})
        self._folders = [BrokerFolder(data_dir, broker) for broker in range(brokers)]
        self._paused: set[int] = set()
        self._children: set[int] = set()
        self._clients = contextlib.ExitStack()
        self._asker: Asker | None = None
        self._log_seen = [0] * brokers

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"{HOST}:{BASE_PORTS[0] + self.port_offset + broker}" for broker in range(self.brokers))

    # -- the cluster as a whole -----------------------------------------------------------------------------------

    def up(self, timeout_s: float = START_S_MAX) -> None:
        """Start what does not run, and return when the cluster is ready."""
        arguments = ["--data-dir", str(self.data_dir), "--port-offset", str(self.port_offset)]
        arguments += ["--brokers", str(self.brokers), "--storage", self._storage, "--with-pid", str(os.getpid())]
        try:
            status = up_detached(self.data_dir, arguments, timeout_s, {**_without_settings(), **self._environment})
        except StartFailed as error:
            raise StartFailed("\n".join([str(error), *error.details]), error.exit_code) from None
        if status.supervisor_pid is not None:
            self._children.add(status.supervisor_pid)

    def down(self) -> None:
        """Stop the brokers and the supervisor; their folders stay."""
        for broker in list(self._paused):
            self.resume(broker)
        if self._asker is not None:
            self._asker.close()
            self._asker = None
        cluster = read_cluster_file(self.data_dir)
        if cluster is not None:
            down(self.data_dir, cluster, lambda message: None)
        self._reap()

    def close(self) -> None:
        """The end of it: also clients that nobody closed."""
        try:
            self._close_clients()
        finally:
            self.down()

    def wait_healthy(self, timeout_s: float = HEAL_S_MAX) -> None:
        """Until every broker is ready, and every partition has a leader and all its replicas in sync."""
        deadline_s = time.monotonic() + timeout_s
        while problems := self._status().problems():
            if time.monotonic() >= deadline_s:
                raise NotHealthy(f"not healthy within {timeout_s:g} s: {', '.join(problems)}")
            time.sleep(POLL_S)

    def _status(self) -> ClusterStatus:
        if self._asker is None:
            cluster = read_cluster_file(self.data_dir)
            if cluster is None:
                raise NotHealthy(f"no cluster in {self.data_dir}")
            self._asker = Asker(self.data_dir, cluster)
        return self._asker.status()

    # -- one broker -----------------------------------------------------------------------------------------------

    def kill(self, *brokers: int) -> None:
        """SIGKILL. Nobody restarts them until `start`."""
        for broker in brokers:
            self._folders[broker].kill()
            self._paused.discard(broker)
        self._reap()

    def stop(self, *brokers: int) -> None:
        """The clean way. Nobody restarts them until `start`."""
        for broker in brokers:
            self._folders[broker].stop(lambda message: None)
            self._paused.discard(broker)
        self._reap()

    def start(self, *brokers: int) -> None:
        """Returns at once: `wait_healthy` waits until they serve."""
        for broker in brokers:
            self._children.add(self._folders[broker].start().pid)

    def pause(self, *brokers: int) -> None:
        """SIGSTOP: they keep their connections and answer nobody."""
        for broker in brokers:
            self._signal(broker, signal.SIGSTOP)
            self._paused.add(broker)

    def resume(self, *brokers: int) -> None:
        for broker in brokers:
            self._paused.discard(broker)
            self._signal(broker, signal.SIGCONT)

    def leader(self, topic: str, partition: int = 0) -> int:
        """Who leads the partition; -1 while nobody does."""
        with self._new_admin() as admin:
            return admin.describe_topic(topic).partitions[partition].leader

    def _signal(self, broker: int, number: signal.Signals) -> None:
        found = self._folders[broker].running()
        if found is not None:
            send_signal(found, number)

    def _reap(self) -> None:
        """Those that we started are our children, and stay in the process table until we ask for their end."""
        self._children = {pid for pid in self._children if _is_unreaped(pid)}

    # -- what a test works with -----------------------------------------------------------------------------------

    def topic(
        self,
        name: str = "topic",
        *,
        partitions: int = 1,
        replication: int | None = None,
        config: Mapping[str, object] | None = None,
    ) -> str:
        """Make a topic of a name that no other test has, and return that name."""
        full = self.name(name)
        settings = {key: str(value) for key, value in (config or {}).items()}
        with self._new_admin() as admin:
            admin.create_topic(full, partitions, replication, settings)
        return full

    def name(self, name: str) -> str:
        """A name for a group or the like that no other test has."""
        return self.topic_prefix + name

    def producer(self, **settings: Any) -> Producer:
        from zmqueue import Producer

        made = Producer(**{"bootstrap_servers": self.bootstrap_servers, **settings})
        self._clients.callback(made.close, CLOSE_S_MAX)
        return made

    def consumer(self, *topics: str, **settings: Any) -> Consumer:
        """Reads from the beginning unless told otherwise: what a test wrote a moment ago, it wants to read."""
        from zmqueue import Consumer

        defaults = {"bootstrap_servers": self.bootstrap_servers, "auto_offset_reset": "earliest"}
        made = Consumer(*topics, **{**defaults, **settings})
        self._clients.callback(made.close)
        return made

    def admin(self, **settings: Any) -> Admin:
        made = self._new_admin(**settings)
        self._clients.callback(made.close)
        return made

    def _new_admin(self, **settings: Any) -> Admin:
        from zmqueue import Admin

        return Admin(**{"bootstrap_servers": self.bootstrap_servers, **settings})

    def _close_clients(self) -> None:
        clients, self._clients = self._clients, contextlib.ExitStack()
        clients.close()

    # -- from one test to the next --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def use(self, topic_prefix: str) -> Iterator[Cluster]:
        """The cluster for one test; afterwards it is as it was before."""
        self.topic_prefix = re.sub(r"[^a-zA-Z0-9._-]", "-", topic_prefix)[-NAME_MAX:]
        self._log_seen = [folder.log_end() for folder in self._folders]
        with self._new_admin() as admin:
            before = set(admin.list_topics())
            try:
                yield self
            finally:
                self.restore()
                self._close_clients()
                for topic in set(admin.list_topics()) - before:
                    admin.delete_topic(topic)
                self.wait_healthy()

    def restore(self) -> None:
        """Bring back the brokers that were killed, stopped or paused."""
        self.resume(*self._paused)
        if find_supervisor(self.data_dir) is None:
            self.up()
        self.start(*(folder.broker_id for folder in self._folders if folder.running() is None))
        self.wait_healthy()

    def log_ends(self) -> dict[int, list[str]]:
        """Of each broker, the last lines that it logged since this use of the cluster began."""
        return {
            folder.broker_id: folder.log_tail(LOG_LINES, seen)
            for folder, seen in zip(self._folders, self._log_seen, strict=True)
        }

    # -- the command line -----------------------------------------------------------------------------------------

    def command(
        self, *arguments: str, check: bool = True, timeout_s: float = 60, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """`zmqueue ARGUMENTS`, with this cluster's folder and brokers in its environment."""
        done = subprocess.run(
            [sys.executable, "-m", "zmqueue", *arguments],
            env={
                **_without_settings(),
                **self._environment,
                "ZMQUEUE_DATA_DIR": str(self.data_dir),
                "ZMQUEUE_BOOTSTRAP": self.bootstrap_servers,
            },
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"zmqueue {' '.join(arguments)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def json(self, *arguments: str) -> Any:
        """What the command prints, which must be one JSON document."""
        return json.loads(self.command(*arguments, "-o", "json").stdout)


@contextlib.contextmanager
def started_cluster(data_dir: Path, *, brokers: int = 3, **settings: Any) -> Iterator[Cluster]:
    with reserved_offset(brokers) as offset:
        cluster = Cluster(data_dir, offset, brokers=brokers, **settings)
        with contextlib.closing(cluster):
            cluster.up()
            yield cluster


@contextlib.contextmanager
def running_cluster(
    data_dir: Path | None = None,
    *,
    brokers: int = 3,
    storage: Storage = "disk",
    config: Mapping[str, object] | None = None,
) -> Iterator[Cluster]:
    """A cluster of its own for the `with` block. Without `data_dir` its folder goes with it."""
    with contextlib.ExitStack() as stack:
        if data_dir is None:
            data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zmqueue-"))) / "data"
        made = started_cluster(data_dir, brokers=brokers, storage=storage, config=config)
        cluster = stack.enter_context(made)
        with watched(cluster):
            yield cluster


# Those whose logs may say why the test that runs now fails.
_watched: list[Cluster] = []


@contextlib.contextmanager
def watched(cluster: Cluster) -> Iterator[None]:
    _watched.append(cluster)
    try:
        yield
    finally:
        _watched.remove(cluster)


def log_ends() -> Iterator[tuple[str, list[str]]]:
    """The ends of the logs of all clusters that are in use."""
    for number, cluster in enumerate(_watched):
        name = f"cluster {number}, " if len(_watched) > 1 else ""
        for broker, lines in cluster.log_ends().items():
            if lines:
                yield f"{name}broker {broker}", lines


def _environment(config: Mapping[str, object]) -> dict[str, str]:
    """Settings by their full names, as variables that brokers take them from; ConfigError if they would refuse."""
    variables = {variable_for(key): str(value) for key, value in config.items()}
    load(None, variables, {})
    return variables


def _without_settings() -> dict[str, str]:
    """Of our own environment nothing may shape the cluster: tests mean the same in every shell."""
    return {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)}


def _is_unreaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    except ChildProcessError:
        return False
