"""A broker process: one loop over all its sockets, Raft, the flusher and the clock.

Each turn waits for something to happen, lets the handlers of what did run the core and its effects, then takes what is
due by time, and at the end hands over what gathered: logs to sync, acknowledgements to send. Nothing in a turn may take
long, because Raft is ticked from here; work that can wait for a disk is in the flush thread.

Start: lock and judge the data folder, recover the logs, join Raft, register, be unfenced. Stop: hand leadership over,
answer what can be answered, sync, and leave a clean session behind.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from pathlib import Path

from zmqueue.broker.compaction import CompactionChore
from zmqueue.broker.executor import Executor, Fatal
from zmqueue.broker.handlers import Handlers, own_status
from zmqueue.broker.indexing import IndexChore
from zmqueue.broker.logs import Logs
from zmqueue.broker.maintenance import Chore, Maintenance
from zmqueue.broker.peers import PeerEvents, Peers
from zmqueue.broker.raft import Outcome, ProposalOutcome, RaftNode
from zmqueue.broker.workers import Workers
from zmqueue.config import ClusterFile, Config
from zmqueue.core import commands as c
from zmqueue.core.cluster import Applied
from zmqueue.core.metadata import ClusterState
from zmqueue.core.node import Node
from zmqueue.log.session import DataFolder
from zmqueue.model import NO_BROKER
from zmqueue.transport import Transport, Waker
from zmqueue.wire.messages import StatusResponse

_logger = logging.getLogger(__name__)

TURN_MS_MAX = 50
LEAVE_MS_MAX = 3_000
HAND_OVER_MS_MAX = 1_000
LINGER_MS = 500
LOST_PER_REGISTRATION_MAX = 200
FRAME_OVERHEAD_BYTES = 64 * 1024


class _Machine:
    """The replicated state as Raft drives it. What followed is kept for the loop: nothing else happens inside Raft."""

    def __init__(self, state: ClusterState) -> None:
        self.state = state
        self.news: deque[Applied | None] = deque()  # None: a snapshot replaced everything

    def apply(self, command: bytes) -> bytes:
        self.news.append(self.state.apply(command))
        return b""

    def snapshot(self) -> bytes:
        return self.state.encode()

    def restore(self, data: bytes) -> None:
        self.state.load(data)
        self.news.append(None)


class Broker:
    def __init__(self, cluster: ClusterFile, broker: int, config: Config, data_dir: Path, secret: bytes) -> None:
        self._started_ms = now_ms()
        self._stopping = False
        me = cluster.members[broker]
        path = data_dir / f"broker-{broker}"
        self._folder = DataFolder.open(path, cluster.cluster_id, broker, config.log.fsync)
        self._transport = Transport()
        self._waker = Waker()
        self._transport.watch(self._waker.fileno(), self._waker.clear)
        self._logs = Logs(path, config.log, self._waker.wake)
        found = list(self._logs.recover(trusted=not self._folder.unclean))
        state = ClusterState()
        self._machine = _Machine(state)
        self.node = Node(cluster.cluster_id, self._registration(cluster, broker), state, config)
        for key, log in found:
            self.node.adopt_log(key, log)
        self._executor = Executor(self.node, self._logs, now_ms, self._propose, self._on_registered)
        self._handlers = Handlers(
            self.node,
            self._logs,
            config,
            cluster.storage,
            self._status,
            lambda: self._raft.low_disk,
            self._executor.run,
            now_ms,
            wall_ms,
        )
        frame_bytes_max = config.log.batch_bytes_max + FRAME_OVERHEAD_BYTES
        socket = self._transport.router(me.host, me.client, self._handlers.on_ready, frame_bytes_max=frame_bytes_max)
        self._handlers.bind(socket)
        self._peers = Peers(self._transport, cluster, broker, config, self._peer_events())
        self._executor.bind(self._peers, self._handlers)
        self._workers = Workers(self._transport, config.log, self._logs.memory, now_ms)
        chores: list[Chore] = [CompactionChore(config.log, wall_ms), IndexChore(wall_ms)]
        self._maintenance = Maintenance(
            self.node, self._logs, config.log, self._executor.run, wall_ms, chores, self._workers
        )
        self._raft = RaftNode(
            broker_id=broker,
            members={member.id: (member.host, member.raft) for member in cluster.members},
            folder=path / "raft",
            secret=secret,
            config=config.raft,
            machine=self._machine,
            time_scale=config.timing.scale,
            proposal_timeout_ms=config.replication.proposal_timeout_ms,
        )
        self._raft_tick_ms = config.raft.tick_ms
        self._raft_due_ms = 0
        self._transport.watch(self._raft.fileno(), self._tick_raft)

    def _registration(self, cluster: ClusterFile, broker: int) -> c.Register:
        """What we tell the cluster about this life of ours, durable on our side before it is told."""
        me = cluster.members[broker]
        incarnation = secrets.randbits(62)
        previous = list(self._folder.previous_incarnations)
        unclean = self._folder.unclean
        self._folder.begin(incarnation)
        damaged = self._logs.damaged
        return c.Register(
            broker=broker,
            incarnation=incarnation,
            previous=previous,
            dir_id=self._folder.dir_id,
            host=me.host,
            client_port=me.client if me.advertised is None else me.advertised,
            push_port=me.push,
            peer_port=me.peer,
            unclean=unclean or len(damaged) > LOST_PER_REGISTRATION_MAX,
            lost=[c.PartitionRef(key.topic_id, key.partition) for key in damaged[:LOST_PER_REGISTRATION_MAX]],
        )

    def _peer_events(self) -> PeerEvents:
        node, run = self.node, self._executor.run
        return PeerEvents(
            on_link=lambda broker, up: node.on_link(broker, up, now_ms()),
            on_heartbeat=lambda heartbeat: node.on_heartbeat(heartbeat, now_ms()),
            on_heartbeat_reply=node.on_heartbeat_reply,
            on_acks=lambda acks: run(node.on_acks(acks, now_ms())),
            on_follower_fetch=lambda token, fetch: run(node.on_follower_fetch(token, fetch, now_ms())),
            on_fetched=lambda response, batches: run(node.on_fetched(response, batches, now_ms())),
            on_push=lambda key, push, batches: run(node.on_push(key, push, batches, now_ms())),
            on_beacon=lambda beacon: run(node.on_beacon(beacon, now_ms())),
        )

    # -- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop` is called. Raises Fatal."""
        while not self._stopping:
            self._turn()
        self._leave()

    def stop(self) -> None:
        """From a signal handler: end the loop, cleanly."""
        self._stopping = True
        self._waker.wake()

    def _turn(self) -> None:
        now = now_ms()
        due = min(self._raft_due_ms, now + TURN_MS_MAX)
        fetch_due = self._handlers.fetches.next_deadline_ms
        if fetch_due is not None:
            due = min(due, fetch_due)
        groups_due = self._handlers.groups.next_due_ms
        if groups_due is not None:
            due = min(due, groups_due)
        self._transport.poll(max(0, due - now))
        self._executor.on_flushed()
        now = now_ms()
        if now >= self._raft_due_ms:
            self._tick_raft()
        self._handlers.fetches.on_tick(now)
        self._executor.run(self.node.step(now))
        self._handlers.groups.on_turn(now)
        self._maintenance.on_tick(now)
        self._workers.on_tick(now)
        self._executor.end_turn()

    def _tick_raft(self) -> None:
        self._raft.tick()
        if self._raft.failed:
            raise Fatal(f"Raft: {self._raft.failed}")
        now = now_ms()
        self._raft_due_ms = now + self._raft_tick_ms
        leader = self._raft.leader
        self.node.on_raft(NO_BROKER if leader is None else leader, self._raft.is_leader, self._raft.term, now)
        while self._machine.news:
            news = self._machine.news.popleft()
            if news is None:
                self._executor.run(self.node.on_restored(now))
            else:
                self._tell(news)
                self._executor.run(self.node.on_applied(news, now))

    def _tell(self, applied: Applied) -> None:
        for event in applied.events:
            if self.node.broker in (event.broker, self.node.controller_id):
                where = f" {event.topic}-{event.partition}" if event.partition >= 0 else f" {event.topic}".rstrip()
                who = f" broker {event.broker}" if event.broker != NO_BROKER else ""
                _logger.info("%s%s%s %s", event.what, where, who, event.detail)

    def _propose(self, data: bytes) -> None:
        def done(outcome: ProposalOutcome) -> None:
            if outcome.kind != Outcome.COMMITTED:
                self.node.on_unsure(data, now_ms())

        self._raft.propose(data, done)
        self._raft_due_ms = 0

    def _on_registered(self, incarnation: int) -> None:
        self._folder.confirm(incarnation)
        self._logs.damage_registered()
        _logger.info("registered under epoch %d", self.node.epoch)

    def _status(self) -> StatusResponse:
        bad_frames = self._handlers.bad_frames + self._peers.bad_frames
        return own_status(self.node, now_ms() - self._started_ms, self._raft.term, self._raft.voting, bad_frames)

    # -- the end -------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Others take over first: Raft, so that its next leader is there to decide who leads our partitions.

        Without a Raft majority nobody can, and we go all the same.
        """
        _logger.info("stopping")
        deadline_ms = now_ms() + LEAVE_MS_MAX
        hand_over_until_ms = now_ms() + HAND_OVER_MS_MAX
        while self._raft.is_leader and self._raft.has_others and now_ms() < hand_over_until_ms:
            self._raft.hand_over()
            self._turn()
        self.node.leave()
        while not self.node.has_left and self._raft.has_quorum and now_ms() < deadline_ms:
            self._turn()

    def close(self, clean: bool) -> None:
        self._raft.close()
        self._workers.close()
        self._logs.close()
        self._transport.close(LINGER_MS if clean else 0)
        self._waker.close()
        self._folder.close(clean)


def now_ms() -> int:
    """Monotonic, so that a changed wall clock touches nothing."""
    return time.monotonic_ns() // 1_000_000


def wall_ms() -> int:
    """The time of day, as records carry it: for what is about their age, and nothing else."""
    return time.time_ns() // 1_000_000
