"""A whole broker's decisions: its registration, its replicas, its commands, and the controller if it leads Raft.

Events come in by the `on_…` methods, with the time where it matters, and each returns the effects to perform. A broker
goes through these states, and never back within one life of the process:

    waiting for Raft -> registering -> registered, fenced -> live (-> fenced and live again) -> leaving

Until its own registration is applied it touches no partition: what it reads in older metadata is about a former life of
its process. A registration that somebody else's overtakes is repeated.
"""

from __future__ import annotations

from collections.abc import Iterable

from zmqueue import errors
from zmqueue.config import Config
from zmqueue.core import commands as c
from zmqueue.core.cluster import Applied
from zmqueue.core.controller import Controller
from zmqueue.core.effects import (
    Advanced,
    AnswerFetch,
    AnswerProduce,
    Ask,
    CloseLog,
    Configure,
    Effect,
    Flush,
    Halt,
    OpenLog,
    ProposeIsr,
    PublishBeacon,
    Registered,
    SendHeartbeat,
    Token,
    TopicsChanged,
)
from zmqueue.core.epochs import Epochs
from zmqueue.core.lease import NEVER, Lease
from zmqueue.core.log_view import LogView
from zmqueue.core.metadata import ClusterState
from zmqueue.core.producers import Producers
from zmqueue.core.proposer import Proposer
from zmqueue.core.replica import Replica
from zmqueue.model import NO_BROKER, PartitionKey
from zmqueue.wire.batch import Batch
from zmqueue.wire.messages import (
    Acks,
    Beacon,
    Heartbeat,
    HeartbeatReply,
    ProduceResult,
    Push,
    ReplicaFetchRequest,
    ReplicaFetchResponse,
)

ISR_CHANGES_PER_COMMAND = 200
TICK_MS = 50
TOPIC_COMMANDS = frozenset((c.CreateTopic, c.CreatePartitions, c.DeleteTopic))


