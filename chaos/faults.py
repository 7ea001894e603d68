"""What can be done to a cluster. Each fault begins, lasts, and is taken back; the runner decides when.

A fault is a method named as scenarios name it. It does its harm and returns a `Hit`: what was done, the keys it hit
(for availability), and how to take it back. Everything runs in the main thread, one fault at a time.

Disks are damaged only while every replica is in sync, and nobody else is touched until all are again. What one replica
alone has acknowledged is worth that replica's disk, and this is how sole copies are left alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import NamedTuple

from chaos import disk
from chaos.cluster import Cluster
from chaos.history import INVOKE, OK, Recorder
from chaos.workload import key

HARNESS = 900  # the process that faults have in the history


def _nothing() -> None:
    """For faults that take themselves back."""


class Hit(NamedTuple):
    text: str
    keys: list[str]
    undo: Callable[[], None]


class Faults:
    def __init__(
        self,
        cluster: Cluster,
        recorder: Recorder,
        rng: random.Random,
        topics: list[str],
        *,
        loses_unsynced: bool = False,
        fsync_delay_ms: int = 0,
    ) -> None:
        self.cluster = cluster
        self.rng = rng
        self.topics = topics
        self._recorder = recorder
        self._loses_unsynced = loses_unsynced  # fsync does not precede acknowledgements: a power cut ends an era
        self._fsync_delay_ms = fsync_delay_ms
        self._copies: set[int] = set()
        for broker in range(cluster.brokers):
            cluster.delay_fsync(broker, fsync_delay_ms)

    # -- choosing --------------------------------------------------------------------------------------------------

    def _leaders(self) -> dict[str, int]:
        found = {}
        for topic in self.topics:
            for partition in self.cluster.describe(topic).partitions:
                found[key(topic, partition.partition)] = partition.leader
        return found

    def _led_by(self, broker: int, leaders: dict[str, int] | None = None) -> list[str]:
        leaders = self._leaders() if leaders is None else leaders
        return [name for name, leader in leaders.items() if leader == broker]

    def _all_keys(self) -> list[str]:
        return list(self._leaders())

    def _some_leader(self) -> int:
        return self.rng.choice([leader for leader in self._leaders().values() if leader >= 0])

    def _some_follower(self) -> tuple[int, list[str]]:
        """A broker, and the keys that it follows."""
        follows: dict[int, list[str]] = {}
        for topic in self.topics:
            for partition in self.cluster.describe(topic).partitions:
                for broker in partition.isr:
                    if broker != partition.leader:
                        follows.setdefault(broker, []).append(key(topic, partition.partition))
        broker = self.rng.choice(sorted(follows))
        return broker, follows[broker]

    def _some_broker(self) -> int:
        return self.rng.choice(self.cluster.running())

    def _begin(self, text: str, keys: list[str]) -> None:
        self._recorder.add(HARNESS, INVOKE, "fault", x=text, ks=keys)

    # -- processes -------------------------------------------------------------------------------------------------

    def _kill(self, broker: int, text: str, keys: list[str]) -> Hit:
        self._begin(text, keys)
        self.cluster.kill(broker)
        return Hit(text, keys, lambda: self.cluster.start(broker))

    def kill_leader(self) -> Hit:
        leaders = self._leaders()
        broker = self.rng.choice([leader for leader in leaders.values() if leader >= 0])
        led_raft = " (controller)" if self.cluster.controller() == broker else ""
        return self._kill(broker, f"kill leader {broker}{led_raft}", self._led_by(broker, leaders))

    def kill_controller(self) -> Hit:
        broker = self.cluster.controller()
        return self._kill(broker, f"kill controller {broker}", self._led_by(broker))

    def kill_follower(self) -> Hit:
        broker, keys = self._some_follower()
        return self._kill(broker, f"kill follower {broker}", keys)

    def kill_random(self) -> Hit:
        broker = self._some_broker()
        return self._kill(broker, f"kill {broker}", self._led_by(broker))

    def kill_both(self) -> Hit:
        """Both replicas of a partition. The one that died first is back first, and must not lead."""
        topic = self.rng.choice(self.topics)
        partition = self.rng.choice(self.cluster.describe(topic).partitions)
        name = key(topic, partition.partition)
        first, last = self.rng.sample(partition.replicas, 2)
        text = f"kill {first}, then {last}: all of {name}"
        self._begin(text, [])
        self.cluster.kill(first)
        self._await_isr(topic, partition.partition, [last])
        time.sleep(0.5)  # records that only the last one has
        self.cluster.kill(last)

        def undo() -> None:
            self.cluster.start(first)
            time.sleep(2.0)
            self._begin(f"{last}, the last of {name}, is back", [name])
            self.cluster.start(last)

        return Hit(text, [], undo)

    def _await_isr(self, topic: str, partition: int, isr: list[int], timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.cluster.describe(topic).partitions[partition].isr != isr and time.monotonic() < deadline:
            time.sleep(0.05)

    def kill_all(self) -> Hit:
        self._begin("kill all", [])
        everyone = self._all_keys()
        self.cluster.kill(*range(self.cluster.brokers))
        return Hit("kill all", everyone, lambda: self._start_all(everyone))

    def _start_all(self, keys: list[str]) -> None:
        self.cluster.start_all()
        self._begin("all started", keys)

    def pause_leader(self) -> Hit:
        leaders = self._leaders()
        broker = self.rng.choice([leader for leader in leaders.values() if leader >= 0])
        return self._pause(broker, f"pause leader {broker}", self._led_by(broker, leaders))

    def pause_controller(self) -> Hit:
        broker = self.cluster.controller()
        return self._pause(broker, f"pause controller {broker}", self._led_by(broker))

    def _pause(self, broker: int, text: str, keys: list[str]) -> Hit:
        self._begin(text, keys)
        self.cluster.pause(broker)
        return Hit(text, keys, lambda: self.cluster.resume(broker))

    def stop_random(self) -> Hit:
        broker = self._some_broker()
        text, keys = f"stop {broker}", self._led_by(broker)
        self._begin(text, keys)
        self.cluster.stop(broker)
        return Hit(text, keys, lambda: self.cluster.start(broker))

    def rolling_restart(self) -> Hit:
        """Each broker in turn, when all replicas are in sync again."""
        for broker in range(self.cluster.brokers):
            self._begin(f"restart {broker}", self._all_keys())
            self.cluster.stop(broker)
            self.cluster.start(broker)
            self.cluster.await_whole(self.topics)
        return Hit("rolling restart", [], _nothing)

    def pauses_and_power(self) -> Hit:
        """Two stand still while a third loses its power; when they go on, the other two stand still."""
        one, two, three, four, five = self.rng.sample(range(self.cluster.brokers), 5)
        text = f"pause {one}, {two}; power cut of {three}; then pause {four}, {five}"
        self._begin(text, [])
        self.cluster.pause(one)
        self.cluster.pause(two)
        time.sleep(1.0)
        self._power_off(three)
        self.cluster.resume(one)
        self.cluster.resume(two)
        self.cluster.pause(four)
        self.cluster.pause(five)
        self.cluster.start(three)

        def undo() -> None:
            self.cluster.resume(four)
            self.cluster.resume(five)

        return Hit(text, [], undo)

    # -- disks -----------------------------------------------------------------------------------------------------

    def _damage(self, what: str, broker: int, damage: Callable[[], str]) -> Hit:
        self.cluster.await_whole(self.topics)
        keys = self._led_by(broker)
        self._begin(f"{what} {broker}", keys)
        self.cluster.kill(broker)
        return Hit(f"{what} {broker}: {damage()}", keys, lambda: self.cluster.start(broker))

    def torn_tail(self) -> Hit:
        broker = self._some_broker()
        return self._damage("tear", broker, lambda: disk.tear(self.cluster.folder(broker), self.rng))

    def flip_bits(self, flips: int = 3) -> Hit:
        broker = self._some_broker()
        return self._damage("flip", broker, lambda: disk.flip(self.cluster.folder(broker), self.rng, flips))

    def flip_raft(self, broker: int = 4) -> Hit:
        return self._damage("flip", broker, lambda: disk.flip(self.cluster.folder(broker), self.rng, 1, raft=True))

    def wipe(self) -> Hit:
        broker = self._some_broker()
        return self._damage("wipe", broker, lambda: disk.wipe(self.cluster.folder(broker)))

    def wipe_raft(self, broker: int = 4) -> Hit:
        return self._damage("wipe", broker, lambda: disk.wipe(self.cluster.folder(broker), raft=True))

    def roll_back(self) -> Hit:
        """To what the folder held when this broker was here before; the first time it is only copied."""
        broker = self._some_broker()
        copy = self.cluster.root / f"copy-{broker}"

        def damage() -> str:
            if broker in self._copies:
                return disk.restore(self.cluster.folder(broker), copy)
            disk.save(self.cluster.folder(broker), copy)
            self._copies.add(broker)
            return "copied"

        return self._damage("roll back", broker, damage)

    def slow_fsync_leader(self, delay_ms: int = 500) -> Hit:
        broker = self._some_leader()
        return self._slow(broker, f"fsync +{delay_ms} ms on leader {broker}", self._led_by(broker), delay_ms)

    def slow_fsync_follower(self, delay_ms: int = 500) -> Hit:
        broker, keys = self._some_follower()
        return self._slow(broker, f"fsync +{delay_ms} ms on follower {broker}", keys, delay_ms)

    def _slow(self, broker: int, text: str, keys: list[str], delay_ms: int) -> Hit:
        self._begin(text, keys)
        self.cluster.delay_fsync(broker, delay_ms)
        return Hit(text, keys, lambda: self.cluster.delay_fsync(broker, self._fsync_delay_ms))

    def disk_full(self) -> Hit:
        """Needs folders on a tmpfs of their own; all the room that is left is taken."""
        broker = self._some_leader()
        text, keys = f"disk full on {broker}", self._led_by(broker)
        filler = self.cluster.node(broker) / "filler"
        self._begin(text, keys)
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 16)):
                    continue
            except OSError:  # full, as wanted
                text += f" after {file.tell() >> 20} MiB"
        return Hit(text, keys, lambda: filler.unlink(missing_ok=True))

    def power_cut(self) -> Hit:
        keys = self._all_keys()
        self._begin("power cut", [])
        self.cluster.kill(*range(self.cluster.brokers))
        lost = sum(self._cut(broker) for broker in range(self.cluster.brokers))
        if self._loses_unsynced:
            time.sleep(0.3)  # answers that are still in the clients' sockets belong to the era that ends
            self._recorder.add(HARNESS, OK, "era")
        return Hit(f"power cut: {lost} unsynced bytes lost", keys, lambda: self._start_all(keys))

    def lying_disks(self) -> Hit:
        """All five lose bytes that were synced, and none can know. Nothing survives this: the judge must see it."""
        keys = self._all_keys()
        self._begin("lying disks", [])
        self.cluster.kill(*range(self.cluster.brokers))
        lost = sum(disk.shorten(self.cluster.folder(broker), self.rng) for broker in range(self.cluster.brokers))
        return Hit(f"lying disks: {lost} synced bytes lost", keys, lambda: self._start_all(keys))

    def _power_off(self, broker: int) -> None:
        self.cluster.kill(broker)
        self._cut(broker)

    def _cut(self, broker: int) -> int:
        self.cluster.change_boot_id(broker)
        return disk.cut_power(self.cluster.folder(broker), self.cluster.hooks(broker) / "ledger", self.rng)

    # -- links (needs the proxy) -----------------------------------------------------------------------------------

    def _cut_links(self, text: str, pairs: list[tuple[int, int]], keys: list[str]) -> Hit:
        proxy = self.cluster.proxy
        assert proxy is not None, "partitions need `proxied = true`"
        self._begin(text, keys)
        proxy.cut(pairs)
        return Hit(text, keys, proxy.heal)

    def _between(self, some: list[int], others: list[int]) -> list[tuple[int, int]]:
        return [pair for a in some for b in others for pair in ((a, b), (b, a))]

    def isolate_leader(self) -> Hit:
        broker = self._some_leader()
        others = [other for other in range(self.cluster.brokers) if other != broker]
        return self._cut_links(f"isolate leader {broker}", self._between([broker], others), self._led_by(broker))

    def isolate_controller(self) -> Hit:
        broker = self.cluster.controller()
        others = [other for other in range(self.cluster.brokers) if other != broker]
        return self._cut_links(f"isolate controller {broker}", self._between([broker], others), self._led_by(broker))

    def split(self) -> Hit:
        """Two against the rest. Partitions with both replicas among the two wait for the heal."""
        few = self.rng.sample(range(self.cluster.brokers), 2)
        many = [broker for broker in range(self.cluster.brokers) if broker not in few]
        return self._cut_links(f"split {sorted(few)} from {many}", self._between(few, many), [])

    def bridge(self) -> Hit:
        """Two pairs that see each other only through the fifth."""
        one, two, three, four, middle = self.rng.sample(range(self.cluster.brokers), 5)
        return self._cut_links(f"bridge over {middle}", self._between([one, two], [three, four]), [])

    def one_way(self) -> Hit:
        """A leader is heard by nobody, or hears nobody."""
        broker = self._some_leader()
        others = [other for other in range(self.cluster.brokers) if other != broker]
        if self.rng.random() < 0.5:
            text, pairs = f"nobody hears {broker}", [(broker, other) for other in others]
        else:
            text, pairs = f"{broker} hears nobody", [(other, broker) for other in others]
        return self._cut_links(text, pairs, self._led_by(broker))

    def flap(self) -> Hit:
        """A leader is cut off and back every second."""
        broker = self._some_leader()
        others = [other for other in range(self.cluster.brokers) if other != broker]
        hit = self._cut_links(f"flap {broker}", self._between([broker], others), [])
        for _ in range(2):
            time.sleep(1.0)
            hit.undo()
            time.sleep(1.0)
            assert self.cluster.proxy is not None
            self.cluster.proxy.cut(self._between([broker], others))
        return hit

    # -- after all -------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Everything runs, nothing is slow, full or cut."""
        for broker in list(self.cluster.paused):
            self.cluster.resume(broker)
        if self.cluster.proxy is not None:
            self.cluster.proxy.heal()
        for broker in range(self.cluster.brokers):
            self.cluster.delay_fsync(broker, self._fsync_delay_ms)
            (self.cluster.node(broker) / "filler").unlink(missing_ok=True)
        self.cluster.revive()
        self.cluster.start_all()
