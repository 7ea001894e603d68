"""Without the rules of a leader (B)."""

from __future__ import annotations

from typing import Any

from tests.sim.mutations.registry import Put, mutation
from zmqueue.core import commands as c
from zmqueue.core import effects as e
from zmqueue.core import proposer
from zmqueue.core.leader import Leader
from zmqueue.core.lease import Lease
from zmqueue.core.metadata import ClusterState
from zmqueue.core.node import Node
from zmqueue.core.replica import Replica
from zmqueue.model import PartitionKey


@mutation("B1")
def new_leader_truncates_to_watermark(put: Put) -> None:
    begin = Leader.begin
    put(Leader, "begin", lambda self: [e.Truncate(self.key, self.log.high_watermark), *begin(self)])


@mutation("B3")
def no_maximal_isr(put: Put) -> None:
    put(Leader, "_set_maximal", lambda self: setattr(self, "maximal_isr", list(self.isr)))


@mutation("B4")
def watermark_ignores_min_insync(put: Put) -> None:
    advance = Leader._advance

    def _advance(self: Any) -> list[e.Effect]:
        floor, self.min_insync = self.min_insync, 0
        try:
            return advance(self)
        finally:
            self.min_insync = floor

    put(Leader, "_advance", _advance)


@mutation("B4")
def watermark_ignores_own_disk(put: Put) -> None:
    advance = Leader._advance

    def _advance(self: Any) -> list[e.Effect]:
        durable, self.log.durable_end = self.log.durable_end, self.log.log_end
        try:
            return advance(self)
        finally:
            self.log.durable_end = durable

    put(Leader, "_advance", _advance)


@mutation("B5")
def acks_of_a_former_life_count(put: Put) -> None:
    progress, is_peer = Leader._progress, Node._is_peer

    def _progress(self: Any, broker: int, broker_epoch: int, end: int, now_ms: int) -> bool:
        known = self.followers.get(broker)
        if known is not None:
            broker_epoch = known.broker_epoch = max(known.broker_epoch, broker_epoch)
        return progress(self, broker, broker_epoch, end, now_ms)

    put(Leader, "_progress", _progress)
    put(Node, "_is_peer", lambda self, cluster, broker, epoch: is_peer(self, cluster, broker, 1 << 30))


@mutation("B7")
def eager_shrink(put: Put) -> None:
    propose = Leader._propose

    def _propose(self: Any, isr: list[int]) -> list[e.Effect]:
        effects = propose(self, isr)
        if len(isr) < len(self.isr):
            self.isr = self.maximal_isr = list(isr)
        return effects

    put(Leader, "_propose", _propose)


@mutation("B8", among="held")
def alter_isr_without_cas(put: Put) -> None:
    change_isr = ClusterState._change_isr

    def _change_isr(self: Any, leader: int, change: c.IsrChange) -> None:
        partition = self.partition(PartitionKey(change.topic_id, change.partition))
        epoch = partition.partition_epoch if partition else 0
        change_isr(self, leader, c.IsrChange(change.topic_id, change.partition, change.leader_epoch, epoch, change.isr))

    put(ClusterState, "_change_isr", _change_isr)


@mutation("B8c")
def no_leader_epoch_start(put: Put) -> None:
    put(Leader, "start_end", property(lambda self: 0, lambda self, end: None))


@mutation("B8d", among="held")
def no_broker_epoch_in_alter_isr(put: Put) -> None:
    change_isr = ClusterState._change_isr

    def _change_isr(self: Any, leader: int, change: c.IsrChange) -> None:
        isr = [c.BrokerRef(r.broker, self.brokers[r.broker].epoch) for r in change.isr if r.broker in self.brokers]
        change_isr(
            self,
            leader,
            c.IsrChange(change.topic_id, change.partition, change.leader_epoch, change.partition_epoch, isr),
        )

    put(ClusterState, "_change_isr", _change_isr)


@mutation("B8", among="held")
def alter_isr_without_cas_and_broker_epoch(put: Put) -> None:
    """Each of the two hides that the other is missing."""
    alter_isr_without_cas(put)
    no_broker_epoch_in_alter_isr(put)


@mutation("B8", among="held")
def proposal_rebuilt_on_retry(put: Put) -> None:
    step = Node.step

    def _step(self: Any, now_ms: int) -> list[e.Effect]:
        sent = self._proposer.sent
        if sent is not None and now_ms >= sent.resend_ms and isinstance(sent.wish.command, c.AlterIsr):
            for change in sent.wish.command.changes:
                partition = self.state.partition(PartitionKey(change.topic_id, change.partition))
                change.partition_epoch = partition.partition_epoch if partition else 0
                for ref in change.isr:
                    ref.epoch = self.state.brokers[ref.broker].epoch
            envelope = c.Envelope(self.broker, self._proposer.incarnation, sent.number, sent.wish.command)
            sent.data = proposer.encode(envelope)
        return step(self, now_ms)

    put(Node, "step", _step)


@mutation("B8", among="held")
def proposal_forgotten_early(put: Put) -> None:
    """A proposal under way is forgotten at the next change of metadata, whatever becomes of it."""
    on_metadata = Leader.on_metadata

    def _on_metadata(self: Any, *args: Any) -> list[e.Effect]:
        self.pending = None
        return on_metadata(self, *args)

    put(Leader, "on_metadata", _on_metadata)


@mutation("B9", among="zombies")
def no_lease(put: Put) -> None:
    put(Lease, "writable", lambda self, now_ms: True)
    put(Lease, "readable", lambda self, now_ms: True)


@mutation("B10", among="zombies")
def no_resignation(put: Put) -> None:
    put(Replica, "_resign", lambda self: [])
