"""Brokers to break: real processes on free ports in a folder of their own, each with hooks of its own.

    ROOT/node-N/cluster.json, secret    what broker N knows of the cluster: behind a proxy, each knows other ports
    ROOT/node-N/broker-N/               its data folder
    ROOT/hooks-N/ledger, delay, boot-id what it has synced; how long a sync takes; the boot that it believes in
    ROOT/broker-N.log                   what it said

There is no supervisor: whoever kills a broker starts it again. A broker that ends by itself is noted in `crashes`, and
started again by `revive`. Processes are children of this one and die with it, also when it is killed (`setpriv
--pdeathsig`); for that, brokers must be started from the main thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from chaos.proxy import Proxy, Route
from zmqueue import Admin
from zmqueue.client.admin import TopicDescription
from zmqueue.config import CLUSTER_FILE, ENV_PREFIX, SECRET_FILE, ClusterFile, load, variable_for
from zmqueue.errors import ZmqueueError
from zmqueue.log.files import DELAY_VARIABLE, LEDGER_VARIABLE
from zmqueue.log.session import BOOT_ID_VARIABLE
from zmqueue.supervisor import prepare

HOST = "127.0.0.1"
BASE_PORTS = (9092, 9192, 9292, 9392, 9492)
# Below the range from which the kernel takes ports for outgoing connections.
OFFSETS = range(1_000, 22_000, 10)
EXIT_S_MAX = 15.0
POLL_S = 0.1

T = TypeVar("T")


class NotHealed(Exception):
    """The cluster did not become whole in time."""


@contextlib.contextmanager
def reserved_offset(brokers: int) -> Iterator[int]:
    """A port offset whose ports are free, held against other runs on this machine."""
    folder = Path(tempfile.gettempdir()) / "zmqueue-test-ports"
    folder.mkdir(exist_ok=True)
    for offset in random.SystemRandom().sample(OFFSETS, len(OFFSETS)):
        with (folder / str(offset)).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if all(_is_free(base + offset + i) for base in BASE_PORTS for i in range(brokers)):
                yield offset
                return
    raise NotHealed("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _free_ports(count: int) -> list[int]:
    """Ports that the kernel gives out; all are held open until all are known."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((HOST, 0))
        return [probe.getsockname()[1] for probe in probes]


