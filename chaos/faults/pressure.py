"""Clients and strangers that ask for too much. Brokers must stay as they are, and others must hardly notice.

Measured, each the worst of a run: `rss_growth_mib` of the brokers concerned, from before the fault to its peak;
`fds_left`, open files beyond those before it, once it is over; `clear_s`, how long strangers' connections stayed open
though they were not closed from outside. Latency: see `settle_s` in chaos/scenario.py.
"""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from chaos.cluster import HOST, NotHealed, tied
from chaos.faults.base import FaultBase, Hit, Window, nothing

MIB = 1 << 20
LOOK_S = 0.1
OPEN_S_MAX = 60.0
CLEAR_S_MAX = 40.0
FDS_SLACK = 16  # connections of clients and peers come and go meanwhile
BACKLOG_TOPIC = "backlog"
BACKLOG_MIB_PER_S = 12.0
BACKLOG_WARM_S = 6.0
SLOW_POLL_S = 0.5
HOARD_REQUESTS = 100


def _has_spoken(child: subprocess.Popen[str]) -> bool:
    """Or has ended."""
    assert child.stdout is not None
    return bool(select.select([child.stdout], [], [], 0)[0])


class PressureFaults(FaultBase):
    _children: list[subprocess.Popen[str]] | None = None

    # -- children --------------------------------------------------------------------------------------------------

    def _attack(self, *arguments: object) -> subprocess.Popen[str]:
        command = tied([sys.executable, "-m", "chaos.attack", *map(str, arguments)])
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._children = [*(self._children or []), child]
        return child

    def _told(self, child: subprocess.Popen[str]) -> dict[str, float]:
        """The line that it says, once it does."""
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            raise NotHealed(f"an attacker failed with {child.wait()}")
        return dict(json.loads(line))

    def _let_end(self, child: subprocess.Popen[str]) -> None:
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
        assert self._children is not None
        self._children.remove(child)

    def end_children(self) -> None:
        """What an interrupted fault has left."""
        for child in self._children or ():
            child.kill()
            child.wait()
        self._children = None

    def _watch(self, brokers: list[int], before: dict[int, int], until: Callable[[], bool]) -> None:
        """Looks at their memory until then."""
        while not until():
            for broker in brokers:
                self._measure("rss_growth_mib", round((self.cluster.rss_bytes(broker) - before[broker]) / MIB, 1))
            time.sleep(LOOK_S)

    def _rss(self, brokers: list[int]) -> dict[int, int]:
        return {broker: self.cluster.rss_bytes(broker) for broker in brokers}

    # -- faults ----------------------------------------------------------------------------------------------------

    def flood(self, port: str = "client", kind: str = "silent", connections: int = 5_000) -> Hit:
        """Connections that say nothing, or too little; the broker closes them, nobody else does."""
        broker = self._some_leader()
        text, keys = f"{kind} flood of the {port} port of {broker}", self._led_by(broker)
        fds, rss = self.cluster.open_files(broker), self._rss([broker])
        self._begin(text, keys)
        child = self._attack("flood", HOST, self.cluster.port(broker, port), kind, connections)
        self._watch([broker], rss, lambda: _has_spoken(child))
        opened = int(self._told(child)["opened"])
        since = time.monotonic()
        self._measure("fds_peak", self.cluster.open_files(broker))
        self._watch(
            [broker],
            rss,
            lambda: self.cluster.open_files(broker) <= fds + FDS_SLACK or time.monotonic() - since > CLEAR_S_MAX,
        )
        self._measure("clear_s", round(time.monotonic() - since, 2))

        def undo() -> None:
            self._let_end(child)
            self._measure("fds_left", max(0, self.cluster.open_files(broker) - fds))

        return Hit(f"{text}: {opened} connections", keys, undo)

    def garbage(self, port: str = "client", seconds: float = 5.0, per_second: int = 2_000) -> Hit:
        broker = self._some_leader()
        text, keys = f"garbage for the {port} port of {broker}", self._led_by(broker)
        rss, fds = self._rss([broker]), self.cluster.open_files(broker)
        self._begin(text, keys)
        seed = self.rng.randrange(1 << 31)
        child = self._attack("garbage", HOST, self.cluster.port(broker, port), port, seconds, seed, per_second)
        self._watch([broker], rss, lambda: child.poll() is not None)
        inputs = int(self._told(child)["inputs"])
        self._let_end(child)

        def undo() -> None:
            self._measure("fds_left", max(0, self.cluster.open_files(broker) - fds))

        return Hit(f"{text}: {inputs} inputs", keys, undo, inputs)

    def backlog(self) -> Hit:
        """One consumer stands still and another is slow while the topic that they read grows: by 1 GiB in a run that
        takes two minutes or more, else by 256 MiB. In the end another asks for all of it and reads nothing. Calm is the
        same load with a consumer that keeps up."""
        mib = 1_024 if self._plan.seconds >= 120 else 256
        brokers = list(range(self.cluster.brokers))
        bootstrap = self.cluster.bootstrap
        if BACKLOG_TOPIC not in self.cluster.admin.list_topics():
            self.cluster.create_topic(BACKLOG_TOPIC, 10, 2)
        consumer = self._attack("consume", bootstrap, BACKLOG_TOPIC)
        producer = self._attack("produce", bootstrap, BACKLOG_TOPIC, BACKLOG_MIB_PER_S)
        time.sleep(BACKLOG_WARM_S)
        calm_from = self._recorder.now()
        time.sleep(BACKLOG_WARM_S)
        rss = self._rss(brokers)
        text = f"consumers stopped and slow, backlog of {mib} MiB"
        self._begin(text, self._all_keys())
        began = self._recorder.now()
        self.windows.append(Window(True, calm_from, began))
        consumer.send_signal(signal.SIGSTOP)
        slow = self._attack("consume", bootstrap, BACKLOG_TOPIC, SLOW_POLL_S)
        until = time.monotonic() + mib / BACKLOG_MIB_PER_S
        self._watch(brokers, rss, lambda: time.monotonic() > until)
        consumer.send_signal(signal.SIGCONT)
        hoard = self._hoard()
        until = time.monotonic() + BACKLOG_WARM_S
        self._watch(brokers, rss, lambda: time.monotonic() > until)
        self.windows.append(Window(False, began, self._recorder.now()))
        for child in (producer, slow, consumer, hoard):
            self._let_end(child)
        return Hit(text, [], nothing)

    def _hoard(self) -> subprocess.Popen[str]:
        """A client that asks a leader for all it has, and reads nothing of it."""
        topic = self.cluster.describe(BACKLOG_TOPIC)
        one = self.rng.choice([partition for partition in topic.partitions if partition.leader >= 0])
        port = self.cluster.port(one.leader, "client")
        return self._attack("hoard", HOST, port, topic.topic_id.hex(), one.partition, HOARD_REQUESTS)
