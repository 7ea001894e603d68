"""How a cluster is doing: what runs (from the data folder) joined with what each broker says of itself (over its port).

ready      runs, answers, is not fenced
fenced     runs and answers, but may not serve yet, or no more
starting   runs, but does not answer yet
silent     runs, but has not answered for longer than a start takes
dead       does not run, and nobody stopped it
stopped    was stopped on purpose
"""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from zmqueue.config import ClusterFile, Member
from zmqueue.errors import ZmqueueError
from zmqueue.model import NO_BROKER
from zmqueue.processes import BrokerFolder, find_supervisor

if TYPE_CHECKING:
    from zmqueue.client.admin import Admin
    from zmqueue.wire.messages import StatusResponse

State = Literal["ready", "fenced", "starting", "silent", "dead", "stopped"]

ANSWER_MS_MAX = 1_000
START_S_MAX = 10.0


class BrokerStatus(msgspec.Struct, frozen=True):
    id: int
    state: State
    host: str
    ports: dict[str, int]
    pid: int | None = None
    uptime_s: float | None = None
    epoch: int | None = None
    partitions: int | None = None
    leading: int | None = None
    under_replicated: int | None = None
    offline: int | None = None
    controller: bool = False
    failure: str | None = None


class ClusterStatus(msgspec.Struct, frozen=True):
    cluster_id: str
    data_dir: str
    storage: str
    ready: bool
    controller: int
    supervisor_pid: int | None
    brokers: list[BrokerStatus]

    def unready(self) -> str:
        """Why it is not ready, in a few words."""
        troubled = [f"broker {b.id} is {b.state}" for b in self.brokers if b.state != "ready"]
        if not troubled and self.controller == NO_BROKER:
            troubled = ["no controller"]
        return ", ".join(troubled)

    def problems(self) -> list[str]:
        """What is wrong with the cluster, in words; nothing when it is healthy."""
        found = [f"broker {broker.id} is {broker.state}" for broker in self.brokers if broker.state != "ready"]
        if self.controller == NO_BROKER:
            found.append("no controller")
        for word, count in (
            ("without a leader", sum(broker.offline or 0 for broker in self.brokers)),
            ("short of in-sync replicas", sum(broker.under_replicated or 0 for broker in self.brokers)),
        ):
            if count:
                found.append(f"partitions {word}: {count}")
        return found


class Asker:
    """Asks the brokers of one cluster, all at once, and keeps the connections for the next time."""

    def __init__(self, data_dir: Path, cluster: ClusterFile) -> None:
        self._data_dir = data_dir
        self._cluster = cluster
        self._admin: Admin | None = None
        self._connecting = threading.Lock()
        self._pool = ThreadPoolExecutor(len(cluster.members), thread_name_prefix="ask")

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self._admin is not None:
            self._admin.close()

    def status(self) -> ClusterStatus:
        brokers, controllers = [], []
        for status, controller in self._pool.map(self._one, self._cluster.members):
            brokers.append(status)
            controllers.append(controller)
        controller = _agreed(controllers)
        supervisor = find_supervisor(self._data_dir)
        return ClusterStatus(
            cluster_id=self._cluster.cluster_id,
            data_dir=str(self._data_dir),
            storage=self._cluster.storage,
            ready=controller != NO_BROKER and all(broker.state == "ready" for broker in brokers),
            controller=controller,
            supervisor_pid=supervisor.pid if supervisor else None,
            brokers=[msgspec.structs.replace(b, controller=b.id == controller) for b in brokers],
        )

    def answers(self) -> dict[int, StatusResponse | None]:
        """Every broker's own word."""
        members = self._cluster.members
        return dict(zip([member.id for member in members], self._pool.map(self.ask, members), strict=True))

    def _one(self, member: Member) -> tuple[BrokerStatus, int]:
        folder = BrokerFolder(self._data_dir, member.id)
        ports = {"client": member.client, "push": member.push, "raft": member.raft, "peer": member.peer}
        running = folder.running()
        if running is None:
            state: State = "stopped" if folder.is_stopped else "dead"
            return BrokerStatus(member.id, state, member.host, ports, failure=folder.failure), NO_BROKER
        answer = self.ask(member)
        if answer is None:
            state = "starting" if running.age_s < START_S_MAX else "silent"
            return BrokerStatus(member.id, state, member.host, ports, running.pid, running.age_s), NO_BROKER
        status = BrokerStatus(
            id=member.id,
            state="fenced" if answer.fenced else "ready",
            host=member.host,
            ports=ports,
            pid=running.pid,
            uptime_s=running.age_s,
            epoch=answer.epoch,
            partitions=answer.partitions,
            leading=answer.leading,
            under_replicated=answer.under_replicated,
            offline=answer.offline,
        )
        return status, answer.controller

    def ask(self, member: Member) -> StatusResponse | None:
        """The broker's own word, or None. The one place that knows how the client asks."""
        # A closed port answers at once, a request into it only by its timeout.
        if not _listens(member):
            return None
        try:
            answer = self._connected().broker_status(address=f"{member.host}:{member.client}")
        except ZmqueueError:
            return None
        return answer if answer.broker == member.id else None

    def _connected(self) -> Admin:
        from zmqueue.client.admin import Admin

        with self._connecting:
            if self._admin is None:
                bootstrap = [f"{member.host}:{member.client}" for member in self._cluster.members]
                self._admin = Admin(bootstrap_servers=bootstrap, request_timeout_ms=ANSWER_MS_MAX)
            return self._admin


def _listens(member: Member) -> bool:
    try:
        socket.create_connection((member.host, member.client), timeout=0.5).close()
    except OSError:
        return False
    return True


def _agreed(controllers: list[int]) -> int:
    """Whom most of those that know a controller name."""
    known = [controller for controller in controllers if controller != NO_BROKER]
    return max(sorted(set(known)), key=known.count) if known else NO_BROKER