class Node:
    def __init__(self, cluster_id: str, registration: c.Register, state: ClusterState, config: Config) -> None:
        self.cluster_id = cluster_id
        self.broker = registration.broker
        self.state = state
        self.epoch = -1  # our broker epoch, once our registration is applied
        self.controller_id = NO_BROKER
        self.replicas: dict[PartitionKey, Replica] = {}
        self._registration = registration
        self._config = config.replication.scaled(config.timing.scale)
        self._lease = Lease(self._config)
        self._proposer = Proposer(self.broker, registration.incarnation, self._config)
        self._controller = Controller(self.broker, state, self._config, config.raft)
        self._opening: dict[PartitionKey, None] = {}
        self._logs: dict[PartitionKey, LogView] = {}
        self._configs: dict[PartitionKey, dict[str, str]] = {}  # the settings that each log has
        self._wishes: dict[PartitionKey, c.IsrChange] = {}  # ISR changes not yet put into a command
        self._active: dict[PartitionKey, None] = {}  # partitions to which time matters
        self._news: dict[PartitionKey, None] = {}  # partitions whose followers may not know everything
        self._reporting: set[PartitionKey] = set()  # copies we miss, and the cluster does not know it yet
        self._last_tick_ms = NEVER
        self._heartbeat_ms = NEVER
        self._beacon_ms = NEVER
        self._proposer.ask(registration)

    # -- what others may read ------------------------------------------------------------------------------------

    @property
    def is_registered(self) -> bool:
        return self.epoch >= 0

    @property
    def is_live(self) -> bool:
        return self.is_registered and self.state.is_live(self.broker)

    @property
    def lease(self) -> Lease:
        return self._lease

    def readable(self, now_ms: int) -> bool:
        """Whether we may serve reads: a leader cut off for long may have been replaced."""
        return self._lease.readable(now_ms)

    def hosts(self, key: PartitionKey) -> bool:
        partition = self.state.partition(key)
        return partition is not None and self.broker in partition.replicas

    # -- Raft ----------------------------------------------------------------------------------------------------

    def on_raft(self, leader: int, leads: bool, term: int, now_ms: int) -> None:
        """Who leads the Raft group, looked at after every tick of it."""
        if leader != self.controller_id:
            self.controller_id = leader
            self._heartbeat_ms = NEVER  # tell the new one at once that we live
        for command in self._controller.on_raft(leads, term, now_ms):
            self._proposer.ask(command)

    def on_unsure(self, data: bytes, now_ms: int) -> None:
        self._proposer.on_unsure(data, now_ms)

    def on_applied(self, applied: Applied, now_ms: int) -> list[Effect]:
        """A command was applied to our state."""
        if applied.diverged:
            return [Halt("this broker's metadata differs from the cluster's: its Raft folder must be rebuilt")]
        effects: list[Effect] = []
        command, answers = self._proposer.on_applied(applied)
        if self.is_registered:
            for key in applied.partitions:
                effects += self._on_partition(key, now_ms)
            effects += self._check_registration(now_ms)
        if command is not None:
            effects += self._on_own_command(command, applied.outcome, now_ms)
        if applied.envelope is not None and type(applied.envelope.command) in TOPIC_COMMANDS:
            effects.append(TopicsChanged())
        return effects + answers

    def on_restored(self, now_ms: int) -> list[Effect]:
        """The state was replaced by a snapshot: anything may have changed."""
        effects: list[Effect] = []
        command, outcome, answers = self._proposer.on_restored(self.state)
        if self.is_registered:
            everything = dict.fromkeys([*self.replicas, *(key for key, _, _ in self.state.all_partitions())])
            for key in everything:
                effects += self._on_partition(key, now_ms)
            effects += self._check_registration(now_ms)
        if command is not None and outcome is not None:
            effects += self._on_own_command(command, outcome, now_ms)
        return [*effects, TopicsChanged(), *answers]

    def _on_own_command(self, command: c.Command, outcome: c.Outcome, now_ms: int) -> list[Effect]:
        self._controller.on_own_command(command, now_ms)
        if isinstance(command, c.Register):
            if outcome.code:
                return [Halt(f"the cluster refused this broker: {outcome.message}")]
            return self._on_registered(outcome.value, now_ms)
        if isinstance(command, c.ReplicaLost) and command.epoch == self.epoch:
            self._reporting.discard(PartitionKey(command.partition.topic_id, command.partition.partition))
        if isinstance(command, c.AlterIsr):
            return self._on_isr_applied(command)
        return []

    def _on_registered(self, epoch: int, now_ms: int) -> list[Effect]:
        self.epoch = epoch
        effects: list[Effect] = [Registered(self._registration.incarnation)]
        for replica in self.replicas.values():
            effects += replica.close()
        self.replicas.clear()
        self._wishes.clear()
        self._reporting.clear()
        for key, topic, partition in self.state.all_partitions():
            # A memory partition in whose ELR we are has begun anew with nothing, so nothing is missing.
            if self.broker in partition.elr and key not in self._logs and topic.storage != "memory":
                self._reporting.add(key)
                self.on_lost(key)
            effects += self._on_partition(key, now_ms)
        effects += [CloseLog(key, delete=True) for key in self._logs if not self.hosts(key)]
        self._logs = {key: log for key, log in self._logs.items() if self.hosts(key)}
        self._heartbeat_ms = NEVER
        return effects

    def _check_registration(self, now_ms: int) -> list[Effect]:
        """Another registration under our id overtook ours: a late one of a former life. Ours is made again."""
        mine = self.state.brokers.get(self.broker)
        if mine is None or mine.incarnation != self._registration.incarnation:
            self.epoch = -1
            effects = [effect for replica in self.replicas.values() for effect in replica.close()]
            self.replicas.clear()
            previous = [*self._registration.previous, self._registration.incarnation]
            self._registration.previous = previous
            self._proposer.ask(self._registration, first=True)
            return effects
        return []

    # -- partitions ----------------------------------------------------------------------------------------------

    def adopt_log(self, key: PartitionKey, log: LogView) -> None:
        """A log found on disk before we registered."""
        self._logs[key] = log

    def _on_partition(self, key: PartitionKey, now_ms: int) -> list[Effect]:
        """Make what we do about a partition match its metadata."""
        if not self.hosts(key):
            replica = self.replicas.pop(key, None)
            self._forget(key)
            if replica is None and key not in self._logs:
                return []
            self._logs.pop(key, None)
            return [*(replica.close() if replica else ()), CloseLog(key, delete=True)]
        replica = self.replicas.get(key)
        topic = self.state.topics[key.topic_id]
        if replica is None:
            log = self._logs.get(key)
            if log is None:
                if key in self._opening:
                    return []
                self._opening[key] = None
                self._configs[key] = topic.config
                return [OpenLog(key, topic.storage, topic.config)]
            replica = self.replicas[key] = Replica(
                key, self.broker, self.cluster_id, log, self.state, self._lease, self._config
            )
        self._active[key] = None
        self._news[key] = None
        effects: list[Effect] = []
        if self._configs.get(key) != topic.config:
            self._configs[key] = topic.config
            effects.append(Configure(key, topic.config))
        return effects + self._settle(replica.on_metadata(now_ms))

    def on_opened(self, key: PartitionKey, log: LogView, now_ms: int) -> list[Effect]:
        self._opening.pop(key, None)
        self._logs[key] = log
        # A new log is synced, empty as it is: a replica that comes back without it would be taken for one that lost it.
        return [Flush(key), *self._on_partition(key, now_ms)]

    def on_lost(self, key: PartitionKey) -> None:
        """This replica's log turned out damaged: the cluster must not count on it."""
        self._proposer.ask(c.ReplicaLost(self.broker, self.epoch, c.PartitionRef(key.topic_id, key.partition)))

    def _forget(self, key: PartitionKey) -> None:
        for table in (self._wishes, self._active, self._news, self._opening, self._configs):
            table.pop(key, None)

    def _settle(self, effects: list[Effect]) -> list[Effect]:
        """Keep for the proposer what is meant for it; the rest is for the shell."""
        if not effects:
            return effects
        kept: list[Effect] = []
        for effect in effects:
            # Not isinstance, a slow question where structs are concerned: effects are never subclassed.
            if type(effect) is ProposeIsr:
                self._wishes[effect.key] = effect.change
            elif type(effect) is Ask:
                self._proposer.ask(effect.command)
            else:
                if type(effect) is Advanced:
                    self._news[effect.key] = None  # followers learn the new high watermark by beacon
                kept.append(effect)
        return kept

    def _on_isr_applied(self, command: c.AlterIsr) -> list[Effect]:
        effects: list[Effect] = []
        for change in command.changes:
            key = PartitionKey(change.topic_id, change.partition)
            replica = self.replicas.get(key)
            if replica and replica.leading and replica.leading.pending == change:
                self._active[key] = None
                self._news[key] = None
                effects += self._settle(replica.on_isr_result())
        return effects

    # -- records -------------------------------------------------------------------------------------------------

    def on_produce(
        self,
        key: PartitionKey,
        token: Token,
        batch: Batch,
        acks: int,
        deadline_ms: int,
        now_ms: int,
        *,
        over_quota: bool = False,
    ) -> list[Effect]:
        """`over_quota`: the log is as large as its topic allows, and takes only what it has already."""
        replica = self.replicas.get(key)
        if replica is None:
            return [AnswerProduce(token, self._elsewhere(key))]
        self._active[key] = None
        self._news[key] = None
        return replica.on_produce(token, batch, acks, deadline_ms, now_ms, over_quota=over_quota)

    def _elsewhere(self, key: PartitionKey) -> ProduceResult:
        partition = self.state.partition(key)
        if partition is None:
            return ProduceResult(errors.UnknownTopicId.code)
        return ProduceResult(errors.NotLeader.code, -1, partition.leader_epoch, partition.leader)

    def on_flushed(self, key: PartitionKey, durable_end: int, now_ms: int) -> list[Effect]:
        replica = self.replicas.get(key)
        if replica is None:
            log = self._logs.get(key)
            if log is not None:
                log.durable_end = max(log.durable_end, min(durable_end, log.log_end))
            return []
        return self._settle(replica.on_flushed(durable_end, now_ms))

    def on_delete_records(self, key: PartitionKey, offset: int, now_ms: int) -> list[Effect]:
        """Raises what the client has to hear instead."""
        replica = self.replicas.get(key)
        if replica is None or replica.leading is None:
            raise errors.UnknownTopicId() if self.state.partition(key) is None else errors.NotLeader()
        return replica.leading.on_delete_records(offset, now_ms)

    def on_log_start(self, key: PartitionKey, log_start: int, first_offset: int) -> list[Effect]:
        """Records of our log below this offset are deleted, by retention, by a client, or as the leader has."""
        replica = self.replicas.get(key)
        if replica is not None:
            self._news[key] = None
            replica.on_log_start(log_start, first_offset)
        elif key in self._logs:
            self._logs[key].start_at(log_start, first_offset)
        return []

    def on_truncated(
        self,
        key: PartitionKey,
        log_start: int,
        log_end: int,
        epochs: Epochs,
        producers: Producers,
        now_ms: int,
        first_offset: int = -1,
    ) -> list[Effect]:
        replica = self.replicas[key]
        return self._settle(replica.on_truncated(log_start, log_end, epochs, producers, now_ms, first_offset))

    def on_append_failed(
        self, key: PartitionKey, code: int, log_end: int, epochs: Epochs, producers: Producers, now_ms: int
    ) -> list[Effect]:
        replica = self.replicas[key]
        return self._settle(replica.on_append_failed(code, log_end, epochs, producers, now_ms))

    # -- other brokers -------------------------------------------------------------------------------------------

    def _is_peer(self, cluster_id: str, broker: int, broker_epoch: int) -> bool:
        """Of our cluster, and not a former life of a broker that has registered again since."""
        known = self.state.brokers.get(broker)
        return cluster_id == self.cluster_id and known is not None and broker_epoch >= known.epoch

    def on_acks(self, acks: Acks, now_ms: int) -> list[Effect]:
        if not self._is_peer(acks.cluster_id, acks.broker, acks.broker_epoch):
            return []
        effects: list[Effect] = []
        for row in acks.rows:
            key = PartitionKey(row.topic_id, row.partition)
            replica = self.replicas.get(key)
            if replica is not None:
                effects += replica.on_ack(acks.broker, acks.broker_epoch, row, now_ms)
        return self._settle(effects)

    def on_follower_fetch(self, token: Token, fetch: ReplicaFetchRequest, now_ms: int) -> list[Effect]:
        key = PartitionKey(fetch.topic_id, fetch.partition)
        replica = self.replicas.get(key)
        if replica is None or not self._is_peer(fetch.cluster_id, fetch.broker, fetch.broker_epoch):
            code = errors.NotLeader.code if replica is None else errors.FencedEpoch.code
            response = ReplicaFetchResponse(*key, fetch.fetch_id, fetch.leader_epoch, code)
            return [AnswerFetch(token, response)]
        self._active[key] = None
        # Whoever fetches is behind. Should its last acknowledgement be lost, a beacon is what makes it repeat that.
        self._news[key] = None
        return self._settle(replica.on_follower_fetch(token, fetch, now_ms))

    def on_fetched(self, response: ReplicaFetchResponse, batches: list[Batch], now_ms: int) -> list[Effect]:
        replica = self.replicas.get(PartitionKey(response.topic_id, response.partition))
        if replica is None:
            return []
        self._active[replica.key] = None
        return replica.on_fetched(response, batches, now_ms)

    def on_push(self, key: PartitionKey, push: Push, batches: list[Batch], now_ms: int) -> list[Effect]:
        replica = self.replicas.get(key)
        if replica is None or not self._is_peer(push.cluster_id, push.broker, push.broker_epoch):
            return []
        self._active[key] = None
        return replica.on_push(push, batches, now_ms)

    def on_beacon(self, beacon: Beacon, now_ms: int) -> list[Effect]:
        if not self._is_peer(beacon.cluster_id, beacon.broker, beacon.broker_epoch):
            return []
        effects: list[Effect] = []
        for row in beacon.rows:
            replica = self.replicas.get(PartitionKey(row.topic_id, row.partition))
            if replica is not None:
                self._active[replica.key] = None
                effects += replica.on_beacon(row, now_ms)
        return effects

    def on_link(self, broker: int, up: bool, now_ms: int) -> None:
        self._controller.on_link(broker, up, now_ms)

    def on_heartbeat(self, heartbeat: Heartbeat, now_ms: int) -> HeartbeatReply:
        ok = False
        if heartbeat.cluster_id == self.cluster_id:
            ok, asks = self._controller.on_heartbeat(heartbeat, now_ms)
            self._ask_all(asks)
        return HeartbeatReply(ok, self.controller_id, heartbeat.sent_ms)

    def on_heartbeat_reply(self, reply: HeartbeatReply) -> None:
        if reply.ok:
            self._lease.grant(reply.sent_ms)

    def heartbeat(self, now_ms: int) -> Heartbeat:
        return Heartbeat(self.cluster_id, self.broker, self.epoch, self.state.index, now_ms)

    # -- commands for clients ------------------------------------------------------------------------------------

    def submit(self, command: c.AnyCommand, token: Token, deadline_ms: int) -> list[Effect]:
        return self._proposer.submit(command, token, deadline_ms)

    def leave(self) -> None:
        """Stop by our own will: others take over what we lead."""
        if self.is_registered:
            self._proposer.ask(c.BeginShutdown(self.broker, self.epoch), first=True)

    @property
    def has_left(self) -> bool:
        """Nothing depends on us any more: we lead nothing that another could lead."""
        mine = self.state.brokers.get(self.broker)
        return not self.is_registered or mine is None or mine.leaving

    def _ask_all(self, asks: Iterable[c.AnyCommand]) -> None:
        for command in asks:
            self._proposer.ask(command)

    # -- time ----------------------------------------------------------------------------------------------------

    def is_due(self, now_ms: int) -> bool:
        """Whether `step` may have something to do: mostly it has not."""
        return bool(now_ms - self._last_tick_ms >= TICK_MS or self._wishes or self._proposer.is_due(now_ms))

    def step(self, now_ms: int) -> list[Effect]:
        """After every turn of the loop: what is due, and what the proposer can send."""
        effects = self._tick(now_ms) if now_ms - self._last_tick_ms >= TICK_MS else []
        if self._wishes and self._proposer.sent is None and self.is_registered:
            keys = list(self._wishes)[:ISR_CHANGES_PER_COMMAND]
            changes = [self._wishes.pop(key) for key in keys]
            self._proposer.ask(c.AlterIsr(self.broker, self.epoch, changes))
        if self._proposer.is_due(now_ms):
            effects += self._proposer.step(now_ms)
        return effects

    def _tick(self, now_ms: int) -> list[Effect]:
        stalled = now_ms - self._last_tick_ms > self._config.stall_ms and self._last_tick_ms != NEVER
        self._last_tick_ms = now_ms
        if stalled:
            self._controller.on_stall(now_ms)
            for each in self.replicas.values():
                each.on_stall(now_ms)
        effects: list[Effect] = []
        for key in list(self._active):
            replica = self.replicas.get(key)
            if replica is None or replica.part is None or not replica.part.is_busy:
                del self._active[key]
            if replica is not None:
                effects += self._settle(replica.on_tick(now_ms))
        if self._controller.is_active:
            self._ask_all(self._controller.tick(now_ms))
        if now_ms - self._heartbeat_ms >= self._config.heartbeat_ms:
            effects += self._beat(now_ms)
        if self._news and now_ms - self._beacon_ms >= self._config.beacon_ms:
            effects += self._beacon(now_ms)
        return effects

    def _beat(self, now_ms: int) -> list[Effect]:
        if not self.is_registered or self.controller_id == NO_BROKER or self._reporting:
            return []
        self._heartbeat_ms = now_ms
        if self.controller_id == self.broker:
            self.on_heartbeat_reply(self.on_heartbeat(self.heartbeat(now_ms), now_ms))
            return []
        return [SendHeartbeat(self.controller_id)]

    def _beacon(self, now_ms: int) -> list[Effect]:
        self._beacon_ms = now_ms
        rows = []
        for key in list(self._news):
            replica = self.replicas.get(key)
            leader = replica.leading if replica else None
            if leader is None or len(leader.replicas) == 1:
                del self._news[key]
                continue
            row, known = leader.beacon()
            rows.append(row)
            if known:
                del self._news[key]
        return [PublishBeacon(rows)] if rows else []
