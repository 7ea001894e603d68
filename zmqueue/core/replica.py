"""One partition on one broker: a log, and the part that this broker plays for it at the moment.

The part is a `Leader`, a `Follower` or nothing, and belongs to one leader epoch. A newer epoch ends it and begins the
next; an older one is ignored. All that outlives a change of epoch is the log. Events for a part that this broker does
not play are answered with who does, or ignored.
"""

from __future__ import annotations

from zmqueue import errors
from zmqueue.config import ReplicationConfig
from zmqueue.core.commands import PartitionRef, Resign
from zmqueue.core.effects import AnswerFetch, AnswerProduce, Ask, Effect, Follow, Leading, Moved, Token
from zmqueue.core.epochs import Epochs
from zmqueue.core.follower import Follower
from zmqueue.core.leader import Leader
from zmqueue.core.lease import Lease
from zmqueue.core.log_view import LogView
from zmqueue.core.metadata import ClusterState
from zmqueue.core.producers import Producers
from zmqueue.model import NO_BROKER, PartitionKey
from zmqueue.wire.batch import Batch
from zmqueue.wire.messages import (
    AckRow,
    BeaconRow,
    ProduceResult,
    Push,
    ReplicaFetchRequest,
    ReplicaFetchResponse,
)


class Replica:
    def __init__(
        self,
        key: PartitionKey,
        broker: int,
        cluster_id: str,
        log: LogView,
        state: ClusterState,
        lease: Lease,
        config: ReplicationConfig,
    ) -> None:
        self.key = key
        self.broker = broker
        self.log = log
        self.leader = NO_BROKER
        self.leader_epoch = -1
        self.part: Leader | Follower | None = None
        self._cluster_id = cluster_id
        self._state = state
        self._lease = lease
        self._config = config

    @property
    def leading(self) -> Leader | None:
        return self.part if isinstance(self.part, Leader) else None

    @property
    def following(self) -> Follower | None:
        return self.part if isinstance(self.part, Follower) else None

    # -- metadata ------------------------------------------------------------------------------------------------

    def on_metadata(self, now_ms: int) -> list[Effect]:
        """The partition's metadata may have changed."""
        partition = self._state.partition(self.key)
        assert partition is not None, "a deleted partition is closed, not updated"
        min_insync = self._state.topics[self.key.topic_id].min_insync_replicas
        if partition.leader_epoch == self.leader_epoch:
            return self.leading.on_metadata(partition, min_insync, now_ms) if self.leading else []
        effects = self._end_part(partition.leader, partition.leader_epoch)
        self.leader, self.leader_epoch = partition.leader, partition.leader_epoch
        if self.leader == self.broker:
            brokers = self._state.brokers
            leader = Leader(
                self.key, self.broker, self.log, partition, min_insync, brokers, self._lease, self._config, now_ms
            )
            self.part = leader
            effects += [*leader.begin(), Leading(self.key)]
        elif self.leader != NO_BROKER:
            follower = Follower(
                self.key,
                self.broker,
                self._state.brokers[self.broker].epoch,
                self._cluster_id,
                self.log,
                self.leader,
                self.leader_epoch,
                self._config,
            )
            self.part = follower
            effects.append(Follow(self.key, True))
            effects += follower.begin(now_ms)
        return effects

    def _end_part(self, leader: int, leader_epoch: int) -> list[Effect]:
        part, self.part = self.part, None
        if isinstance(part, Leader):
            return [*part.end(leader, leader_epoch), Moved(self.key)]
        return [Follow(self.key, False)] if isinstance(part, Follower) else []

    def close(self) -> list[Effect]:
        return self._end_part(NO_BROKER, -1)

    def on_isr_result(self) -> list[Effect]:
        return self.leading.on_isr_result() if self.leading else []

    # -- as leader -----------------------------------------------------------------------------------------------

    def on_produce(
        self, token: Token, batch: Batch, acks: int, deadline_ms: int, now_ms: int, *, over_quota: bool = False
    ) -> list[Effect]:
        if isinstance(self.part, Leader):
            return self.part.on_produce(token, batch, acks, deadline_ms, now_ms, over_quota=over_quota)
        return [AnswerProduce(token, ProduceResult(errors.NotLeader.code, -1, self.leader_epoch, self.leader))]

    def on_ack(self, broker: int, broker_epoch: int, row: AckRow, now_ms: int) -> list[Effect]:
        if not isinstance(self.part, Leader):
            return []
        if row.leader_epoch > self.leader_epoch:
            return self._resign()
        if row.leader_epoch < self.leader_epoch:
            return []
        return self.part.on_ack(broker, broker_epoch, row.durable_end, now_ms)

    def on_follower_fetch(self, token: Token, fetch: ReplicaFetchRequest, now_ms: int) -> list[Effect]:
        if fetch.leader_epoch < self.leader_epoch:
            return [self._reject(token, fetch, errors.FencedEpoch.code)]
        if fetch.leader_epoch > self.leader_epoch:
            return [*self._resign(), self._reject(token, fetch, errors.UnknownEpoch.code)]
        if not isinstance(self.part, Leader):
            return [self._reject(token, fetch, errors.NotLeader.code)]
        return self.part.on_fetch(token, fetch, now_ms)

    def _resign(self) -> list[Effect]:
        """Somebody knows of a newer epoch: we were deposed, and our own metadata will say so soon."""
        if self.leading is None:
            return []
        self.leader = NO_BROKER
        return self._end_part(NO_BROKER, self.leader_epoch)

    def _reject(self, token: Token, fetch: ReplicaFetchRequest, code: int) -> AnswerFetch:
        response = ReplicaFetchResponse(
            self.key.topic_id, self.key.partition, fetch.fetch_id, max(0, self.leader_epoch), code
        )
        # The refused follower has to recognise the answer as one to its own fetch.
        response.leader_epoch = fetch.leader_epoch
        return AnswerFetch(token, response)

    # -- as follower ---------------------------------------------------------------------------------------------

    def on_push(self, push: Push, batches: list[Batch], now_ms: int) -> list[Effect]:
        if isinstance(self.part, Follower):
            return self.part.on_push(push, batches, now_ms)
        return self._resign() if push.leader_epoch > self.leader_epoch else []

    def on_beacon(self, row: BeaconRow, now_ms: int) -> list[Effect]:
        if isinstance(self.part, Follower):
            return self.part.on_beacon(row, now_ms)
        return self._resign() if row.leader_epoch > self.leader_epoch else []

    def on_fetched(self, response: ReplicaFetchResponse, batches: list[Batch], now_ms: int) -> list[Effect]:
        return self.part.on_fetched(response, batches, now_ms) if isinstance(self.part, Follower) else []

    # -- the log -------------------------------------------------------------------------------------------------

    def on_flushed(self, durable_end: int, now_ms: int) -> list[Effect]:
        """The log is durable up to here."""
        if durable_end <= self.log.durable_end:
            return []
        assert durable_end <= self.log.log_end, "a flush completes for what was appended"
        self.log.durable_end = durable_end
        if isinstance(self.part, Leader):
            return self.part.on_flushed(now_ms)
        return self.part.on_flushed() if self.part else []

    def on_log_start(self, log_start: int, first_offset: int) -> None:
        """Records below this are deleted here."""
        self.log.start_at(log_start, first_offset)
        if isinstance(self.part, Leader):
            self.part.on_log_start()

    def on_truncated(
        self,
        log_start: int,
        log_end: int,
        epochs: Epochs,
        producers: Producers,
        now_ms: int,
        first_offset: int = -1,
    ) -> list[Effect]:
        self.log.restate(log_start, log_end, epochs, producers, first_offset)
        return self.following.on_truncated(now_ms) if self.following else []

    def on_append_failed(
        self, code: int, log_end: int, epochs: Epochs, producers: Producers, now_ms: int
    ) -> list[Effect]:
        """Nothing of the last append is in the log. A leader that cannot write asks another to lead."""
        self.log.restate(self.log.log_start, log_end, epochs, producers, self.log.first_offset)
        if isinstance(self.part, Leader):
            effects = self.part.on_append_failed(code)
            if len(self.part.isr) > 1:
                epoch = self._state.brokers[self.broker].epoch
                effects.append(Ask(Resign(self.broker, epoch, PartitionRef(*self.key), self.leader_epoch)))
            return effects
        return self.part.on_append_failed(now_ms) if self.part else []

    # -- time ----------------------------------------------------------------------------------------------------

    def on_tick(self, now_ms: int) -> list[Effect]:
        return self.part.on_tick(now_ms) if self.part else []

    def on_stall(self, now_ms: int) -> None:
        if isinstance(self.part, Leader):
            self.part.on_stall(now_ms)
