"""One schedule: a virtual clock, a heap of events, five brokers, clients and faults. One thread, one seed, one result.

A run has three parts. The cluster starts and makes its topics, undisturbed. Then load and faults. Then all heals, and
the cluster has to become whole: every replica in sync with the same records, every producer answered.

Budget: an acknowledged record may be lost only if every replica that acknowledged it loses its disk. So a fault that
costs a disk (a wiped or rolled-back folder, a power cut where syncs follow acknowledgements, any end of a process
that holds a memory topic) happens only while another complete replica of each partition runs. Everything else happens
at any time, to any number of brokers.

That does not keep every partition available: a broker without its disk is in the ISR until the cluster notices. If as
many as min.insync.replicas have lost theirs, and the others restart just then, the ISR holds nobody but those that lost
everything. Such a partition waits for an operator, as promised; it counts as offline and need not become whole.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from functools import lru_cache
from heapq import heappop, heappush
from random import Random
from typing import Any

import msgspec
from msgspec import Struct

from tests.sim import plan as plans
from tests.sim.broker import SimBroker
from tests.sim.checker import Checker, Violation
from tests.sim.clients import SimConsumer, SimProducer
from tests.sim.faults import Faults
from tests.sim.network import Network
from tests.sim.raft import SimRaft
from zmqueue.config import Config, LogConfig, RaftConfig, ReplicationConfig
from zmqueue.core import cluster, metadata, proposer
from zmqueue.core import commands as c
from zmqueue.core.cluster import Applied
from zmqueue.log import session
from zmqueue.log.flusher import Flushed
from zmqueue.model import PartitionKey
from zmqueue.wire.batch import Batch

# A broker, if the event is one, and the life of it to which the event belongs, if it belongs to one; what to call.
Event = tuple["SimBroker | None", int | None, Callable[..., None], tuple[Any, ...]]

START_MS_MAX = 20_000
HEAL_MS_MAX = 30_000
LOOK_MS = 50  # between two looks whether the cluster is whole

# Commands and snapshots travel as bytes, but not in CBOR: that takes ten times as long, and has tests of its own.
_envelopes = msgspec.msgpack.Decoder(c.Envelope)
_decoded: dict[bytes, c.Envelope] = {}
_decode, _encode, _cbor = c.decode, proposer.encode, cluster.cbor
_place = metadata.place
_boot_id = session._boot_id
_secrets = session.secrets


def _decode_once(data: bytes) -> c.Envelope:
    """Brokers that apply the same bytes share the command that they mean; nothing writes to it."""
    found = _decoded.get(data)
    if found is None:
        if len(_decoded) > 2_000:
            _decoded.clear()
        found = _decoded[data] = _envelopes.decode(data)
    return found


class Snapshots:
    """In place of the module `cbor`."""

    dumps, loads = staticmethod(msgspec.msgpack.encode), staticmethod(msgspec.msgpack.decode)


# Every node scales the same settings by the same number, and each time they are checked anew.
_scaled = ReplicationConfig.scaled
_scale_once = lru_cache(64)(_scaled)


@lru_cache(256)
def _placed(*args: Any) -> list[list[int]]:
    return _place(*args)


def _place_once(
    topic: str, fresh: range, factor: int, brokers: list[int], held: dict[int, int], leading: dict[int, int]
) -> list[list[int]]:
    """Brokers compute placements alike, from these numbers alone."""
    assert not held, "topics of schedules do not grow"
    assert not leading
    return [list(replicas) for replicas in _placed(topic, fresh, factor, tuple(brokers))]


class Result(Struct):
    """What came of one schedule."""

    seed: int
    events: int
    acknowledged: int
    faults: int
    digest: int
    virtual_ms: int
    offline: int = 0
    violation: str = ""
    text: str = ""
    trace: list[str] = []


@lru_cache(64)
def config_of(fsync: str, segment: int, heal_after_ms: int) -> Config:
    replication = ReplicationConfig(
        heartbeat_ms=200,
        session_ms=700,
        silence_ms=150,
        beacon_ms=100,
        lag_ms_max=400,
        write_lease_ms=500,
        read_lease_ms=1_400,
        fetch_timeout_ms=150,
        proposal_timeout_ms=400,
        heal_after_ms=heal_after_ms,
    )
    log = LogConfig(
        fsync=fsync,  # type: ignore[arg-type]
        segment_bytes_max=segment,
        batch_bytes_max=segment,
        maintenance_ms=60,
        maintenance_partitions_max=3,
        maintenance_files_max=2,
    )
    return Config(log=log, replication=replication, raft=RaftConfig(digest_ms=700))


class World:
    def __init__(self, plan: plans.Plan, tracing: bool = False) -> None:
        self.plan = plan
        self.config = config_of(plan.fsync, plan.segment_bytes, plan.heal_after_ms)
        self.chance = Random(plan.seed * 2)
        self.random = self.chance.random
        self.now = 0
        self.closing = False
        self.tracing = tracing
        self.trace: list[str] = []
        self.events = 0
        self.digest = 0
        self._times: list[int] = []  # a heap of the moments at which something happens
        self._events: dict[int, list[Event]] = {}  # what, in the order in which it was planned
        self.network = Network(self, 0.0, 0.0, 0.0)
        self.raft = SimRaft(self)
        self.raft.calm = True
        self.checker = Checker(self, hashes=plan.seed % 16 == 0)
        self.brokers = [SimBroker(self, n, self.config) for n in range(plan.brokers)]
        self.producers: list[SimProducer] = []
        self.running = 0  # how many brokers are alive
        self.lost_disks: set[int] = set()  # brokers that lost what they had acknowledged, once or more
        self.faults = Faults(self)
        self.forgets = any(topic.config for topic in plan.topics)

    # -- the clock

    def at(
        self,
        delay_ms: int,
        broker: SimBroker | None,
        life: int | None,
        handle: Callable[..., None],
        args: tuple[Any, ...],
    ) -> None:
        """An event; at a broker, if one is given, and only in that life of it, if one is given."""
        due_ms = self.now + delay_ms
        events = self._events.get(due_ms)
        if events is None:
            self._events[due_ms] = [(broker, life, handle, args)]
            heappush(self._times, due_ms)
        else:
            events.append((broker, life, handle, args))

    def _run_until(self, until_ms: int) -> None:
        times = self._times
        while times and times[0] <= until_ms:
            now = self.now = times[0]
            for broker, life, handle, args in self._events[now]:  # which grows meanwhile
                self.events += 1
                if self.tracing:
                    self._tell(broker, handle, args)
                if broker is None:
                    handle(*args)
                else:
                    broker.turn(life, handle, args)
            del self._events[now]
            heappop(times)
        self.now = until_ms

    def token_bytes(self, count: int) -> bytes:
        """In place of the module `secrets`."""
        return self.chance.randbytes(count)

    # -- telling

    def note(self, broker: SimBroker | None, what: str, detail: object = "") -> None:
        self.digest = hash((self.digest, self.now, self.events, broker.id if broker else -1, len(what)))
        if self.tracing:
            self.trace.append(f"{self.now:6d} {f'broker {broker.id}' if broker else '':9} -- {what} {detail}")

    def _tell(self, broker: SimBroker | None, handle: Callable[..., None], args: tuple[Any, ...]) -> None:
        name = handle.__name__.strip("_")
        if name in ("tick", "watch", "on_heartbeat", "on_heartbeat_reply", "run", "woken", "sync"):
            return
        if name.startswith("on_") and args and args[0] is broker:
            args = args[1:]
        state = "" if broker is None or broker.alive else " (down)"
        if broker is not None and broker.paused:
            state = " (paused)"
        shown = ", ".join(_short(arg) for arg in args)
        self.trace.append(f"{self.now:6d} {f'broker {broker.id}' if broker else '':9} {name}{state} {shown}")

    # -- metadata

    def on_committed(self, applied: Applied) -> None:
        if not self.tracing:
            self.note(None, "committed")
        else:
            again = "again " if applied.duplicate else ""
            self.note(None, "committed", f"{again}{_short(applied.envelope)} -> {_short(applied.outcome)}")
            for key in applied.partitions:
                self.trace.append(f"{self.now:6d} {'':9} -- becomes {key} {self.raft.truth.partition(key)}")
        self.checker.on_committed(applied)

    # -- brokers

    def boot(self, broker: SimBroker) -> None:
        if broker.alive:
            return
        if not broker.start():
            self.note(broker, "ends while starting")
            self.died(broker, broker.power_after_crash)
            return
        self.running += 1
        self.note(broker, "started", f"life {broker.life}")
        broker.later(1 + int(self.random() * 20), broker.tick)
        for other in self.brokers:
            if other is not broker:
                self.at(int(self.random() * 30), other, None, other.on_link, (broker.id, True))

    def died(self, broker: SimBroker, power: bool, down_ms: int = -1) -> None:
        """The process has ended. It is started again later."""
        self.running -= broker.alive
        broker.alive = False
        broker.paused = False
        broker.disk.crash_in = 0
        broker.disk.drop_damaged()
        if power:
            broker.boot += 1
            broker.disk.cut_power()
        if (power and self.plan.fsync != "always") or any(topic.storage == "memory" for topic in self.plan.topics):
            self.lost_disks.add(broker.id)
        for other in self.brokers:
            if other is not broker and other.alive:
                self.at(1 + int(self.random() * 30), other, None, other.on_link, (broker.id, False))
        if down_ms < 0:
            down_ms = 50 + int(self.random() * 600)
        self.at(down_ms, None, None, self.boot, (broker,))

    def leave(self, broker: SimBroker) -> None:
        broker.stop_cleanly()
        self.note(broker, "left")
        self.died(broker, False)

    # -- the three parts of a run

    def _start(self) -> None:
        for broker in self.brokers:
            self.boot(broker)
        self.raft.watch()
        truth = self.raft.truth
        while len(truth.live_brokers()) < len(self.brokers):
            self._run_until(self.now + 20)
            assert self.now < START_MS_MAX, "the cluster starts"
        for nth, topic in enumerate(self.plan.topics):
            command = c.CreateTopic(
                f"t{nth}",
                bytes([nth + 1]) * 16,
                topic.partitions,
                topic.replication_factor,
                topic.min_insync,
                topic.storage,
                topic.config,
            )
            self.brokers[0].on_command(command)
        while len(truth.topics) < len(self.plan.topics):
            self._run_until(self.now + 10)
            assert self.now < START_MS_MAX, "topics are created"

    def _load(self) -> None:
        plan, network = self.plan, self.network
        self.raft.calm = False
        network.drop, network.duplicate, network.straggle = plan.drop, plan.duplicate, plan.straggle
        for nth, load in enumerate(plan.producers):
            key = PartitionKey(bytes([load.topic + 1]) * 16, load.partition)
            producer = SimProducer(self, nth + 1, key, load)
            self.producers.append(producer)
            self.at(nth, None, None, producer.run, ())
        for reads in plan.consumers:
            consumer = SimConsumer(self, PartitionKey(bytes([reads.topic + 1]) * 16, reads.partition))
            self.at(10, None, None, consumer.run, ())
        for fault in plan.faults:
            self.at(fault.at_ms, None, None, self.faults.inject, (fault,))
        self._run_until(self.now + plan.duration_ms)

    def _heal(self) -> None:
        self.faults.end()
        self.note(None, "heal")
        self.raft.calm = True
        self.closing = True
        network = self.network
        network.drop = network.duplicate = network.straggle = 0.0
        began_ms = self.now
        while missing := self.checker.wholeness():
            if self.now - began_ms > HEAL_MS_MAX:
                raise Violation("stuck", missing)
            self._run_until(self.now + LOOK_MS)
        self.checker.at_end()

    def run(self) -> Result:
        violation = text = ""
        try:
            self._start()
            self._load()
            self._heal()
        except Violation as error:
            violation, text = error.name, error.text
        except Exception as error:
            violation, text = "assertion", f"{type(error).__name__}: {error}"
            if self.tracing:
                self.trace += traceback.format_exc().splitlines()
        digest = hash((self.digest, self.events, self.now))
        return Result(
            self.plan.seed,
            self.events,
            self.checker.acknowledged,
            self.faults.injected,
            digest,
            self.now,
            self.checker.offline,
            violation,
            text,
            self.trace,
        )

    def end(self) -> None:
        """Part what refers to each other, so that little is left for the collector."""
        self._events.clear()
        for broker in self.brokers:
            broker.end()
        vars(self).clear()


def _short(value: object) -> str:
    if isinstance(value, c.Envelope):
        value = value.command
    elif isinstance(value, bytes) and len(value) > 16:
        try:
            value = _decode_once(value).command
        except msgspec.DecodeError:
            value = f"{len(value)} bytes"
    elif isinstance(value, Batch):
        header = value.header
        records = f"{header.producer_id}/{header.base_sequence}+{header.record_count}"
        return f"[{records} @{header.base_offset} e{header.leader_epoch}]"
    elif isinstance(value, Flushed):
        return f"{value.key} to {value.ticket.end}"
    elif isinstance(value, list) and value and isinstance(value[0], Batch | Flushed):
        return " ".join(_short(part) for part in value)
    elif isinstance(value, tuple) and not isinstance(value, PartitionKey):
        return "(" + ", ".join(_short(part) for part in value) + ")"
    text = repr(value)
    for nth in range(1, 3):
        text = text.replace(repr(bytes([nth]) * 16), f"t{nth - 1}")
    return text.replace("cluster_id='simulated', ", "")[:400]


def run(plan: plans.Plan, tracing: bool = False) -> Result:
    """Run one schedule."""
    c.decode, proposer.encode, cluster.cbor = _decode_once, msgspec.msgpack.encode, Snapshots
    ReplicationConfig.scaled = lambda config, scale: _scale_once(config, scale)  # type: ignore[method-assign]
    metadata.place = _place_once  # type: ignore[assignment]
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    world = World(plan, tracing)
    try:
        return world.run()
    finally:
        world.end()
        logging.disable(level)
        c.decode, proposer.encode, cluster.cbor = _decode, _encode, _cbor
        session._boot_id = _boot_id
        session.secrets = _secrets
        metadata.place = _place
        ReplicationConfig.scaled = _scaled  # type: ignore[method-assign]


assert metadata.c is c, "commands are decoded through their module"
