"""Brokers to break: real processes on free ports in a folder of their own, each with hooks of its own.

    ROOT/node-N/cluster.json, secret    what broker N knows of the cluster: behind a proxy, each knows other ports
    ROOT/node-N/broker-N/               its data folder
    ROOT/hooks-N/ledger, delay, boot-id what it has synced; how long a sync takes; the boot that it believes in
    ROOT/hooks-N/clock                  how far its wall clock is off (libfaketime; CLOCK_MONOTONIC is left alone)
    ROOT/broker-N.log                   what it said

Clusters to be used, not broken, are those of `zmqueue.testing`: one folder, and a supervisor. Here is none: whoever
kills a broker starts it again. A broker that ends by itself is noted in `crashes`, and started again by `revive`.
Processes are children of this one and die with it, also when it is killed (`setpriv --pdeathsig`); for that, brokers
must be started from the main thread.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from chaos.proxy import CLIENTS, Proxy, Route
from zmqueue import Admin
from zmqueue.broker.raft_folder import format_folder
from zmqueue.client.descriptions import ReplicaDescription, TopicDescription
from zmqueue.config import CLUSTER_FILE, ENV_PREFIX, SECRET_FILE, ClusterFile, load, variable_for
from zmqueue.core.admission import refusal
from zmqueue.errors import ZmqueueError
from zmqueue.log.files import DELAY_VARIABLE, LEDGER_VARIABLE
from zmqueue.log.session import BOOT_ID_VARIABLE
from zmqueue.supervisor import prepare
from zmqueue.testing.ports import HOST, reserved_offset
from zmqueue.wire.messages import StatusResponse

EXIT_S_MAX = 15.0
POLL_S = 0.1
ADMISSIBLE_S_MAX = 30.0

T = TypeVar("T")


class NotHealed(Exception):
    """The cluster did not become whole in time."""


def _free_ports(count: int) -> list[int]:
    """Ports that the kernel gives out; all are held open until all are known."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((HOST, 0))
        return [probe.getsockname()[1] for probe in probes]


def tied(command: list[str]) -> list[str]:
    """A command that ends with the process that started it, however that ends."""
    found = shutil.which("setpriv")
    return [found, "--pdeathsig", "KILL", *command] if found else command


class Layout(msgspec.Struct, frozen=True):
    """How brokers are set up to be broken."""

    brokers: int = 5
    proxied: bool = False
    clients_proxied: bool = False
    clocks: bool = False
    tmpfs_mib: int = 0  # of each broker's folder
    raft_tmpfs_mib: int = 0  # of its Raft folder alone


