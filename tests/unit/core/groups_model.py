"""A consumer group under random schedules: clients, a network, a log, and coordinators that come and go.

Clients behave as real ones do: they hold what they were told last, name in `revoking` what they have not let go yet,
and hold nothing any more when a session has passed since they sent the last heartbeat that was answered. Requests and
answers are delayed, repeated, reordered and lost. Writes are replicated later, are refused, or end in doubt. A new
coordinator finds what was replicated and any part of what was not; the old one goes on answering, as long as its lease
lets it. Every event is followed by a look at the invariants, which `Broken` names.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from msgspec import Struct, field

from tests.unit.core.groups_rig import GRACE_MS, WALL_MS, Topics
from zmqueue import errors
from zmqueue.config import GroupsConfig, ReplicationConfig
from zmqueue.core.assignors import BUILT_IN
from zmqueue.core.group_effects import Answer, GiveUp, Log, Refuse, Write
from zmqueue.core.group_snapshot import snapshot
from zmqueue.core.groups import Coordinator
from zmqueue.core.lease import Lease
from zmqueue.model import PartitionKey
from zmqueue.wire.group_messages import (
    CommitOffsetsRequest,
    CommitOffsetsResponse,
    CommitRow,
    GroupHeartbeatRequest,
    GroupHeartbeatResponse,
)
from zmqueue.wire.group_records import GroupKey, GroupState, OffsetKey, decode_group, decode_key, decode_offset
from zmqueue.wire.messages import PartitionEntry

SESSION_MS = 8_000
REBALANCE_MS = 8_000
WAIT_MS = 2_000
PATIENCE_MS = 3_000  # after which a client asks again
CLIENTS_MAX = 5


class Broken(AssertionError):
    """An invariant does not hold."""


class Sent(Struct, eq=False):
    """A request on its way, or being waited for. It is the token, too."""

    client: Client
    member_id: str
    request: Any
    sent_ms: int
    tenures: dict[PartitionKey, int] = field(default_factory=dict)


class Client(Struct, eq=False):
    name: str
    member_id: str
    instance_id: str | None
    topics: list[str]
    sent_ms: int = -PATIENCE_MS
    answered_ms: int = 0  # when the newest heartbeat that was answered had been sent
    alive: bool = True
    paused: bool = False
    deposed: bool = False  # it has not found the new coordinator yet
    news: bool = True
    revision: int = 0
    generation: int = -1
    number: int = 0
    lives: int = 0
    tell_topics: bool = True
    subscribed_ms: int = 0  # when the newest subscription that has arrived was sent: connections keep their order
    waiting: Sent | None = None
    holds: dict[PartitionKey, int] = field(default_factory=dict)  # with the number of the tenure
    revoking: dict[PartitionKey, int] = field(default_factory=dict)

    def believes(self, now_ms: int) -> set[PartitionKey]:
        if not self.alive or now_ms >= self.answered_ms + SESSION_MS:
            return set()
        return {*self.holds, *self.revoking}

    def begin_anew(self, now_ms: int) -> None:
        """As another member: what the former one held is gone."""
        self.lives += 1
        self.member_id = f"{self.name}.{self.lives}"
        self.revision, self.generation, self.number = 0, -1, 0
        self.holds, self.revoking = {}, {}
        self.waiting, self.news, self.tell_topics = None, True, True
        self.answered_ms = now_ms


class Batch(Struct):
    records: list[tuple[bytes, bytes | None]]
    number: int


class World:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now_ms = 10_000
        self.topics = Topics()
        self.lives = dict.fromkeys("tuv", 0)
        self.topics.set("t", 4)
        self.topics.set("u", 3)
        self.config = GroupsConfig(write_retry_ms=200)
        self.clients: list[Client] = []
        self.requests: list[Sent] = []
        self.slow: list[Sent] = []  # commits that the network keeps for long
        self.answers: list[tuple[Sent, Any]] = []
        self.log: list[Batch] = []
        self.replicated = 0  # batches of the log below the high watermark
        self.tenure = 0
        self.refusing = False
        self.zombie: Coordinator | None = None
        self.told: dict[tuple[str, int], set[PartitionKey]] = {}  # what replicated groups let members hold
        self.generations = {0}
        self.names = 0
        self.quiet = False
        self.trace: list[str] = []
        self.take_over()

    # -- coordinators and their log ------------------------------------------------------------------------------

    def take_over(self) -> None:
        self.lease = Lease(ReplicationConfig())
        self.lease.grant(self.now_ms)
        made = Coordinator(self.config, self.topics, BUILT_IN, self.lease, GRACE_MS)
        for batch in self.log:
            for record in batch.records:
                made.replay(*record)
        self.replicated = len(self.log)
        self._note_replicated()
        self.coordinator = made
        self.perform(made, made.activate(self.now_ms, WALL_MS + self.now_ms))

    def fail_over(self) -> None:
        """Of what is not replicated, the new coordinator finds some."""
        del self.log[self.chance.randint(self.replicated, len(self.log)) :]
        self.zombie = self.coordinator
        for client in self.clients:
            client.deposed = self.chance.random() < 0.5
        self.take_over()

    def perform(self, coordinator: Coordinator, effects: list[Any]) -> None:
        queue = list(effects)
        while queue:
            effect = queue.pop(0)
            match effect:
                case Write(number, records):
                    if coordinator is not self.coordinator:
                        continue  # followers refuse a deposed leader, for ever
                    if self.refusing and self.chance.random() < 0.7:
                        code = errors.NotEnoughReplicas.code
                        queue += coordinator.on_written(number, code, self.now_ms)
                        continue
                    self._append(Batch(records, number))
                case Answer(token, message):
                    self._check_answer(coordinator, token, message)
                    self.answers.append((token, message))
                case Refuse(token, code, _):
                    self._check_refusal(coordinator, token, code)
                    self.answers.append((token, code))
                case GiveUp():
                    if coordinator is self.coordinator:
                        self.take_over()
                case Log():
                    pass

    def _append(self, batch: Batch) -> None:
        """Whoever commits a partition holds it by the group's last record before, and commits in order."""
        for raw_key, raw_value in batch.records:
            about = decode_key(raw_key)
            if not isinstance(about, OffsetKey) or raw_value is None:
                continue
            value, key = decode_offset(raw_value), PartitionKey(about.topic_id, about.partition)
            if key not in _held(self.last_group(), value.member_id):
                raise Broken(f"commit of {value.member_id} for {key}, which it does not hold")
            before = self.last_commit(key)
            if before is not None:
                if int(value.metadata) < int(before.metadata):
                    raise Broken(f"commit of a former tenure of {key}")
                if value.member_id == before.member_id and value.number <= before.number:
                    raise Broken(f"late commit of {value.member_id} for {key}")
        self.log.append(batch)

    def last_group(self, end: int | None = None) -> GroupState | None:
        for batch in reversed(self.log[:end]):
            for raw_key, raw_value in reversed(batch.records):
                if isinstance(decode_key(raw_key), GroupKey):
                    return decode_group(raw_value) if raw_value is not None else None
        return None

    def last_commit(self, key: PartitionKey, end: int | None = None) -> Any:
        for batch in reversed(self.log[:end]):
            for raw_key, raw_value in reversed(batch.records):
                if decode_key(raw_key) == OffsetKey("g", *key):
                    return decode_offset(raw_value) if raw_value is not None else None
        return None

    def replicate(self) -> None:
        """The oldest batch that is not."""
        if self.replicated < len(self.log):
            batch = self.log[self.replicated]
            self.replicated += 1
            self._note_replicated(self.replicated - 1)
            self.perform(self.coordinator, self.coordinator.on_written(batch.number, 0, self.now_ms))

    def doubt(self) -> None:
        """A batch is in the log of the leader, and its fate unknown."""
        if self.replicated < len(self.log):
            number, code = self.log[self.replicated].number, errors.NotEnoughReplicasAfterAppend.code
            self.perform(self.coordinator, self.coordinator.on_written(number, code, self.now_ms))

    def _note_replicated(self, start: int = 0) -> None:
        for batch in self.log[start : self.replicated]:
            for raw_key, raw_value in batch.records:
                if raw_value is not None and isinstance(decode_key(raw_key), GroupKey):
                    state = decode_group(raw_value)
                    self.generations.add(state.generation)
                    for member in state.members:
                        self.told[member.member_id, member.revision] = _held(state, member.member_id, revoked=False)

    # -- invariants ----------------------------------------------------------------------------------------------

    def _check_answer(self, coordinator: Coordinator, sent: Sent, message: Any) -> None:
        if isinstance(message, CommitOffsetsResponse):
            for row, code in zip(sent.request.rows, message.results, strict=True):
                found = self.last_commit(PartitionKey(row.topic_id, row.partition), self.replicated)
                if code == 0 and row.topic_id in self.topics.topics and (found is None or found.offset < row.offset):
                    raise Broken(f"commit of {sent.member_id} is acknowledged and not replicated")
            return
        if message.generation not in self.generations:
            raise Broken(f"generation {message.generation} is told and not replicated")
        if message.assignment is None:
            return
        told = {PartitionKey(t.topic_id, r.partition): r.offset for t in message.assignment for r in t.partitions}
        if self.told.get((sent.member_id, message.revision)) != set(told):
            raise Broken(f"assignment {message.revision} of {sent.member_id} is told and not replicated")
        if coordinator is not self.coordinator:
            return
        for key in told.keys() - self.told.get((sent.member_id, sent.request.revision), set()):
            committed = self.last_commit(key, self.replicated)
            if told[key] != (committed.offset if committed is not None else -1):
                raise Broken(f"{key} is given at {told[key]}, though {committed} is committed")
            if committed != self.last_commit(key):
                raise Broken(f"{key} is given while a commit of it is under way")

    def _check_refusal(self, coordinator: Coordinator, sent: Sent, code: int) -> None:
        if code in (errors.UnknownMember.code, errors.FencedInstance.code) and coordinator is self.coordinator:
            state = self.last_group(self.replicated)
            if state is not None and any(member.member_id == sent.member_id for member in state.members):
                raise Broken(f"{sent.member_id} is told that it is no member, and by the log it is")

    def check(self) -> None:
        owner: dict[PartitionKey, str] = {}
        for client in self.clients:
            for key in sorted(client.believes(self.now_ms)):
                if key.topic_id in self.topics.topics and owner.setdefault(key, client.member_id) != client.member_id:
                    raise Broken(f"{key} is held by {owner[key]} and by {client.member_id}")

    def check_memory(self) -> None:
        """What the coordinator has in mind is what another would find."""
        if self.replicated < len(self.log):
            return
        other = Coordinator(self.config, self.topics, BUILT_IN, self.lease, GRACE_MS)
        for batch in self.log:
            for record in batch.records:
                other.replay(*record)
        mine, found = (c._desks.get("g") for c in (self.coordinator, other))
        if mine is None or found is None or not mine.clean:
            return
        if snapshot(mine.group) != snapshot(found.group):
            raise Broken("the coordinator's group is not what the log says")
        if mine.offsets.committed != found.offsets.committed:
            raise Broken("the coordinator's offsets are not what the log says")

    # -- clients -------------------------------------------------------------------------------------------------

    def new_client(self, instance_id: str | None = None) -> None:
        self.names += 1
        name = f"m{self.names}"
        topics = self.chance.choice([["t"], ["t"], ["t", "u"], ["u", "v"]])
        self.clients.append(Client(name, f"{name}.0", instance_id, topics, answered_ms=self.now_ms))

    def restart_static(self, client: Client) -> None:
        """The process is gone before another of the same instance begins: that is the operator's promise."""
        client.alive = False
        self.new_client(client.instance_id)
        self.clients[-1].topics = client.topics

    def heartbeat(self, client: Client, leaving: bool = False) -> None:
        revoking = [PartitionEntry(*key) for key in sorted(client.revoking)]
        request = GroupHeartbeatRequest("g", client.member_id, client.revision, WAIT_MS, revoking, leaving)
        request.instance_id = client.instance_id
        if client.tell_topics or client.revision == 0:
            request.topics = client.topics
            request.session_timeout_ms, request.rebalance_timeout_ms = SESSION_MS, REBALANCE_MS
        sent = Sent(client, client.member_id, request, self.now_ms)
        client.waiting, client.news, client.sent_ms = sent, False, self.now_ms
        self.requests.append(sent)

    def commit(self, client: Client) -> None:
        keys = [key for key in sorted({**client.holds, **client.revoking}) if self.chance.random() < 0.6]
        client.number += 1
        rows = []
        for key in keys:
            tenure = client.holds.get(key, client.revoking.get(key))
            rows.append(CommitRow(*key, self.now_ms * 100 + client.number, metadata=str(tenure)))
        request = CommitOffsetsRequest("g", rows, client.member_id, client.generation, client.number)
        sent = Sent(client, client.member_id, request, self.now_ms)
        (self.slow if self.chance.random() < 0.2 else self.requests).append(sent)

    def act(self, client: Client) -> None:
        """What a client does by itself."""
        if not client.alive or client.paused:
            return
        if client.revision and self.now_ms >= client.answered_ms + SESSION_MS:
            client.begin_anew(self.now_ms)
        overdue = client.waiting is None or self.now_ms - client.sent_ms > PATIENCE_MS
        if client.news or overdue:
            self.heartbeat(client)

    def let_go(self, client: Client) -> None:
        for key in sorted(client.revoking):
            if self.quiet or self.chance.random() < 0.7:
                del client.revoking[key]
                client.news = True

    def hear(self, sent: Sent, message: Any) -> None:
        client = sent.client
        if (
            not client.alive
            or sent.member_id != client.member_id
            or not isinstance(sent.request, GroupHeartbeatRequest)
        ):
            return
        if client.waiting is sent:
            client.waiting = None
        if isinstance(message, int):
            if message == errors.UnknownMember.code:
                client.begin_anew(self.now_ms)
            elif message == errors.FencedInstance.code:
                client.alive = False
            else:
                client.deposed = False
            return
        if client.revision and self.now_ms >= client.answered_ms + SESSION_MS:
            return  # it has given up on that membership
        client.answered_ms = max(client.answered_ms, sent.sent_ms)
        client.generation = max(client.generation, message.generation)
        if sent.request.topics == client.topics:
            client.tell_topics = False
        if message.assignment is not None and message.revision > client.revision:
            self._adopt(client, message)

    def _adopt(self, client: Client, message: GroupHeartbeatResponse) -> None:
        given = {PartitionKey(t.topic_id, row.partition) for t in message.assignment or [] for row in t.partitions}
        client.revision, client.news = message.revision, True
        for key in client.holds.keys() - given:
            client.revoking[key] = client.holds.pop(key)
        for key in sorted(given - client.holds.keys()):
            client.revoking.pop(key, None)
            self.tenure += 1
            client.holds[key] = self.tenure

    # -- events --------------------------------------------------------------------------------------------------

    def deliver(self, sent: Sent) -> None:
        late = self.zombie is not None and (sent.client.deposed or self.chance.random() < 0.05)
        self.deliver_to(self.zombie if self.zombie is not None and late else self.coordinator, sent)

    def deliver_to(self, coordinator: Coordinator, sent: Sent) -> None:
        again = Sent(sent.client, sent.member_id, sent.request, sent.sent_ms)
        if isinstance(sent.request, GroupHeartbeatRequest):
            if sent.request.topics is not None:
                if sent.sent_ms < sent.client.subscribed_ms:
                    return
                sent.client.subscribed_ms = sent.sent_ms
            if sent.client.waiting is sent:
                again = sent
            self.perform(coordinator, coordinator.on_heartbeat(again, sent.request, self.now_ms))
        else:
            effects = coordinator.on_commit(again, sent.request, self.now_ms, WALL_MS + self.now_ms)
            self.perform(coordinator, effects)

    def pass_time(self, length_ms: int) -> None:
        """Both coordinators are called whenever they want to be."""
        end_ms = self.now_ms + length_ms
        while True:
            some = [c for c in (self.coordinator, self.zombie) if c is not None]
            due = [(c.next_due_ms, n) for n, c in enumerate(some) if c.next_due_ms is not None]
            if not due or min(due)[0] > end_ms:
                break
            due_ms, number = min(due)
            self.now_ms = max(self.now_ms, due_ms)
            self.lease_now()
            coordinator = some[number]
            self.perform(coordinator, coordinator.on_tick(self.now_ms, WALL_MS + self.now_ms))
            self.check()
        self.now_ms = end_ms
        self.lease_now()

    def lease_now(self) -> None:
        """The coordinator hears from the controller all the time, a deposed one no more."""
        self.lease.grant(self.now_ms)

    def step(self) -> None:
        events: list[tuple[int, Callable[[], None]]] = [
            (30, self._deliver_request),
            (30, self._deliver_answer),
            (3, self._deliver_slow),
            (20, self._client_acts),
            (12, self._client_commits),
            (10, self._client_lets_go),
            (20, self.replicate),
            (15, lambda: self.pass_time(self.chance.choice([1, 20, 100, 400]))),
            (2, lambda: self.pass_time(self.chance.choice([1_500, 3_000, 6_000]))),
            (3, self._client_changes),
            (2, self.fail_over),
            (1, self.doubt),
            (1, self._refuse_or_not),
            (1, self._change_topics),
        ]
        [event] = self.chance.choices([e for _, e in events], [weight for weight, _ in events])
        event()
        self.check()

    def _deliver_request(self) -> None:
        if self.requests:
            at = self.chance.choice([0, self.chance.randrange(len(self.requests))])
            fate = self.chance.random()
            sent = self.requests[at] if fate < 0.1 else self.requests.pop(at)
            if fate < 0.95:
                self.deliver(sent)

    def _deliver_answer(self) -> None:
        if self.answers:
            at = self.chance.choice([0, self.chance.randrange(len(self.answers))])
            fate = self.chance.random()
            sent, message = self.answers[at]
            if sent.client.paused:
                return
            if fate >= 0.05:
                del self.answers[at]
            if fate < 0.95:
                self.hear(sent, message)

    def _deliver_slow(self) -> None:
        if self.slow:
            self.deliver(self.slow.pop(self.chance.randrange(len(self.slow))))

    def _any(self) -> Client | None:
        alive = [client for client in self.clients if client.alive]
        return self.chance.choice(alive) if alive else None

    def _client_acts(self) -> None:
        for client in self.clients:
            self.act(client)

    def _client_commits(self) -> None:
        client = self._any()
        if client is not None and client.believes(self.now_ms):
            self.commit(client)

    def _client_lets_go(self) -> None:
        client = self._any()
        if client is not None and not client.paused:
            self.let_go(client)

    def _client_changes(self) -> None:
        client = self._any()
        what = self.chance.choice(["new", "new", "static", "leave", "crash", "pause", "resume", "restart", "topics"])
        if what in ("new", "static") and sum(c.alive for c in self.clients) < CLIENTS_MAX:
            instances = {c.instance_id for c in self.clients if c.alive}
            free = [i for i in ("s1", "s2") if i not in instances]
            self.new_client(free[0] if what == "static" and free else None)
        elif client is None:
            pass
        elif what == "leave":
            client.holds, client.revoking = {}, {}
            self.heartbeat(client, leaving=True)
            client.alive = False
        elif what == "crash":
            client.alive = False
        elif what in ("pause", "resume"):
            client.paused = what == "pause"
        elif what == "restart" and client.instance_id is not None:
            self.restart_static(client)
        elif what == "topics":
            client.topics = self.chance.choice([["t"], ["t", "u"], ["u", "v"]])
            client.tell_topics = client.news = True

    def _refuse_or_not(self) -> None:
        self.refusing = not self.refusing

    def _change_topics(self) -> None:
        name = self.chance.choice("tuv")
        present = self.topics.topic_named(name)
        if present is None or self.chance.random() < 0.3:
            self.lives[name] += 1
            self.topics.set(name, self.chance.randint(1, 5), self.lives[name])
        elif self.chance.random() < 0.3:
            self.topics.drop(name)
        else:
            self.topics.set(name, len(present.partitions) + 1, self.lives[name])
        for coordinator in (self.coordinator, self.zombie):
            if coordinator is not None:
                self.perform(coordinator, coordinator.on_topics(self.now_ms))

    # -- quiet ---------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """No more faults: everything arrives, and those who live go on."""
        self.quiet, self.refusing, self.zombie = True, False, None
        self.requests += self.slow
        for client in self.clients:
            client.paused = client.deposed = False
        for _ in range(400):
            self._calm_round()
        self.check_quiet()
        before = {client.name: set(client.holds) for client in self.clients if client.alive}
        self.fail_over()
        self.zombie = None
        for client in self.clients:
            client.deposed = False
        for _ in range(200):
            self._calm_round()
        self.check_quiet()
        after = {client.name: set(client.holds) for client in self.clients if client.alive}
        if before != after:
            raise Broken("a change of coordinator moved partitions")

    def _calm_round(self) -> None:
        for client in self.clients:
            self.act(client)
            self.let_go(client)
        requests, self.requests = self.requests, []
        for sent in requests:
            self.deliver_to(self.coordinator, sent)
        while self.replicated < len(self.log):
            self.replicate()
        answers, self.answers = self.answers, []
        for sent, message in answers:
            self.hear(sent, message)
        self.check()
        self.pass_time(100)

    def check_quiet(self) -> None:
        held = {key for client in self.clients for key in client.believes(self.now_ms)}
        wanted = {
            PartitionKey(topic.topic_id, number)
            for topic in self.topics.topics.values()
            if any(topic.name in client.topics for client in self.clients if client.alive)
            for number in range(len(topic.partitions))
        }
        if held != wanted:
            raise Broken(f"nobody reads {sorted(wanted - held)}; {sorted(held - wanted)} should not be read")
        desk = self.coordinator._desks.get("g")
        if desk is not None and desk.group.members and desk.group.state != "stable":
            raise Broken("the group does not come to rest")
        self.check_memory()


def _held(state: GroupState | None, member_id: str, revoked: bool = True) -> set[PartitionKey]:
    return {
        PartitionKey(state.topics[run.topic].topic_id or b"", number)
        for member in (state.members if state is not None else [])
        if member.member_id == member_id
        for run in member.held
        if revoked or run.revoked < 0
        for number in run.partitions
    }


def run(seed: int, steps: int = 400) -> World:
    world = World(seed)
    world.new_client()
    world.new_client()
    for number in range(steps):
        world.step()
        if number % 20 == 0:
            world.check_memory()
    world.settle()
    return world
