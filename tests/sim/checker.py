"""What must hold after every event. Each broken promise has a name.

The committed log of a partition is the longest prefix that any leader's high watermark ever covered, kept here as a
list with one entry per offset: epoch, producer, sequence and checksum of the record. It only grows. Then:

  overwritten      a leader's watermark passes a record that differs from the committed one at that offset
  incomplete       a leader starts, in the newest epoch, without the committed prefix; or a record is committed that the
                   newest leader lacks
  isr              a member of the ISR or ELR, as Raft has decided them, lacks a committed record, or has not synced it
  two leaders      two processes commit in one epoch of a partition
  duplicate        a record of a producer is committed twice
  order            the records of a producer are committed out of order, or with one missing between them
  acknowledged     an answer to acks=all says that a record is written where the committed log holds another, or none
  deleted          a log begins beyond what is committed: records went that nobody may delete
  read             a consumer gets a record that differs from the committed one at that offset
  lease            a leader that was fenced long ago still acknowledges acks=1, or still serves reads
  view             what the core believes of a log is not what the log holds
  durable          a log counts as synced to its end, and the disk would forget some of it
  metadata         two brokers that applied the same commands hold different metadata
  assertion        the code under test found a mistake of its own
  stuck            after all faults have ended the cluster does not become whole within bounded time

Where a log no longer has the records before its start, it counts as having the committed ones there: what is left must
be right, and what is gone must have been committed.

Checks are incremental: they look at what an event has changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.broker import Mirror, extend
from tests.sim.disk import SimFile
from zmqueue import errors
from zmqueue.core.cluster import Applied, PartitionState
from zmqueue.core.commands import Fence
from zmqueue.core.metadata import ClusterState
from zmqueue.log.partition_log import PartitionLog
from zmqueue.model import ACKS_ALL, PartitionKey
from zmqueue.wire.batch import Batch, split
from zmqueue.wire.messages import FetchResult, ProduceResult

if TYPE_CHECKING:
    from tests.sim.broker import SimBroker
    from tests.sim.clients import SimProducer
    from tests.sim.world import World

# The fast way of fencing may overlap a lease by this much; see rule A4. The rest is the time between two turns.
OVERLAP_MS = 700 + 100


class Violation(Exception):
    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name
        self.text = text


class Part:
    """What is known of one partition for ever."""

    __slots__ = ("committed", "committers", "epoch", "fenced_ms", "leader", "length_at", "sequences")

    def __init__(self) -> None:
        self.committed: Mirror = []
        self.sequences: dict[int, int] = {}  # producer: its last committed sequence
        self.committers: dict[int, tuple[int, int]] = {}
        self.epoch = -1
        self.leader: tuple[SimBroker, int, int] | None = None  # the newest that started: broker, its life, epoch
        self.length_at: dict[int, int] = {}  # how much was committed when Raft began an epoch
        self.fenced_ms: dict[int, int] = {}  # when Raft ended an epoch because its leader was fenced


class Checker:
    def __init__(self, world: World, *, hashes: bool) -> None:
        self._world = world
        self._truth = world.raft.truth
        self._hashes: dict[int, bytes] | None = {} if hashes else None
        self.parts: dict[PartitionKey, Part] = {}
        self.acknowledged = 0
        self.offline = 0

    def fail(self, name: str, text: str) -> None:
        raise Violation(name, text)

    # -- metadata

    def on_committed(self, applied: Applied) -> None:
        command = applied.envelope.command if applied.envelope else None
        for key in applied.partitions:
            partition = self._truth.partition(key)
            if partition is None:
                continue
            part = self.parts.get(key)
            if part is None:
                part = self.parts[key] = Part()
            if partition.leader_epoch != part.epoch:
                if isinstance(command, Fence):
                    part.fenced_ms[part.epoch] = self._world.now
                part.epoch = partition.leader_epoch
                part.length_at[part.epoch] = len(part.committed)
            for member, mirror in self._members(key, partition):
                if mirror[: len(part.committed)] != part.committed:
                    self._lacks(member, key, part, 0)
                if member.logs[key].durable_end < len(part.committed):
                    self.fail("isr", f"broker {member.id} has not synced all of {key} that is committed: {partition}")

    def on_state(self, state: ClusterState, whose: object) -> None:
        """Somebody has applied a command, or become a snapshot."""
        if self._hashes is not None:
            own = state.hash()
            if self._hashes.setdefault(state.index, own) != own:
                self.fail("metadata", f"that of {whose} differs at index {state.index}")

    def _members(self, key: PartitionKey, partition: PartitionState) -> list[tuple[SimBroker, Mirror]]:
        """Members of ISR and ELR that run in the life in which they are registered, with what they hold."""
        found = []
        for member in (*partition.isr, *partition.elr):
            broker = self._world.brokers[member]
            if broker.alive and self._truth.brokers[member].incarnation == broker.incarnation:
                mirror = broker.mirrors.get(key)
                if mirror is not None:
                    found.append((broker, mirror))
                elif self.parts[key].committed:
                    self.fail("isr", f"broker {member} is complete in {key} without a log")
        return found

    def _lacks(self, member: SimBroker, key: PartitionKey, part: Part, start: int) -> None:
        mirror = member.mirrors[key]
        for at in range(start, len(part.committed)):
            if at >= len(mirror) or mirror[at] != part.committed[at]:
                own = mirror[at] if at < len(mirror) else "nothing"
                truth = self._truth.partition(key)
                self.fail(
                    "isr", f"broker {member.id} has {own} at {key}@{at}, committed is {part.committed[at]}: {truth}"
                )

    # -- leaders

    def on_leading(self, broker: SimBroker, key: PartitionKey, epoch: int) -> None:
        part = self.parts[key]
        newest = part.leader
        if newest is not None and epoch <= newest[2]:
            return
        part.leader = (broker, broker.life, epoch)
        # Records committed after Raft began the next epoch are no business of this one.
        required = part.committed
        following = [length for other, length in part.length_at.items() if other > epoch]
        if following:
            required = required[: min(following)]
        mirror = broker.mirrors[key]
        self._world.note(broker, "leads", (key.partition, epoch, len(mirror)))
        if mirror[: len(required)] != required:
            self.fail(
                "incomplete",
                f"broker {broker.id} leads {key} in epoch {epoch} with {mirror[-3:]} at its end {len(mirror)},"
                f" committed are {len(required)}: {required[-3:]}",
            )

    def on_advanced(self, broker: SimBroker, key: PartitionKey) -> None:
        replica = broker.node.replicas.get(key)
        if replica is None or replica.leading is None:
            return
        part, epoch = self.parts[key], replica.leading.epoch
        watermark, mirror = replica.log.high_watermark, broker.mirrors[key]
        if part.committers.setdefault(epoch, (broker.id, broker.life)) != (broker.id, broker.life):
            self.fail("two leaders", f"{key} in epoch {epoch}: {part.committers[epoch]}, {(broker.id, broker.life)}")
        if watermark > len(mirror):
            self.fail("view", f"watermark {watermark} of {key} on broker {broker.id} is beyond its end {len(mirror)}")
        committed = part.committed
        known = min(watermark, len(committed))
        if mirror[:known] != committed[:known]:
            self.fail("overwritten", f"{key} on broker {broker.id} in epoch {epoch} below {known}")
        if watermark > known:
            self._extend(broker, key, part, mirror, watermark, epoch)

    def _extend(
        self, broker: SimBroker, key: PartitionKey, part: Part, mirror: Mirror, watermark: int, epoch: int
    ) -> None:
        known = len(part.committed)
        fresh = mirror[known:watermark]
        for nth, (_, producer, sequence, _) in enumerate(fresh):
            last = part.sequences.get(producer, -1)
            if sequence <= last:
                self.fail("duplicate", f"producer {producer}, sequence {sequence}, again at {key}@{known + nth}")
            if sequence != last + 1:
                self.fail("order", f"producer {producer}: {sequence} follows {last} at {key}@{known + nth}")
            part.sequences[producer] = sequence
        part.committed += fresh
        partition = self._truth.partition(key)
        assert partition is not None
        for member, own in self._members(key, partition):
            if own[known:watermark] != fresh:
                self._lacks(member, key, part, known)
            if member.logs[key].durable_end < watermark:
                self.fail("isr", f"broker {member.id} has not synced {key}@{watermark - 1}, which is committed")
        newest = part.leader
        if newest is not None and newest[2] > epoch and newest[0].alive and newest[0].life == newest[1]:
            other = newest[0].mirrors.get(key, [])
            if other[known:watermark] != fresh:
                self.fail("incomplete", f"{key}@{known} is committed in epoch {epoch} behind {newest[2]}")

    def on_truncated(self, broker: SimBroker, key: PartitionKey) -> None:
        partition, part = self._truth.partition(key), self.parts[key]
        if partition is None or not (broker.id in partition.isr or broker.id in partition.elr):
            return
        if self._truth.brokers[broker.id].incarnation != broker.incarnation:
            return
        if broker.mirrors[key][: len(part.committed)] != part.committed:
            self._lacks(broker, key, part, 0)

    def deleted(self, broker: SimBroker, key: PartitionKey) -> Mirror:
        """What stood where a log has nothing any more."""
        log, part = broker.logs[key], self.parts.get(key)
        committed = part.committed if part is not None else []
        if log.log_start > len(committed):
            self.fail("deleted", f"{key} on broker {broker.id} begins at {log.log_start} of {len(committed)}")
        return committed[: log.first_offset]

    # -- clients

    def on_answer(self, broker: SimBroker, producer: SimProducer, batch: Any, result: ProduceResult) -> None:
        part = self.parts[producer.key]
        if producer.acks != ACKS_ALL:
            if result.error == 0:
                self._check_lease(broker, part, result.leader_epoch, 0, "acknowledges acks=1")
            return
        if result.error == errors.DuplicateSequence.code:
            if part.sequences.get(producer.id, -1) < batch.last_sequence:
                self.fail("acknowledged", f"{producer} {batch}: called a duplicate, and is not committed")
        elif result.error == 0:
            self.acknowledged += 1
            rows = part.committed[result.base_offset : result.base_offset + batch.count]
            if [row[1:] for row in rows] != batch.rows:
                self.fail("acknowledged", f"{producer} {batch} at {result.base_offset}: committed there is {rows}")

    def on_read(self, broker: SimBroker, key: PartitionKey, result: FetchResult, data: bytes) -> int:
        """The offset behind what was read, -1 for nothing."""
        end = -1
        committed = self.parts[key].committed
        for header, _ in split(data):
            at = header.base_offset
            for nth in range(header.last_offset_delta + 1):
                row = (header.leader_epoch, header.producer_id, header.base_sequence + nth, header.body_crc)
                if at + nth >= len(committed) or committed[at + nth] != row:
                    self.fail("read", f"{row} at {key}@{at + nth} of broker {broker.id}")
            end = header.next_offset
        if end >= 0:
            read_ms = self._world.config.replication.read_lease_ms
            self._check_lease(broker, self.parts[key], result.leader_epoch, read_ms, "serves reads")
        return end

    def _check_lease(self, broker: SimBroker, part: Part, epoch: int, lease_ms: int, what: str) -> None:
        fenced_ms = part.fenced_ms.get(epoch)
        if fenced_ms is not None and self._world.now - fenced_ms > lease_ms + OVERLAP_MS:
            self.fail("lease", f"broker {broker.id}, fenced {self._world.now - fenced_ms} ms ago, {what}")

    # -- logs

    def after_turn(self, broker: SimBroker) -> None:
        for key in broker.touched:
            log, replica = broker.logs.get(key), broker.node.replicas.get(key)
            if log is None or replica is None:
                continue
            view = replica.log
            if view.log_end != log.log_end or view.epochs.entries != log.epochs:
                self.fail("view", f"broker {broker.id}, {key}: {view.log_end} {view.epochs.entries}, {log.epochs}")
            if (view.log_start, view.first_offset) != (log.log_start, log.first_offset):
                self.fail("view", f"broker {broker.id}, {key}: {view}, begins at {log.log_start} {log.first_offset}")
            if view.durable_end > log.durable_end or log.log_end != len(broker.mirrors[key]):
                self.fail("view", f"broker {broker.id}, {key}: durable {view.durable_end}, {log.durable_end}")
            if log.durable_end == log.log_end and self._world.plan.fsync == "always":
                file = log._segments[-1].file
                if isinstance(file, SimFile) and not file.is_synced:
                    self.fail("durable", f"broker {broker.id}, {key}: {log.log_end} counts as synced, and is not")
        broker.touched.clear()

    # -- the end

    def is_offline(self, key: PartitionKey) -> bool:
        """Whether this partition legally waits for an operator; see world.py."""
        partition = self._truth.partition(key)
        if partition is None or partition.isr or partition.elr or not partition.last_known_elr:
            return False
        floor, gone = self._truth.topics[key.topic_id].min_insync_replicas, partition.last_known_elr
        return len(gone) >= floor and self._world.lost_disks.issuperset(gone)

    def wholeness(self) -> str:
        """What is still missing for the cluster to be whole; nothing if it is."""
        world = self._world
        for broker in world.brokers:
            known = self._truth.brokers[broker.id]
            if not broker.alive or known.fenced or known.incarnation != broker.incarnation:
                return f"broker {broker.id} is not back"
        for producer in world.producers:
            if not producer.is_done and not self.is_offline(producer.key):
                return f"{producer} waits for {producer.unacked[:1] or 'its start'}"
        for key, _, partition in self._truth.all_partitions():
            if self.is_offline(key):
                continue
            if set(partition.isr) != set(partition.replicas) or partition.leader not in partition.isr:
                return f"{key}: {partition}"
            logs = [world.brokers[replica].mirrors.get(key) for replica in partition.replicas]
            if any(log != logs[0] for log in logs):
                return f"{key}: the replicas {partition.replicas} hold {[len(log or []) for log in logs]}"
            if len(logs[0] or ()) != len(self.parts[key].committed):
                return f"{key}: {len(logs[0] or ())} records, {len(self.parts[key].committed)} committed"
        return ""

    def at_end(self) -> None:
        """The cluster is whole. What the disks hold is what was committed."""
        for key, _, partition in self._truth.all_partitions():
            if self.is_offline(key):
                self.offline += 1
                continue
            logs = {replica: self._world.brokers[replica].logs[key] for replica in partition.replicas}
            common = max(log.first_offset for log in logs.values())
            expected: list[Batch] | None = None
            for replica, log in logs.items():
                batches = _content(log)
                mirror = self.parts[key].committed[: log.first_offset]
                extend(mirror, batches)
                shared = [batch for batch in batches if batch.header.base_offset >= common]
                if expected is None:
                    expected = shared
                if mirror != self.parts[key].committed or shared != expected:
                    self.fail("overwritten", f"{key} on broker {replica} at the end")
        for broker in self._world.brokers:
            if broker.state.index == self._truth.index and broker.state.snapshot() != self._truth.snapshot():
                self.fail("metadata", f"broker {broker.id} differs at the end")


def _content(log: PartitionLog) -> list[Batch]:
    """All that the log holds, read back. Equal batches are equal in every byte."""
    batches: list[Batch] = []
    offset = log.first_offset
    while offset < log.log_end:
        batches += split(log.read_replica(offset, 1 << 20, log.log_end))
        offset = batches[-1].header.next_offset
    return batches