class Cluster:
    def __init__(
        self, root: Path, offset: int, brokers: int, settings: dict[str, str], *, proxied: bool, tmpfs_mib: int = 0
    ) -> None:
        self.root = root
        self.brokers = brokers
        self.proxy: Proxy | None = None
        self.crashes: list[str] = []
        self.paused: set[int] = set()
        self._settings = settings
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._mounted: list[Path] = []
        self._admin: Admin | None = None
        members = self._create(offset, tmpfs_mib)
        self.bootstrap = ",".join(f"{HOST}:{member.client}" for member in members.members)
        if proxied:
            self.proxy = Proxy(HOST, self._put_proxy_between(members))
            self.proxy.start()

    # -- making ----------------------------------------------------------------------------------------------------

    def node(self, broker: int) -> Path:
        return self.root / f"node-{broker}"

    def folder(self, broker: int) -> Path:
        return self.node(broker) / f"broker-{broker}"

    def hooks(self, broker: int) -> Path:
        """Apart from the data: a full disk must not keep the harness from writing."""
        return self.root / f"hooks-{broker}"

    def change_boot_id(self, broker: int) -> None:
        (self.hooks(broker) / "boot-id").write_text(f"{uuid.uuid4()}\n")

    def _create(self, offset: int, tmpfs_mib: int) -> ClusterFile:
        made = self.root / "made"
        made.mkdir(parents=True)
        flags = {"cluster.brokers": self.brokers, "cluster.port_offset": offset, "cluster.data_dir": str(made)}
        cluster, _ = prepare(made, load(None, {}, flags))
        for broker in range(self.brokers):
            node = self.node(broker)
            node.mkdir()
            if tmpfs_mib:
                self._mount(node, tmpfs_mib)
            for name in (CLUSTER_FILE, SECRET_FILE):
                shutil.copy2(made / name, node / name)
            shutil.copytree(made / f"broker-{broker}", self.folder(broker))
            self.hooks(broker).mkdir()
            self.change_boot_id(broker)
        shutil.rmtree(made)
        return cluster

    def _mount(self, folder: Path, size_mib: int) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(folder)], check=True)
        self._mounted.append(folder)

    def _put_proxy_between(self, cluster: ClusterFile) -> list[Route]:
        routes = []
        ports = iter(_free_ports(3 * self.brokers * (self.brokers - 1)))
        for source in range(self.brokers):
            members = []
            for member in cluster.members:
                seen = member
                if member.id != source:
                    push, raft, peer = next(ports), next(ports), next(ports)
                    seen = msgspec.structs.replace(member, push=push, raft=raft, peer=peer)
                    routes += [
                        Route(source, member.id, push, member.push),
                        Route(source, member.id, raft, member.raft),
                        Route(source, member.id, peer, member.peer),
                    ]
                members.append(seen)
            view = msgspec.structs.replace(cluster, members=members)
            (self.node(source) / CLUSTER_FILE).write_bytes(msgspec.json.encode(view))
        return routes

    # -- processes -------------------------------------------------------------------------------------------------

    def start(self, broker: int) -> None:
        if self.is_running(broker):
            return
        node, hooks = self.node(broker), self.hooks(broker)
        env = {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)}
        env |= {variable_for(key): value for key, value in self._settings.items()}
        env[LEDGER_VARIABLE] = str(hooks / "ledger")
        env[DELAY_VARIABLE] = str(hooks / "delay")
        env[BOOT_ID_VARIABLE] = str(hooks / "boot-id")
        env["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
        command = [sys.executable, "-m", "zmqueue.broker", "--id", str(broker), "--data-dir", str(node)]
        if tied := shutil.which("setpriv"):
            command = [tied, "--pdeathsig", "KILL", *command]
        with (self.root / f"broker-{broker}.log").open("ab") as log:
            self._children[broker] = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def start_all(self) -> None:
        for broker in range(self.brokers):
            self.start(broker)

    def is_running(self, broker: int) -> bool:
        child = self._children.get(broker)
        return child is not None and child.poll() is None

    def running(self) -> list[int]:
        return [broker for broker in range(self.brokers) if self.is_running(broker) and broker not in self.paused]

    def kill(self, *brokers: int) -> None:
        """SIGKILL to all of them, then their ends are waited for."""
        self._end(brokers, signal.SIGKILL)

    def stop(self, *brokers: int) -> None:
        self._end(brokers, signal.SIGTERM)

    def _end(self, brokers: tuple[int, ...], number: signal.Signals) -> None:
        ending = {broker: child for broker in brokers if (child := self._children.pop(broker, None)) is not None}
        for broker, child in ending.items():
            if child.poll() is not None:
                self._crashed(broker, child)
            else:
                child.send_signal(number)
            self.paused.discard(broker)
        for broker, child in ending.items():
            try:
                child.wait(EXIT_S_MAX)
            except subprocess.TimeoutExpired:
                self.crashes.append(f"broker {broker} did not stop within {EXIT_S_MAX:g} s")
                child.kill()
                child.wait()
            if number == signal.SIGTERM and child.returncode not in (0, -signal.SIGKILL):
                self._crashed(broker, child)

    def _crashed(self, broker: int, child: subprocess.Popen[bytes]) -> None:
        log = (self.root / f"broker-{broker}.log").read_text(errors="replace").splitlines()
        self.crashes.append(f"broker {broker} ended with {child.returncode}: {log[-1] if log else ''}")

    def revive(self) -> None:
        """Start what ended by itself, as a supervisor would."""
        for broker, child in list(self._children.items()):
            if child.poll() is not None:
                self._crashed(broker, child)
                self.start(broker)

    def pause(self, broker: int) -> None:
        self._children[broker].send_signal(signal.SIGSTOP)
        self.paused.add(broker)

    def resume(self, broker: int) -> None:
        if broker in self.paused:
            self._children[broker].send_signal(signal.SIGCONT)
            self.paused.discard(broker)

    def delay_fsync(self, broker: int, delay_ms: int) -> None:
        """Replaced as a whole: the broker reads it before every sync."""
        fresh = self.hooks(broker) / "delay.new"
        fresh.write_text(str(delay_ms))
        fresh.replace(self.hooks(broker) / "delay")

    def close(self) -> None:
        for child in self._children.values():
            if child.poll() is None:
                child.kill()
        for child in self._children.values():
            child.wait()
        self._children.clear()
        if self._admin is not None:
            self._admin.close()
        if self.proxy is not None:
            self.proxy.close()
        for folder in self._mounted:
            subprocess.run(["umount", str(folder)], check=True)
        self._mounted.clear()

    # -- asking ----------------------------------------------------------------------------------------------------

    @property
    def admin(self) -> Admin:
        if self._admin is None:
            # Short, as answers are asked for again and again, and some brokers are not there to give one.
            self._admin = Admin(bootstrap_servers=self.bootstrap, request_timeout_ms=2_000)
        return self._admin

    def create_topic(self, name: str, partitions: int, replication: int) -> None:
        with Admin(bootstrap_servers=self.bootstrap, request_timeout_ms=30_000) as admin:
            admin.create_topic(name, partitions, replication)

    def controller(self) -> int:
        return int(self.ask(lambda: self.admin.describe_cluster().controller_id))

    def describe(self, topic: str) -> TopicDescription:
        return self.ask(lambda: self.admin.describe_topic(topic))

    def ask(self, question: Callable[[], T], timeout_s: float = 30.0) -> T:
        """Again and again until there is an answer; what cannot be answered in time is NotHealed."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return question()
            except ZmqueueError as error:
                if time.monotonic() > deadline:
                    raise NotHealed(f"no answer from the cluster: {error}") from error
            time.sleep(POLL_S)

    def await_whole(self, topics: list[str], timeout_s: float = 60.0) -> None:
        """Until every broker serves and every replica of these topics is in sync."""
        deadline = time.monotonic() + timeout_s
        while (lacking := self._lacking(topics)) is not None:
            if time.monotonic() > deadline:
                raise NotHealed(f"not whole within {timeout_s:g} s: {lacking}")
            self.revive()
            time.sleep(POLL_S)

    def _lacking(self, topics: list[str]) -> str | None:
        try:
            serving = [broker.id for broker in self.admin.describe_cluster().brokers if not broker.fenced]
            if len(serving) < self.brokers:
                return f"only brokers {serving} serve"
            for topic in topics:
                for partition in self.admin.describe_topic(topic).partitions:
                    if sorted(partition.isr) != sorted(partition.replicas):
                        return f"{topic}-{partition.partition}: isr {partition.isr} of {partition.replicas}"
                    if partition.leader < 0:
                        return f"{topic}-{partition.partition} has no leader"
        except ZmqueueError as error:
            return str(error)
        return None


@contextlib.contextmanager
def cluster_in(
    root: Path, settings: dict[str, str], *, brokers: int = 5, proxied: bool = False, tmpfs_mib: int = 0
) -> Iterator[Cluster]:
    """A started cluster; nothing of it runs afterwards, whatever happens."""
    with reserved_offset(brokers) as offset:
        cluster = Cluster(root, offset, brokers, settings, proxied=proxied, tmpfs_mib=tmpfs_mib)
        try:
            cluster.start_all()
            cluster.await_whole([])
            yield cluster
        finally:
            cluster.close()
