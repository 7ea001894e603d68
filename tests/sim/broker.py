"""One simulated broker: the production node, executor, partition logs and data folder, around a simulated machine.

It is the twin of `zmqueue.broker.server.Broker`. Only what that class gets from outside is replaced: sockets
by `Network`, Raft by `SimRaft`, the flush thread by `SimFlusher`, files by `Disk`, time by the world's clock. A turn is
one event, what is due by time, and the end of the turn, in the order of the real loop.

A process that meets an error which the real one does not handle ends, as the real one does, and is started again later.
A failed assertion is a violation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tests.sim.disk import Crashed, Disk
from zmqueue.broker.executor import Executor, Fatal, Follow
from zmqueue.broker.fetches import Fetches
from zmqueue.broker.logs import Logs
from zmqueue.broker.maintenance import Maintenance
from zmqueue.config import Config
from zmqueue.core import commands as c
from zmqueue.core import effects as e
from zmqueue.core.cluster import Applied
from zmqueue.core.leader import Leader
from zmqueue.core.metadata import ClusterState
from zmqueue.core.node import Node
from zmqueue.errors import StorageFailed, ZmqueueError
from zmqueue.log import session
from zmqueue.log.flusher import Flushed
from zmqueue.log.memory import MemoryFiles
from zmqueue.log.partition_log import PartitionLog
from zmqueue.log.session import DataFolder
from zmqueue.model import NO_BROKER, PartitionKey
from zmqueue.wire.batch import Batch, split
from zmqueue.wire.messages import (
    AckRow,
    Acks,
    Beacon,
    BeaconRow,
    FetchRequest,
    FetchResponse,
    Heartbeat,
    HeartbeatReply,
    ProduceResult,
    Push,
    ReplicaFetchRequest,
    ReplicaFetchResponse,
)

if TYPE_CHECKING:
    from tests.sim.world import World

CLUSTER = "simulated"
FOLDER = "/data"
RAFT_LOOK_MS = 100
Mirror = list[tuple[int, int, int, int]]  # epoch, producer, sequence and checksum of each record, by offset


class SimFlusher:
    """The flush thread in virtual time: one round at a time, all that gathers meanwhile goes into the next."""

    def __init__(self, broker: SimBroker, mode: str) -> None:
        self._broker = broker
        self._mode = mode
        self._queued: dict[PartitionKey, Flushed] = {}
        self._busy = False
        self.completed: list[Flushed] = []
        self.failed: ZmqueueError | None = None

    def submit(self, key: Any, log: PartitionLog) -> None:
        if self.failed is not None:
            raise StorageFailed(f"no more is synced after: {self.failed}")
        ticket = log.begin_flush()
        now = ticket.empty or self._mode == "os"
        if now or self._mode == "interval":
            self.completed.append(Flushed(key, log, ticket if now else log.begin_flush()))
            if len(self.completed) == 1:
                self._broker.later(0, self._woken)
        if now:
            return
        replaced = self._queued.get(key)
        self._queued[key] = Flushed(key, log, ticket)
        if replaced is not None:
            replaced.ticket.release()
        if not self._busy:
            self._begin()

    def drain(self) -> list[Flushed]:
        done, self.completed = self.completed, []
        return done

    def _woken(self) -> None:
        """The turn that this event makes looks at what is completed."""

    def _begin(self) -> None:
        broker = self._broker
        self._busy = True
        round_, self._queued = list(self._queued.values()), {}
        early = broker.world.random() < 0.5
        if early:
            # The disk is done soon, and the loop hears of it late.
            broker.later(1, self._sync, round_)
        broker.later(broker.fsync_ms(), self._done, round_, early)

    def _sync(self, round_: list[Flushed]) -> None:
        for item in round_:
            if self.failed is None:
                try:
                    item.ticket.sync()
                except ZmqueueError as error:
                    item.ticket.error = self.failed = error

    def _done(self, round_: list[Flushed], synced: bool) -> None:
        if not synced:
            self._sync(round_)
        self.completed += [item for item in round_ if item.ticket.synced or item.ticket.error]
        self._busy = False
        if self._queued and self.failed is None:
            self._begin()


class SimLogs(Logs):
    """The production `Logs` on a simulated disk."""

    def __init__(self, broker: SimBroker, config: Config) -> None:
        self._folder = f"{FOLDER}/partitions"
        self._config = config.log
        self._disk = broker.disk
        self._memory = MemoryFiles()
        self._open = {}
        self._damaged = set()
        self.flusher: Any = SimFlusher(broker, config.log.fsync)


class SimPeers:
    """The production `Peers` without frames: messages travel as objects."""

    def __init__(self, broker: SimBroker) -> None:
        self._broker = broker
        self._network = broker.world.network
        self._acks: dict[int, dict[PartitionKey, AckRow]] = {}
        self.follows: set[PartitionKey] = set()

    def send_heartbeat(self, controller: int, heartbeat: Heartbeat) -> None:
        self._network.send(self._broker, controller, SimBroker.on_heartbeat, self._address, heartbeat)

    @property
    def _address(self) -> tuple[int, int]:
        return self._broker.id, self._broker.life

    def send_fetch(self, leader: int, request: ReplicaFetchRequest) -> None:
        self._network.send(self._broker, leader, SimBroker.on_follower_fetch, self._address, request)

    def add_ack(self, leader: int, key: PartitionKey, leader_epoch: int, durable_end: int) -> None:
        self._acks.setdefault(leader, {})[key] = AckRow(key.topic_id, key.partition, leader_epoch, durable_end)

    def send_acks(self, broker_epoch: int) -> None:
        if self._acks:
            for leader, rows in self._acks.items():
                acks = Acks(CLUSTER, self._broker.id, broker_epoch, list(rows.values()))
                self._network.send(self._broker, leader, SimBroker.on_acks, acks)
            self._acks.clear()

    def answer(self, token: tuple[int, int], response: ReplicaFetchResponse, data: bytes = b"") -> None:
        self._network.reply(self._broker, token, SimBroker.on_fetched, response, data)

    def publish(self, effect: e.Publish, broker_epoch: int) -> None:
        push = Push(
            CLUSTER,
            self._broker.id,
            broker_epoch,
            effect.leader_epoch,
            effect.base_offset,
            effect.prev_epoch,
            effect.high_watermark,
            effect.log_end,
        )
        for other in self._broker.world.brokers:
            if other.alive and effect.key in other.peers.follows:
                self._network.publish(self._broker, other.id, SimBroker.on_push, effect.key, push, effect.batches)

    def publish_beacon(self, rows: list[BeaconRow], broker_epoch: int) -> None:
        beacon = Beacon(CLUSTER, self._broker.id, broker_epoch, rows)
        for other in self._broker.world.brokers:
            if other is not self._broker:
                self._network.publish(self._broker, other.id, SimBroker.on_beacon, beacon)

    def follow(self, key: PartitionKey, on: bool) -> None:
        (self.follows.add if on else self.follows.discard)(key)


class SimHandlers:
    """Where the answers to clients go."""

    def __init__(self, broker: SimBroker, node: Node, logs: Logs, config: Config) -> None:
        self._broker = broker
        self.fetches = Fetches(node, logs, config.broker, self._reply)

    def on_produced(self, token: Any, result: ProduceResult) -> None:
        producer, batch = token
        self._broker.world.checker.on_answer(self._broker, producer, batch, result)
        producer.hear(batch, result)

    def on_command(self, token: Any, outcome: c.Outcome) -> None:
        """Nobody waits."""

    def on_leading(self, key: PartitionKey) -> None:
        """No groups live here."""

    def on_topics(self) -> None:
        """No groups live here."""

    def on_moved(self, key: PartitionKey) -> None:
        self.fetches.on_moved(key, self._broker.clock())

    def _reply(self, token: Any, response: FetchResponse, frames: list[bytes]) -> None:
        token.hear(self._broker, response, frames)


class SimExecutor(Executor):
    """The production executor; what it did is shown to the checker."""

    broker: SimBroker

    def _append(self, effect: e.Append) -> Follow:
        follow = super()._append(effect)
        broker = self.broker
        broker.touched[effect.key] = None
        if effect.key not in self._failed:
            extend(broker.mirrors[effect.key], effect.batches)
        return follow

    def _truncate(self, effect: e.Truncate) -> Follow:
        follow = super()._truncate(effect)
        self._cut(effect.key)
        return follow

    def _reset(self, effect: e.Reset) -> Follow:
        follow = super()._reset(effect)
        self._cut(effect.key)
        return follow

    def _cut(self, key: PartitionKey) -> None:
        broker = self.broker
        broker.touched[key] = None
        log = broker.logs[key]
        mirror = broker.mirrors[key]
        del mirror[log.log_end :]
        mirror[: log.first_offset] = broker.world.checker.deleted(broker, key)
        broker.world.checker.on_truncated(broker, key)

    def _delete_before(self, effect: e.DeleteBefore) -> Follow:
        follow = super()._delete_before(effect)
        self.broker.touched[effect.key] = None
        self.broker.world.checker.deleted(self.broker, effect.key)
        return follow

    def _open_log(self, effect: e.OpenLog) -> Follow:
        follow = super()._open_log(effect)
        if self.broker.logs.get(effect.key) is not None:
            self.broker.mirror(effect.key)
        return follow

    def _close_log(self, effect: e.CloseLog) -> Follow:
        self.broker.mirrors.pop(effect.key, None)
        self.broker.touched.pop(effect.key, None)
        return super()._close_log(effect)

    def _flush(self, effect: e.Flush) -> Follow:
        broker = self.broker
        replica = broker.node.replicas.get(effect.key)
        if replica is not None and type(replica.part) is Leader:
            broker.world.checker.on_leading(broker, effect.key, replica.part.epoch)
        return super()._flush(effect)

    def _moved(self, effect: e.Moved) -> Follow:
        """Fetches are answered by this: a new leader may have committed what they read just now."""
        broker = self.broker
        replica = broker.node.replicas.get(effect.key)
        if replica is not None and type(replica.part) is Leader:
            broker.world.checker.on_leading(broker, effect.key, replica.part.epoch)
            broker.world.checker.on_advanced(broker, effect.key)
        return super()._moved(effect)

    def _advanced(self, effect: e.Advanced) -> Follow:
        self.broker.world.checker.on_advanced(self.broker, effect.key)
        return super()._advanced(effect)


def extend(mirror: Mirror, batches: Iterable[Batch]) -> None:
    for header, _ in batches:
        epoch, producer, first, crc = header.leader_epoch, header.producer_id, header.base_sequence, header.body_crc
        mirror += [(epoch, producer, first + nth, crc) for nth in range(header.last_offset_delta + 1)]


class SimBroker:
    node: Node
    logs: SimLogs
    flusher: SimFlusher
    peers: SimPeers
    handlers: SimHandlers
    executor: SimExecutor

    def __init__(self, world: World, broker: int, config: Config) -> None:
        self.world = world
        self.id = broker
        self.config = config
        self.disk = Disk(world.chance)
        self.boot = 0
        self.life = 0
        self.alive = False
        self.paused = False
        self.leaving = False
        self.slow = False
        self.incarnation = 0
        self.power_after_crash = False
        self.mirrors: dict[PartitionKey, Mirror] = {}
        self.touched: dict[PartitionKey, None] = {}
        self.backlog: deque[tuple[int | None, Callable[..., None], tuple[Any, ...]]] = deque()
        self.skew_ms = 0
        self.now = 0  # by its own clock, at the present turn

    def __repr__(self) -> str:
        return f"broker {self.id}"

    # -- life and death

    def start(self) -> bool:
        """False: the process ended while it started."""
        world = self.world
        assert not self.alive
        self.life += 1
        self.skew_ms = int(world.random() * 1e6)
        self.now = world.now + self.skew_ms
        self.mirrors, self.touched = {}, {}
        self.leaving = False
        self.backlog.clear()
        self._part()
        session._boot_id = lambda: f"{self.id}/{self.boot}"
        session.secrets = world  # type: ignore[assignment]
        try:
            self._recover()
        except (Crashed, ZmqueueError):
            return False
        self.alive = True
        return True

    def _recover(self) -> None:
        world, config = self.world, self.config
        self.folder = DataFolder.open(FOLDER, CLUSTER, self.id, config.log.fsync, self.disk)
        self.logs = SimLogs(self, config)
        self.flusher = self.logs.flusher
        found = list(self.logs.recover(trusted=not self.folder.unclean))
        self.incarnation = world.chance.getrandbits(62)
        previous = list(self.folder.previous_incarnations)
        unclean = self.folder.unclean
        self.folder.begin(self.incarnation)
        lost = [c.PartitionRef(*key) for key in self.logs.damaged]
        registration = c.Register(
            self.id, self.incarnation, previous, self.folder.dir_id, "host", 1, 2, 3, unclean, lost
        )
        self.state = ClusterState()
        world.raft.restore(self)
        self.node = Node(CLUSTER, registration, self.state, config)
        for key, log in found:
            self.node.adopt_log(key, log)
            self.mirror(key)
        self.peers = SimPeers(self)
        self.handlers = SimHandlers(self, self.node, self.logs, config)
        self.executor = SimExecutor(self.node, self.logs, self.clock, self.propose, self._on_registered)
        self.executor.broker = self
        self.executor.bind(self.peers, self.handlers)  # type: ignore[arg-type]
        self.maintenance = Maintenance(self.node, self.logs, config.log, self.executor.run, lambda: world.now)
        self.raft_view = (NO_BROKER, False, 0)
        self.raft_heard_ms = self.raft_due_ms = world.now
        self.applying = False

    def mirror(self, key: PartitionKey) -> None:
        mirror = self.mirrors[key] = self.world.checker.deleted(self, key)
        for header in self.logs[key].headers():
            extend(mirror, [Batch(header, b"")])

    def _on_registered(self, incarnation: int) -> None:
        self.folder.confirm(incarnation)
        self.logs.damage_registered()

    def _part(self) -> None:
        """What is left of a process: its parts know each other, so that only the collector would find them."""
        for name in ("executor", "maintenance", "handlers", "logs", "flusher"):
            part = getattr(self, name, None)
            if part is not None:
                vars(part).clear()

    def end(self) -> None:
        self._part()
        vars(self).clear()

    def stop_cleanly(self) -> None:
        for log in self.logs._open.values():
            log.close()
        self.folder.close(True)

    # -- turns

    def clock(self) -> int:
        return self.now

    def later(self, delay_ms: int, handle: Callable[..., None], *args: Any) -> None:
        """An event of this process: it dies with it."""
        self.world.at(delay_ms, self, self.life, handle, args)

    def turn(self, life: int | None, handle: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.alive or (life is not None and life != self.life):
            return
        if self.paused:
            self.backlog.append((life, handle, args))
            return
        now = self.now = self.world.now + self.skew_ms
        try:
            handle(*args)
            node, executor = self.node, self.executor
            if self.flusher.completed:
                for done in self.flusher.completed:
                    if done.key in self.mirrors:
                        self.touched[done.key] = None
                executor.on_flushed()
            # Most turns have nothing due, and nothing to hand over: the calls would do nothing.
            if node.is_due(now):
                if self.world.now >= self.raft_due_ms:
                    self._look_at_raft()
                executor.run(node.step(now))
            if executor._dirty or self.peers._acks or executor._unopened:
                executor.end_turn()
        except Crashed:
            self.world.died(self, self.power_after_crash)
        except (Fatal, ZmqueueError) as error:
            self.world.note(self, "ends", error)
            self.world.died(self, False)
        else:
            if self.touched:
                self.world.checker.after_turn(self)

    def fsync_ms(self) -> int:
        return int(self.world.random() * (400 if self.slow else 6)) + 1

    def tick(self) -> None:
        world = self.world
        self._look_at_raft()
        if self.state.index < len(world.raft.entries):
            world.raft.wake(self)
        now = self.now
        self.handlers.fetches.on_tick(now)
        if world.forgets:
            self._maintain(now)
        if self.leaving and self.node.has_left:
            self.world.leave(self)
            return
        self.later(50 + int(world.random() * 40), self.tick)

    def _maintain(self, now: int) -> None:
        self.maintenance.on_tick(now)
        for key, log in self.logs._open.items():
            if log.first_offset and key in self.mirrors:
                self.touched[key] = None
                self.world.checker.deleted(self, key)

    # -- Raft

    def _look_at_raft(self) -> None:
        """Now and then, and after a pause before anything that is due by time: what was believed may be long over."""
        self.raft_due_ms = self.world.now + RAFT_LOOK_MS
        leader, leads, term = self.world.raft.view(self)
        self.node.on_raft(leader, leads, term, self.now)

    def propose(self, data: bytes) -> None:
        self.world.raft.propose(self, data)

    def on_unsure(self, data: bytes) -> None:
        self.node.on_unsure(data, self.now)

    def on_news(self, news: list[Applied | None]) -> None:
        now = self.now
        for applied in news:
            self.executor.run(self.node.on_restored(now) if applied is None else self.node.on_applied(applied, now))

    # -- messages: called with the broker that receives

    def on_heartbeat(self, token: tuple[int, int], heartbeat: Heartbeat) -> None:
        reply = self.node.on_heartbeat(heartbeat, self.now)
        self.world.network.reply(self, token, SimBroker.on_heartbeat_reply, reply)

    def on_heartbeat_reply(self, reply: HeartbeatReply) -> None:
        self.node.on_heartbeat_reply(reply)

    def on_acks(self, acks: Acks) -> None:
        self.executor.run(self.node.on_acks(acks, self.now))

    def on_follower_fetch(self, token: tuple[int, int], fetch: ReplicaFetchRequest) -> None:
        self.executor.run(self.node.on_follower_fetch(token, fetch, self.now))

    def on_fetched(self, response: ReplicaFetchResponse, data: bytes) -> None:
        self.executor.run(self.node.on_fetched(response, list(split(data)), self.now))

    def on_push(self, key: PartitionKey, push: Push, batches: list[Batch]) -> None:
        if key in self.peers.follows:
            self.executor.run(self.node.on_push(key, push, batches, self.now))

    def on_beacon(self, beacon: Beacon) -> None:
        self.executor.run(self.node.on_beacon(beacon, self.now))

    def on_link(self, broker: int, up: bool) -> None:
        self.node.on_link(broker, up, self.now)

    # -- clients

    def on_produce(self, key: PartitionKey, token: Any, batch: Batch, acks: int, timeout_ms: int) -> None:
        now = self.now
        self.executor.run(self.node.on_produce(key, token, batch, acks, now + timeout_ms, now))

    def on_fetch(self, token: Any, request: FetchRequest) -> None:
        self.handlers.fetches.on_fetch(token, request, self.now)

    def on_delete_records(self, key: PartitionKey, where: int) -> None:
        """Up to some offset below the high watermark, if this broker leads."""
        replica = self.node.replicas.get(key)
        if replica is None or replica.leading is None:
            return
        offset = where % (replica.log.high_watermark + 1)
        try:
            effects = self.node.on_delete_records(key, offset, self.now)
        except ZmqueueError as error:
            self.world.note(self, "deletes nothing", error)
            return
        self.executor.run(effects)

    def on_command(self, command: c.AnyCommand) -> None:
        self.executor.run(self.node.submit(command, None, self.now + 2_000))
