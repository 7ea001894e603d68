"""The cluster's metadata as one state machine: brokers, topics, who leads each partition, who is in sync.

`ClusterState.apply` is total and deterministic. It never raises, reads no clock and draws no number; every broker that
applies the same commands holds the same state, and `hash` proves it. A command that does not fit (an older epoch, an
unknown topic) changes nothing and its outcome says why.

Invariants of a partition, after every command:
- leader is NO_BROKER or an unfenced member of isr; isr and elr are disjoint subsets of replicas;
- every member of isr is unfenced (a fenced broker leaves every ISR when it is fenced);
- every member of isr and elr holds every committed record: elr gains members only while |isr| < min_insync_replicas,
  during which the high watermark stands still, and is emptied as soon as the ISR is large enough again;
- leader_epoch grows with every election, partition_epoch with every change of leader, isr, elr or replicas.

Not here: when to fence whom (controller.py), what a replica does about it (replica.py), how it is stored (Raft).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from zmqueue import errors
from zmqueue.core import commands as c
from zmqueue.core import topic_config
from zmqueue.core.cluster import Applied, BrokerState, Cluster, Event, LastCommand, PartitionState, TopicState
from zmqueue.core.placement import place
from zmqueue.errors import ZmqueueError
from zmqueue.model import NO_BROKER, PartitionKey, check_topic_name

RETIRED_MAX = 64
DELETED_MAX = 1_000
PARTITIONS_PER_TOPIC_MAX = 100_000  # the wire numbers no more


class ClusterState(Cluster):
    def __init__(self) -> None:
        super().__init__()
        self._applied = Applied(None, c.Outcome())

    # -- applying ------------------------------------------------------------------------------------------------

    def apply(self, data: bytes) -> Applied:
        """One committed command. Total: whatever the bytes are, the result is an `Applied`."""
        self.index += 1
        self._applied = applied = Applied(None, c.Outcome())
        try:
            envelope = applied.envelope = c.decode(data)
        except errors.InvalidRequest as error:
            applied.outcome = _rejected(error)
            return applied
        last = self.last_commands.get(envelope.broker)
        same_life = last is not None and last.incarnation == envelope.incarnation
        if last is not None and same_life and envelope.number <= last.number:
            applied.duplicate = True
            stale = _rejected(errors.StaleCommand("a newer command of this broker was applied before"))
            applied.outcome = last.outcome if envelope.number == last.number else stale
            return applied
        if not same_life and not isinstance(envelope.command, c.Register):
            applied.outcome = _rejected(errors.StaleCommand("the proposer has not registered in this life"))
            return applied
        try:
            applied.outcome = c.Outcome(value=self._HANDLERS[type(envelope.command)](self, envelope.command))
        except ZmqueueError as error:
            applied.outcome = _rejected(error)
            if not same_life:
                # A late registration of a former life: the proposer is still whoever it was.
                return applied
        self.last_commands[envelope.broker] = LastCommand(
            envelope.broker, envelope.incarnation, envelope.number, applied.outcome
        )
        return applied

    # Handlers raise a ZmqueueError to refuse, and only before they have changed anything.

    def _register(self, command: c.Register) -> int:
        if command.broker == NO_BROKER:
            raise errors.InvalidRequest("a broker's id is not negative")
        known = self.brokers.get(command.broker)
        # One that was overtaken by such a late one, before the cluster knew better, says so by naming itself.
        if known is not None and command.incarnation in known.retired and command.incarnation not in command.previous:
            raise errors.StaleCommand("a later life of this broker has registered")
        epoch = known.epoch + 1 if known else 1
        unclean = command.unclean or (
            known is not None and (known.dir_id != command.dir_id or known.incarnation not in command.previous)
        )
        lost = {PartitionKey(ref.topic_id, ref.partition) for ref in command.lost}
        self.brokers[command.broker] = BrokerState(
            id=command.broker,
            epoch=epoch,
            fenced=True,
            leaving=False,
            dir_id=command.dir_id,
            incarnation=command.incarnation,
            retired=_retired(known, command),
            host=command.host,
            client_port=command.client_port,
            push_port=command.push_port,
            peer_port=command.peer_port,
            registered_index=self.index,
        )
        self._event("registered", command.broker, detail=f"epoch {epoch}{', unclean' if unclean else ''}")
        for key, topic, partition in self.all_partitions():
            if command.broker in partition.replicas:
                gone = unclean or key in lost or topic.storage == "memory"
                self._remove(key, topic, partition, {command.broker}, lost=gone)
        return epoch

    def _fence(self, command: c.Fence) -> None:
        fenced = {ref.broker for ref in command.brokers if self._is_current(ref) and self.is_live(ref.broker)}
        if not fenced:
            raise errors.StaleCommand("none of these brokers is live in that epoch")
        self._set_fenced(fenced)

    def _begin_shutdown(self, command: c.BeginShutdown) -> None:
        self._check_sender(command.broker, command.epoch)
        self.brokers[command.broker].leaving = True
        if self.is_live(command.broker):
            self._set_fenced({command.broker})

    def _set_fenced(self, fenced: set[int]) -> None:
        for broker in sorted(fenced):
            self.brokers[broker].fenced = True
            self.brokers[broker].registered_index = self.index
            self._event("fenced", broker)
        # All at once: brokers that fail together were in sync together, and each may bring the partition back.
        for key, topic, partition in self.all_partitions():
            if not fenced.isdisjoint(partition.replicas):
                self._remove(key, topic, partition, fenced)

    def _unfence(self, command: c.Unfence) -> None:
        self._check_sender(command.broker, command.epoch)
        broker = self.brokers[command.broker]
        if not broker.fenced or broker.leaving:
            raise errors.StaleCommand("the broker is live already, or leaving")
        broker.fenced = False
        self._event("unfenced", command.broker)
        for key, topic, partition in self.all_partitions():
            if command.broker not in partition.replicas:
                continue
            if partition.leader == NO_BROKER:
                self._elect(key, topic, partition)
            else:
                # Nothing has changed, but its leader may now take it into the ISR, and nothing else may remind it.
                self._applied.partitions[key] = None

    def _replica_lost(self, command: c.ReplicaLost) -> None:
        self._check_sender(command.broker, command.epoch)
        key, topic, partition = self._find(command.partition)
        if command.broker not in partition.replicas:
            raise errors.StaleCommand("the broker holds no replica of this partition")
        self._event("replica lost", command.broker, topic.name, key.partition)
        self._remove(key, topic, partition, {command.broker}, lost=True)

    def _alter_isr(self, command: c.AlterIsr) -> list[int]:
        """One code per change, in order: 0 accepted."""
        self._check_sender(command.broker, command.epoch)
        codes = []
        for change in command.changes:
            try:
                self._change_isr(command.broker, change)
                codes.append(0)
            except ZmqueueError as error:
                codes.append(error.code)
        return codes

    def _change_isr(self, leader: int, change: c.IsrChange) -> None:
        key, topic, partition = self._find(c.PartitionRef(change.topic_id, change.partition))
        if partition.leader != leader or partition.leader_epoch != change.leader_epoch:
            raise errors.FencedEpoch("the proposer no longer leads this partition")
        if partition.partition_epoch != change.partition_epoch:
            raise errors.StaleCommand("the partition has changed since this was proposed")
        wanted = [ref.broker for ref in change.isr]
        if leader not in wanted or len(set(wanted)) != len(wanted) or not set(wanted) <= set(partition.replicas):
            raise errors.InvalidRequest("an ISR holds the leader and replicas of the partition, once each")
        if not all(self._is_current(ref) and self.is_live(ref.broker) for ref in change.isr):
            raise errors.StaleCommand("a member was fenced or restarted since this was proposed")
        removed = set(partition.isr) - set(wanted)
        partition.isr = [b for b in partition.replicas if b in wanted]
        partition.lost = [b for b in partition.lost if b not in wanted]
        self._update_elr(topic, partition, removed)
        self._finish_move(key, topic, partition)
        self._changed(key, partition)
        self._event("isr", leader, topic.name, key.partition, f"{partition.isr}")

    def _elect_preferred(self, command: c.ElectPreferred) -> int:
        moved = 0
        for key, topic, partition in self.all_partitions():
            first = partition.replicas[0]
            if partition.leader not in (NO_BROKER, first) and first in partition.isr:
                self._lead(key, topic, partition, first)
                moved += 1
        return moved

    def _resign(self, command: c.Resign) -> None:
        self._check_sender(command.broker, command.epoch)
        key, topic, partition = self._find(command.partition)
        heirs = [b for b in partition.replicas if b in partition.isr and b != command.broker]
        if partition.leader != command.broker or partition.leader_epoch != command.leader_epoch or not heirs:
            raise errors.StaleCommand("the proposer does not lead this partition, or nobody can take it over")
        self._lead(key, topic, partition, heirs[0])

    def _heal(self, command: c.Heal) -> int:
        key, topic, partition = self._find(command.partition)
        if partition.partition_epoch != command.partition_epoch:
            raise errors.StaleCommand("the partition has changed since this was proposed")
        if not self.is_short(topic, partition):
            raise errors.StaleCommand("nothing to heal")
        dead = [b for b in partition.replicas if not self.is_live(b)]
        spare = [b for b in self.live_brokers() if b not in partition.replicas]
        if not spare:
            raise errors.InvalidReplicationFactor("no broker to spare")
        load = self._replica_counts()
        recruit = min(spare, key=lambda b: (load.get(b, 0), b))
        # Recruits of before that died before they were in sync give way to the new one.
        failed = [b for b in dead if b in partition.adding]
        partition.replicas = [*(b for b in partition.replicas if b not in failed), recruit]
        partition.elr = [b for b in partition.elr if b not in failed]
        partition.lost = [b for b in partition.lost if b not in failed]
        partition.adding = [*(b for b in partition.adding if b not in failed), recruit]
        if failed:
            self._lead_anew(key, topic, partition)
        else:
            partition.removing = dead[:1]
        self._changed(key, partition)
        self._event("recruited", recruit, topic.name, key.partition, f"for broker {(failed or dead)[0]}")
        return recruit

    def _reassign(self, command: c.Reassign) -> None:
        key, topic, partition = self._find(command.partition)
        wanted = command.replicas
        if not wanted or len(set(wanted)) != len(wanted) or any(b not in self.brokers for b in wanted):
            raise errors.InvalidRequest("replicas are known brokers, once each")
        if len(wanted) < topic.min_insync_replicas:
            raise errors.InvalidReplicationFactor("fewer replicas than min.insync.replicas could never commit anything")
        # A move under way is replaced: what it was adding counts as present, and goes if it is no longer wanted.
        partition.adding = [b for b in wanted if b not in partition.isr]
        partition.removing = [b for b in partition.replicas if b not in wanted]
        partition.replicas = [*wanted, *partition.removing]
        self._finish_move(key, topic, partition)
        self._changed(key, partition)
        self._event("reassigning", topic=topic.name, partition=key.partition, detail=f"to {wanted}")

    def _create_topic(self, command: c.CreateTopic) -> None:
        check_topic_name(command.name, internal=True)
        if command.topic_id in self.deleted:
            raise errors.StaleCommand(f"topic {command.name!r} was created by this request before, and deleted since")
        known = self.topics.get(command.topic_id)
        if known is not None and known.name == command.name:
            return  # the same request, by way of another broker
        if command.name in self.names or known is not None:
            raise errors.TopicExists(f"topic {command.name!r} exists already")
        flat = command.name.replace(".", "_")
        twin = next((name for name in self.names if name.replace(".", "_") == flat), None)
        if twin is not None:
            raise errors.InvalidTopic(f"topic name {command.name!r} differs from {twin!r} only in '.' and '_'")
        if not 1 <= command.partitions <= PARTITIONS_PER_TOPIC_MAX:
            raise errors.InvalidPartitions(f"a topic has 1 to {PARTITIONS_PER_TOPIC_MAX} partitions")
        live = self.live_brokers()
        if not 1 <= command.replication_factor <= len(live):
            raise errors.InvalidReplicationFactor(
                f"replication factor {command.replication_factor} with {len(live)} live brokers"
            )
        topic_config.check_min_insync(command.min_insync_replicas, command.replication_factor)
        topic = TopicState(
            name=command.name,
            topic_id=command.topic_id,
            replication_factor=command.replication_factor,
            min_insync_replicas=command.min_insync_replicas,
            storage=command.storage,
            config=dict(command.config),
            partitions=[],
        )
        self.topics[topic.topic_id] = topic
        self.names[topic.name] = topic.topic_id
        self._add_partitions(topic, command.partitions, live)
        self._event("topic created", topic=topic.name)

    def _create_partitions(self, command: c.CreatePartitions) -> None:
        topic = self._topic(command.name, command.topic_id)
        if command.total == len(topic.partitions):
            return  # the same request again, perhaps by way of another broker
        if command.total < len(topic.partitions):
            raise errors.InvalidPartitions(f"topic {topic.name!r} has {len(topic.partitions)} partitions already")
        if command.total > PARTITIONS_PER_TOPIC_MAX:
            raise errors.InvalidPartitions(f"a topic has at most {PARTITIONS_PER_TOPIC_MAX} partitions")
        live = self.live_brokers()
        if topic.replication_factor > len(live):
            raise errors.InvalidReplicationFactor(f"{topic.replication_factor} replicas with {len(live)} live brokers")
        self._add_partitions(topic, command.total, live)
        self._event("partitions added", topic=topic.name, detail=f"{command.total} in all")

    def _add_partitions(self, topic: TopicState, total: int, live: list[int]) -> None:
        fresh = range(len(topic.partitions), total)
        held = _count(b for p in topic.partitions for b in p.replicas)
        leading = _count(p.replicas[0] for p in topic.partitions)
        for replicas in place(topic.name, fresh, topic.replication_factor, live, held, leading):
            topic.partitions.append(PartitionState(replicas, replicas[0], 0, 0, list(replicas)))
        self._applied.partitions.update((PartitionKey(topic.topic_id, number), None) for number in fresh)

    def _delete_topic(self, command: c.DeleteTopic) -> None:
        topic = self._topic(command.name, command.topic_id)
        del self.names[topic.name]
        del self.topics[topic.topic_id]
        self.deleted[topic.topic_id] = None
        if len(self.deleted) > DELETED_MAX:
            del self.deleted[next(iter(self.deleted))]
        self._applied.partitions.update((PartitionKey(topic.topic_id, n), None) for n in range(len(topic.partitions)))
        self._event("topic deleted", topic=topic.name)

    def _set_config(self, command: c.SetConfig) -> None:
        topic = self._topic(command.name)
        if (command.topic_id, command.config_version) != (topic.topic_id, topic.config_version):
            raise errors.StaleCommand(f"the settings of topic {topic.name!r} have changed meanwhile")
        config = topic_config.altered(topic.config, command.changes)
        floor = topic_config.min_insync_replicas(config, topic.replication_factor, topic.storage)
        topic_config.check_min_insync(floor, topic.replication_factor)
        topic.config = config
        topic.config_version += 1
        topic.min_insync_replicas = floor
        for number, partition in enumerate(topic.partitions):
            self._update_elr(topic, partition, set())
            self._changed(PartitionKey(topic.topic_id, number), partition)
        self._event("config changed", topic=topic.name)

    def _allocate_producer_ids(self, command: c.AllocateProducerIds) -> int:
        first = self.next_producer_id
        self.next_producer_id += command.count
        return first

    def _unclean_elect(self, command: c.UncleanElect) -> None:
        key, topic, partition = self._find(command.partition)
        if command.broker not in partition.replicas or not self.is_live(command.broker):
            raise errors.LeaderNotAvailable(f"broker {command.broker} is not a live replica of this partition")
        if partition.leader != NO_BROKER:
            raise errors.InvalidRequest("the partition has a leader")
        partition.isr = [command.broker]
        partition.elr = []
        partition.lost = [b for b in partition.lost if b != command.broker]
        self._lead(key, topic, partition, command.broker)
        self._event("data lost", command.broker, topic.name, key.partition, "unclean election by an operator")

    def _barrier(self, command: c.Barrier) -> None:
        return None

    def _digest(self, command: c.Digest) -> int:
        mine = self._marks.get(command.of)
        if mine is not None and command.hash and mine != command.hash:
            self._applied.diverged = True
        self.digests += 1
        self._marks = {self.digests: self.hash()}
        return self.digests

    # -- what follows from a change ------------------------------------------------------------------------------

    def _remove(
        self, key: PartitionKey, topic: TopicState, partition: PartitionState, gone: set[int], *, lost: bool = False
    ) -> None:
        """Take brokers out of the ISR and leadership; where their copy is lost, out of the ELR as well."""
        if gone.isdisjoint(partition.isr) and not lost:
            return
        removed = gone & set(partition.isr)
        partition.isr = [b for b in partition.isr if b not in gone]
        if lost:
            partition.last_known_elr = sorted(set(partition.last_known_elr) | removed | (gone & set(partition.elr)))
            partition.elr = [b for b in partition.elr if b not in gone]
            partition.lost = sorted(set(partition.lost) | (gone & set(partition.replicas)))
            removed = set()
        self._update_elr(topic, partition, removed)
        if topic.storage == "memory" and not partition.isr and not partition.elr:
            self._restart_empty(key, topic, partition)
        if partition.leader not in partition.isr:
            self._elect(key, topic, partition)
        self._changed(key, partition)

    def _update_elr(self, topic: TopicState, partition: PartitionState, removed: Iterable[int]) -> None:
        if len(partition.isr) >= topic.min_insync_replicas:
            partition.elr = []
            partition.last_known_elr = []
        else:
            complete = (set(partition.elr) | set(removed)) - set(partition.isr)
            partition.elr = [b for b in partition.replicas if b in complete]

    def _restart_empty(self, key: PartitionKey, topic: TopicState, partition: PartitionState) -> None:
        """A memory partition whose every replica restarted has no copy left anywhere: it begins anew, and says so."""
        # A recruit that was never in sync has no copy to wait for.
        if set(partition.replicas) - set(partition.adding) <= set(partition.lost):
            partition.elr = list(partition.replicas)
            partition.lost = []
            partition.last_known_elr = []
            self._event("data lost", NO_BROKER, topic.name, key.partition, "all replicas of a memory topic restarted")

    def _elect(self, key: PartitionKey, topic: TopicState, partition: PartitionState) -> None:
        """The first live replica in the ISR, else in the ELR, else nobody. Never anyone else."""
        for broker in partition.replicas:
            if broker in partition.isr and self.is_live(broker):
                return self._lead(key, topic, partition, broker)
        for broker in partition.replicas:
            if broker in partition.elr and self.is_live(broker):
                partition.isr = [broker]
                partition.elr.remove(broker)
                self._update_elr(topic, partition, set())
                return self._lead(key, topic, partition, broker)
        if partition.leader != NO_BROKER:
            self._lead(key, topic, partition, NO_BROKER)
        return None

    def _lead(self, key: PartitionKey, topic: TopicState, partition: PartitionState, leader: int) -> None:
        partition.leader = leader
        partition.leader_epoch += 1
        self._changed(key, partition)
        self._event("elected", leader, topic.name, key.partition, f"epoch {partition.leader_epoch}")

    def _lead_anew(self, key: PartitionKey, topic: TopicState, partition: PartitionState) -> None:
        """The same leader in a new epoch, because a replica was let go: it deletes its copy, and if it is added again,
        what it acknowledged before must not count."""
        if partition.leader != NO_BROKER:
            self._lead(key, topic, partition, partition.leader)

    def _finish_move(self, key: PartitionKey, topic: TopicState, partition: PartitionState) -> None:
        """A move ends when all that it adds is in sync: only then does anyone go."""
        if not (partition.adding or partition.removing) or not set(partition.adding) <= set(partition.isr):
            return
        kept = [b for b in partition.replicas if b not in partition.removing]
        if not set(kept) & set(partition.isr):
            return
        gone = len(kept) < len(partition.replicas)
        partition.replicas = kept
        partition.isr = [b for b in partition.isr if b in kept]
        partition.elr = [b for b in partition.elr if b in kept]
        partition.lost = [b for b in partition.lost if b in kept]
        partition.adding, partition.removing = [], []
        self._update_elr(topic, partition, set())
        if partition.leader not in partition.isr:
            self._elect(key, topic, partition)
        elif gone:
            self._lead_anew(key, topic, partition)
        self._event("moved", topic=topic.name, partition=key.partition, detail=f"to {partition.replicas}")

    def _changed(self, key: PartitionKey, partition: PartitionState) -> None:
        """Counted once per command, so that an epoch tells versions apart and no more."""
        if key not in self._applied.partitions:
            self._applied.partitions[key] = None
            partition.partition_epoch += 1

    def _event(
        self, what: str, broker: int = NO_BROKER, topic: str = "", partition: int = -1, detail: str = ""
    ) -> None:
        self._applied.events.append(Event(what, broker, topic, partition, detail))

    # -- checks --------------------------------------------------------------------------------------------------

    def _is_current(self, ref: c.BrokerRef) -> bool:
        broker = self.brokers.get(ref.broker)
        return broker is not None and broker.epoch == ref.epoch

    def _check_sender(self, broker: int, epoch: int) -> None:
        if not self._is_current(c.BrokerRef(broker, epoch)):
            raise errors.StaleCommand(f"broker {broker} is not registered under epoch {epoch}")

    def _find(self, ref: c.PartitionRef) -> tuple[PartitionKey, TopicState, PartitionState]:
        key = PartitionKey(ref.topic_id, ref.partition)
        partition = self.partition(key)
        if partition is None:
            raise errors.UnknownTopicOrPartition()
        return key, self.topics[key.topic_id], partition

    def _topic(self, name: str, topic_id: bytes | None = None) -> TopicState:
        topic = self.topic_named(name)
        if topic is None:
            raise errors.UnknownTopicOrPartition(f"no topic {name!r}")
        if topic_id not in (None, topic.topic_id):
            raise errors.UnknownTopicOrPartition(f"the topic {name!r} that was meant is gone")
        return topic

    def _replica_counts(self) -> dict[int, int]:
        return _count(b for _, _, partition in self.all_partitions() for b in partition.replicas)

    _HANDLERS: dict[type[c.Command], Callable[[ClusterState, Any], Any]] = {
        c.Register: _register,
        c.Fence: _fence,
        c.Unfence: _unfence,
        c.BeginShutdown: _begin_shutdown,
        c.ReplicaLost: _replica_lost,
        c.AlterIsr: _alter_isr,
        c.ElectPreferred: _elect_preferred,
        c.Resign: _resign,
        c.Heal: _heal,
        c.Reassign: _reassign,
        c.CreateTopic: _create_topic,
        c.CreatePartitions: _create_partitions,
        c.DeleteTopic: _delete_topic,
        c.SetConfig: _set_config,
        c.AllocateProducerIds: _allocate_producer_ids,
        c.UncleanElect: _unclean_elect,
        c.Barrier: _barrier,
        c.Digest: _digest,
    }


def _rejected(error: ZmqueueError) -> c.Outcome:
    return c.Outcome(code=error.code, message=str(error))


def _retired(known: BrokerState | None, command: c.Register) -> list[int]:
    """Every former life that the cluster or the broker itself knows of: a wiped folder remembers none."""
    former = [*known.retired, known.incarnation] if known else []
    return [i for i in dict.fromkeys([*former, *command.previous]) if i != command.incarnation][-RETIRED_MAX:]


def _count(brokers: Iterable[int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for broker in brokers:
        counts[broker] = counts.get(broker, 0) + 1
    return counts