class Cluster:
    def __init__(self, root: Path, offset: int, settings: dict[str, str], layout: Layout) -> None:
        self.root = root
        self.brokers = layout.brokers
        self.proxy: Proxy | None = None
        self.crashes: list[str] = []
        self.paused: set[int] = set()
        self._settings = settings
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._mounted: list[Path] = []
        self._admin: Admin | None = None
        self._clock_library = find_clock_library() if layout.clocks else None
        made = self._create(offset, layout)
        self._made = made
        self._direct = self.bootstrap = ",".join(f"{HOST}:{member.client}" for member in made.members)
        if layout.proxied or layout.clients_proxied:
            self.proxy = Proxy(HOST, self._put_proxy_between(made, layout))
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

    def set_clock(self, broker: int, offset_s: int) -> None:
        """Replaced as a whole: the broker reads it whenever it looks at its clock."""
        fresh = self.hooks(broker) / "clock.new"
        fresh.write_text(f"{offset_s:+d}s\n")
        fresh.replace(self.hooks(broker) / "clock")

    def _create(self, offset: int, layout: Layout) -> ClusterFile:
        made = self.root / "made"
        made.mkdir(parents=True)
        flags = {"cluster.brokers": self.brokers, "cluster.port_offset": offset, "cluster.data_dir": str(made)}
        cluster, _ = prepare(made, load(None, {}, flags))
        for broker in range(self.brokers):
            node = self.node(broker)
            node.mkdir()
            if layout.tmpfs_mib:
                self._mount(node, layout.tmpfs_mib)
            for name in (CLUSTER_FILE, SECRET_FILE):
                shutil.copy2(made / name, node / name)
            if layout.raft_tmpfs_mib:
                self._mount(self.folder(broker) / "raft", layout.raft_tmpfs_mib)
            shutil.copytree(made / f"broker-{broker}", self.folder(broker), dirs_exist_ok=True)
            self.hooks(broker).mkdir()
            self.change_boot_id(broker)
            self.set_clock(broker, 0)
        shutil.rmtree(made)
        return cluster

    def _mount(self, folder: Path, size_mib: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(folder)], check=True)
        self._mounted.append(folder)

    def _put_proxy_between(self, cluster: ClusterFile, layout: Layout) -> list[Route]:
        """Each broker has its own view: the others, and what it tells clients of itself, stand at the proxy."""
        routes = []
        members = cluster.members
        ports = iter(_free_ports((3 * self.brokers + 1) * self.brokers))

        def behind(source: int, target: int, port: int) -> int:
            listen = next(ports)
            routes.append(Route(source, target, listen, port))
            return listen

        advertised = {}
        for source in range(self.brokers):
            view = list(members)
            for at, member in enumerate(members if layout.proxied else ()):
                if member.id != source:
                    push, raft, peer = (behind(source, member.id, p) for p in (member.push, member.raft, member.peer))
                    view[at] = msgspec.structs.replace(member, push=push, raft=raft, peer=peer)
            if layout.clients_proxied:
                advertised[source] = behind(CLIENTS, source, members[source].client)
                view[source] = msgspec.structs.replace(view[source], advertised=advertised[source])
            file = msgspec.structs.replace(cluster, members=view)
            (self.node(source) / CLUSTER_FILE).write_bytes(msgspec.json.encode(file))
        if advertised:
            self.bootstrap = ",".join(f"{HOST}:{port}" for port in advertised.values())
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
        if self._clock_library is not None:
            env |= {
                "LD_PRELOAD": str(self._clock_library),
                "FAKETIME_TIMESTAMP_FILE": str(hooks / "clock"),
                "FAKETIME_NO_CACHE": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                # Its correction of monotonic waits slows each wait for the interpreter's lock, and brokers severalfold.
                "FAKETIME_FORCE_MONOTONIC_FIX": "0",
                "NO_FAKE_STAT": "1",
            }
        env["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
        command = [sys.executable, "-m", "zmqueue.broker", "--id", str(broker), "--data-dir", str(node)]
        with (self.root / f"broker-{broker}.log").open("ab") as log:
            self._children[broker] = subprocess.Popen(
                tied(command), env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
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

    def port(self, broker: int, name: str) -> int:
        """Where it really listens: client, push, raft or peer."""
        return int(getattr(self._made.members[broker], name))

    def rss_bytes(self, broker: int) -> int:
        """0 of one that ended by itself, which is noted as a crash."""
        try:
            pages = Path(f"/proc/{self._children[broker].pid}/statm").read_text().split()[1]
        except (OSError, IndexError):
            return 0
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def open_files(self, broker: int) -> int:
        try:
            return len(os.listdir(f"/proc/{self._children[broker].pid}/fd"))
        except OSError:
            return 0

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
            self._admin = Admin(bootstrap_servers=self._direct, request_timeout_ms=2_000)
        return self._admin

    def create_topic(self, name: str, partitions: int, replication: int) -> None:
        with Admin(bootstrap_servers=self._direct, request_timeout_ms=30_000) as admin:
            admin.create_topic(name, partitions, replication)

    def controller(self) -> int:
        """-1 while there is none."""
        return int(self.ask(lambda: self.admin.describe_cluster().controller_id))

    def describe(self, topic: str) -> TopicDescription:
        return self.ask(lambda: self.admin.describe_topic(topic))

    def status(self, broker: int) -> StatusResponse:
        """A broker's own word, past any proxy."""
        return self.ask(lambda: self._own_word(broker))

    def _own_word(self, broker: int) -> StatusResponse:
        return self.admin.broker_status(address=f"{HOST}:{self._made.members[broker].client}")

    def admit(self, broker: int) -> bool:
        """Let a member whose Raft folder was damaged vote again, as `zmqueue broker admit` does. False if it votes
        already: not every flipped bit is one that counts."""
        deadline = time.monotonic() + ADMISSIBLE_S_MAX
        while True:
            answers = {member: self.status(member) for member in range(self.brokers)}
            if answers[broker].voting:
                return False
            why = refusal(broker, answers)
            if why is None:
                break
            if time.monotonic() > deadline:
                raise NotHealed(f"broker {broker} cannot be admitted: {why}")
            time.sleep(POLL_S)
        self.stop(broker)
        format_folder(self.folder(broker) / "raft", self._made.cluster_id, broker, admit=True)
        self.start(broker)
        return True

    def accept_loss(self, topic: str) -> None:
        """As an operator would: of each partition without a leader, the copy leads that has the most."""
        best: dict[int, ReplicaDescription] = {}
        for replica in self.ask(lambda: self.admin.describe_replicas(topic)):
            known = best.get(replica.partition)
            if known is None or (replica.last_epoch, replica.log_end) > (known.last_epoch, known.log_end):
                best[replica.partition] = replica
        for partition in self.describe(topic).partitions:
            if partition.leader < 0:
                number, broker = partition.partition, best[partition.partition].broker
                self.ask(functools.partial(self.admin.elect_unclean, topic, number, broker))

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
        """What the others say of a broker may be about the life it had before: they notice a death late. So each is
        asked itself first, and others by metadata that is as new."""
        try:
            words = [self._own_word(broker) for broker in range(self.brokers)]
            serving = [word.broker for word in words if word.epoch >= 0 and not word.fenced]
            if len(serving) < self.brokers:
                return f"only brokers {serving} serve"
            cluster = self.admin.describe_cluster()
            if cluster.index < max(word.index for word in words) or any(broker.fenced for broker in cluster.brokers):
                return "the metadata at hand is older than what brokers say of themselves"
            for topic in topics:
                for partition in self.admin.describe_topic(topic).partitions:
                    if sorted(partition.isr) != sorted(partition.replicas):
                        return f"{topic}-{partition.partition}: isr {partition.isr} of {partition.replicas}"
                    if partition.leader < 0:
                        return f"{topic}-{partition.partition} has no leader"
        except ZmqueueError as error:
            return str(error)
        return None


def find_clock_library() -> Path:
    """The shared object of libfaketime, which the package of that name carries."""
    found = importlib.util.find_spec("libfaketime")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("clocks are moved by libfaketime: pip install libfaketime")
    return Path(found.origin).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"


@contextlib.contextmanager
def cluster_in(root: Path, settings: dict[str, str], layout: Layout) -> Iterator[Cluster]:
    """A started cluster; nothing of it runs afterwards, whatever happens."""
    with reserved_offset(layout.brokers) as offset:
        cluster = Cluster(root, offset, settings, layout)
        try:
            cluster.start_all()
            cluster.await_whole([])
            yield cluster
        finally:
            cluster.close()
