"""The rules of the protocol, each with a way to take it out: the simulator must then find a violation.

A mutation replaces a few functions of the code under test while schedules run, and puts them back afterwards. Nothing
in the product knows of it. Names of rules are those of the protocol's description (A controller, B leader, C follower,
D disk, E producer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zmqueue.broker.executor import Executor
from zmqueue.core import commands as c
from zmqueue.core import effects as e
from zmqueue.core.controller import Controller
from zmqueue.core.follower import Follower
from zmqueue.core.leader import Leader
from zmqueue.core.lease import Lease
from zmqueue.core.log_view import LogView
from zmqueue.core.metadata import ClusterState, LastCommand
from zmqueue.core.node import Node
from zmqueue.core.producers import Producers
from zmqueue.core.replica import Replica
from zmqueue.errors import DuplicateSequence
from zmqueue.log.partition_log import PartitionLog
from zmqueue.log.session import DataFolder
from zmqueue.log.start import Start
from zmqueue.log.ticket import FlushTicket
from zmqueue.model import NO_BROKER, PartitionKey

Put = Callable[[Any, str, Any], None]
Mutation = Callable[[Put], None]

_INHERITED = object()
MUTATIONS: dict[str, tuple[str, Mutation]] = {}  # name: (rule, how)


def mutation(rule: str) -> Callable[[Mutation], Mutation]:
    def register(apply: Mutation) -> Mutation:
        MUTATIONS[apply.__name__.replace("_", "-")] = rule, apply
        return apply

    return register


@contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """The product without one of its rules."""
    undo: list[tuple[Any, str, Any]] = []

    def put(owner: Any, attribute: str, value: Any) -> None:
        undo.append((owner, attribute, owner.__dict__.get(attribute, _INHERITED)))
        setattr(owner, attribute, value)

    try:
        if name is not None:
            MUTATIONS[name][1](put)
        yield
    finally:
        for owner, attribute, value in reversed(undo):
            if value is _INHERITED:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, value)


# -- A: controller and metadata ----------------------------------------------------------------------------------


@mutation("A2")
def no_barrier_on_take_over(put: Put) -> None:
    """A new controller acts at once, on what it happens to know."""
    put(Controller, "is_active", property(lambda self: self._term is not None))


@mutation("A3")
def restart_keeps_isr_memory(put: Put) -> None:
    _restart_keeps_isr(put, "memory")


@mutation("A3")
def restart_keeps_isr_disk(put: Put) -> None:
    _restart_keeps_isr(put, "disk")


def _restart_keeps_isr(put: Put, storage: str) -> None:
    register, remove = ClusterState._register, ClusterState._remove

    def keeping(self: Any, key: Any, topic: Any, partition: Any, gone: set[int], *, lost: bool = False) -> None:
        if topic.storage != storage or not getattr(self, "registering", False):
            remove(self, key, topic, partition, gone, lost=lost)

    def registering(self: Any, command: c.Register) -> int:
        self.registering = True
        try:
            return register(self, command)
        finally:
            self.registering = False

    put(ClusterState, "_remove", keeping)
    put(ClusterState, "_HANDLERS", {**ClusterState._HANDLERS, c.Register: registering})


@mutation("A3")
def unclean_stays_in_elr(put: Put) -> None:
    remove = ClusterState._remove
    put(ClusterState, "_remove", lambda *args, lost=False: remove(*args))


@mutation("A5")
def no_epoch_check_on_the_wire(put: Put) -> None:
    fetched, push = Follower.on_fetched, Follower.on_push

    def on_ack(self: Any, broker: int, broker_epoch: int, row: Any, now_ms: int) -> list[e.Effect]:
        return self.part.on_ack(broker, broker_epoch, row.durable_end, now_ms) if self.leading else []

    def on_follower_fetch(self: Any, token: Any, fetch: Any, now_ms: int) -> list[e.Effect]:
        if self.leading:
            return self.part.on_fetch(token, fetch, now_ms)
        return [self._reject(token, fetch, 6)]

    def on_fetched(self: Any, response: Any, batches: Any, now_ms: int) -> list[e.Effect]:
        response.leader_epoch = self.epoch
        return fetched(self, response, batches, now_ms)

    def on_push(self: Any, sent: Any, batches: Any, now_ms: int) -> list[e.Effect]:
        sent.leader_epoch, sent.broker = self.epoch, self.leader
        return push(self, sent, batches, now_ms)

    put(Replica, "on_ack", on_ack)
    put(Replica, "on_follower_fetch", on_follower_fetch)
    put(Follower, "on_fetched", on_fetched)
    put(Follower, "on_push", on_push)


@mutation("A6")
def unclean_election(put: Put) -> None:
    elect = ClusterState._elect

    def _elect(self: Any, key: Any, topic: Any, partition: Any) -> None:
        elect(self, key, topic, partition)
        live = [b for b in partition.replicas if self.is_live(b)]
        if partition.leader == NO_BROKER and live:
            partition.isr = live[:1]
            partition.elr = [b for b in partition.elr if b != live[0]]
            self._lead(key, topic, partition, live[0])

    put(ClusterState, "_elect", _elect)


@mutation("A7")
def elr_is_never_emptied(put: Put) -> None:
    def _update_elr(self: Any, topic: Any, partition: Any, removed: Any) -> None:
        complete = (set(partition.elr) | set(removed)) - set(partition.isr)
        partition.elr = [b for b in partition.replicas if b in complete]

    put(ClusterState, "_update_elr", _update_elr)


@mutation("A7")
def no_elr(put: Put) -> None:
    def _update_elr(self: Any, topic: Any, partition: Any, removed: Any) -> None:
        partition.elr = []

    put(ClusterState, "_update_elr", _update_elr)


# -- B: leader ---------------------------------------------------------------------------------------------------


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


@mutation("B8")
def alter_isr_without_cas(put: Put) -> None:
    change_isr = ClusterState._change_isr

    def _change_isr(self: Any, leader: int, change: c.IsrChange) -> None:
        partition = self.partition(PartitionKey(change.topic_id, change.partition))
        epoch = partition.partition_epoch if partition else 0
        change_isr(self, leader, c.IsrChange(change.topic_id, change.partition, change.leader_epoch, epoch, change.isr))

    put(ClusterState, "_change_isr", _change_isr)


@mutation("B8c")
def no_leader_epoch_start(put: Put) -> None:
    begin = Leader.begin

    def _begin(self: Any) -> list[e.Effect]:
        self.start_end = 0
        return begin(self)

    put(Leader, "begin", _begin)


@mutation("B8d")
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


@mutation("B8")
def proposal_rebuilt_on_retry(put: Put) -> None:
    step = Node.step

    def _step(self: Any, now_ms: int) -> list[e.Effect]:
        sent = self._proposer.sent
        if sent is not None and now_ms >= sent.resend_ms and isinstance(sent.wish.command, c.AlterIsr):
            for change in sent.wish.command.changes:
                for ref in change.isr:
                    ref.epoch = self.state.brokers[ref.broker].epoch
            envelope = c.Envelope(self.broker, self._proposer.incarnation, sent.number, sent.wish.command)
            sent.data = c.encode(envelope)
        return step(self, now_ms)

    put(Node, "step", _step)


@mutation("B8")
def proposal_forgotten_early(put: Put) -> None:
    """A proposal under way is forgotten at the next change of metadata, whatever becomes of it."""
    on_metadata = Leader.on_metadata

    def _on_metadata(self: Any, *args: Any) -> list[e.Effect]:
        self.pending = None
        return on_metadata(self, *args)

    put(Leader, "on_metadata", _on_metadata)


@mutation("B9")
def no_lease(put: Put) -> None:
    put(Lease, "writable", lambda self, now_ms: True)
    put(Lease, "readable", lambda self, now_ms: True)


@mutation("B10")
def no_resignation(put: Put) -> None:
    put(Replica, "_resign", lambda self: [])


# -- C: follower -------------------------------------------------------------------------------------------------


@mutation("C2")
def late_fetch_answer_used(put: Put) -> None:
    fetched = Follower.on_fetched

    def on_fetched(self: Any, response: Any, batches: Any, now_ms: int) -> list[e.Effect]:
        if response.leader_epoch == self.epoch:
            self._fetching, self._fetch_id = True, response.fetch_id
            if response.diverged_end >= 0:
                self.established = False
        return fetched(self, response, batches, now_ms)

    put(Follower, "on_fetched", on_fetched)


@mutation("C3")
def follower_truncates_to_watermark(put: Put) -> None:
    def begin(self: Any, now_ms: int) -> list[e.Effect]:
        self._fetch_due_ms = now_ms
        return [e.Truncate(self.key, self.log.high_watermark)]

    put(Follower, "begin", begin)


@mutation("C3")
def no_divergence_check(put: Put) -> None:
    on_fetch = Leader.on_fetch

    def _on_fetch(self: Any, token: Any, fetch: Any, now_ms: int) -> list[e.Effect]:
        fetch.last_epoch = self.log.epochs.last
        fetch.log_end = min(fetch.log_end, self.log.log_end)
        return on_fetch(self, token, fetch, now_ms)

    put(Leader, "on_fetch", _on_fetch)


@mutation("C4")
def push_before_first_fetch(put: Put) -> None:
    on_push = Follower.on_push

    def _on_push(self: Any, push: Any, batches: Any, now_ms: int) -> list[e.Effect]:
        kept = self.established, self._fetching
        if push.leader_epoch == self.epoch and push.base_offset <= self.log.log_end:
            self.established, self._fetching = True, False
        effects = on_push(self, push, batches, now_ms)
        self.established, self._fetching = kept[0], kept[1] or self._fetching
        return effects

    put(Follower, "on_push", _on_push)
    put(Follower, "on_flushed", lambda self: self._ack())
    put(Follower, "_continues", lambda self, push: push.base_offset <= self.log.log_end)


@mutation("C4")
def ack_over_gap(put: Put) -> None:
    on_push = Follower.on_push

    def _on_push(self: Any, push: Any, batches: Any, now_ms: int) -> list[e.Effect]:
        effects = on_push(self, push, batches, now_ms)
        if self.established and push.leader_epoch == self.epoch and push.base_offset > self.log.log_end:
            effects = [*effects, e.SendAck(self.key, self.leader, self.epoch, push.log_end)]
        return effects

    put(Follower, "on_push", _on_push)


@mutation("C5")
def ack_before_fsync(put: Put) -> None:
    append = Follower._append

    def _append(self: Any, batches: Any, high_watermark: int) -> list[e.Effect]:
        effects = append(self, batches, high_watermark)
        if effects:
            effects.append(e.SendAck(self.key, self.leader, self.epoch, self.log.log_end))
        return effects

    put(Follower, "_append", _append)


# -- D: disk and restart -----------------------------------------------------------------------------------------


@mutation("D1")
def unclean_session_not_told(put: Put) -> None:
    read_session = DataFolder._read_session

    def _read_session(self: Any) -> None:
        read_session(self)
        self.unclean = False

    put(DataFolder, "_read_session", _read_session)
    put(Node, "_on_registered", _without_reports(Node._on_registered))


def _without_reports(on_registered: Any) -> Any:
    def _on_registered(self: Any, epoch: int, now_ms: int) -> list[e.Effect]:
        lost, self.on_lost = self.on_lost, lambda key: None
        try:
            return list(on_registered(self, epoch, now_ms))
        finally:
            self.on_lost = lost
            self._reporting.clear()

    return _on_registered


@mutation("D1")
def rolled_back_folder_not_noticed(put: Put) -> None:
    register = ClusterState._register

    def _register(self: Any, command: c.Register) -> int:
        known = self.brokers.get(command.broker)
        if known is not None and known.incarnation not in command.previous and command.previous:
            fields = {name: getattr(command, name) for name in command.__struct_fields__}
            command = c.Register(**{**fields, "previous": [*command.previous, known.incarnation]})
        return register(self, command)

    put(ClusterState, "_HANDLERS", {**ClusterState._HANDLERS, c.Register: _register})


@mutation("D3")
def failed_append_goes_on(put: Put) -> None:
    """What could not be written is published all the same, and acknowledged by whoever could."""

    def _publish(self: Any, effect: e.Publish) -> None:
        self._peers.publish(effect, self._node.epoch)

    put(Executor, "_publish", _publish)


@mutation("D4")
def flush_of_another_generation_counts(put: Put) -> None:
    flushed = PartitionLog.flushed

    def _flushed(self: Any, ticket: FlushTicket) -> bool:
        ticket.generation = self.generation
        ticket.end = min(ticket.end, self.log_end)
        return flushed(self, ticket)

    put(PartitionLog, "flushed", _flushed)


@mutation("D4")
def folders_are_not_synced(put: Put) -> None:
    def sync(self: Any) -> None:
        for file in self.files:
            file.sync()
        self.synced = True

    put(FlushTicket, "sync", sync)


# -- E: producers ------------------------------------------------------------------------------------------------


@mutation("E1")
def producer_state_not_rebuilt(put: Put) -> None:
    begin = Leader.begin

    def _begin(self: Any) -> list[e.Effect]:
        self.log.producers = Producers()
        return begin(self)

    put(Leader, "begin", _begin)


@mutation("E1")
def producer_state_not_rolled_back(put: Put) -> None:
    restate = LogView.restate

    def _restate(self: Any, log_start: int, log_end: int, epochs: Any, producers: Any, first_offset: int = -1) -> None:
        restate(self, log_start, log_end, epochs, self.producers, first_offset)

    put(LogView, "restate", _restate)


@mutation("E1")
def producers_of_deleted_batches_are_forgotten(put: Put) -> None:
    save = PartitionLog._save_start

    def _save(self: Any, start: Start, leaving: Any) -> None:
        save(self, Start(start.log_start, b"", start.epoch, start.base), leaving)

    put(PartitionLog, "_save_start", _save)


@mutation("E1")
def a_copy_that_starts_anew_knows_no_producers(put: Put) -> None:
    put(Follower, "_adopt", lambda self, response: [])


@mutation("E2")
def duplicate_acknowledged_early(put: Put) -> None:
    on_produce = Leader.on_produce

    def _on_produce(self: Any, token: Any, batch: Any, *args: Any, **options: Any) -> list[e.Effect]:
        try:
            written = self.log.producers.check(batch.header)
        except DuplicateSequence:
            written = None
        except Exception:
            return on_produce(self, token, batch, *args, **options)
        if written is not None:
            return [e.AnswerProduce(token, self._success(written.base_offset))]
        return on_produce(self, token, batch, *args, **options)

    put(Leader, "on_produce", _on_produce)


@mutation("E2")
def sequences_are_not_checked(put: Put) -> None:
    put(Producers, "check", lambda self, header: None)


# -- mistakes that schedules found, put back ---------------------------------------------------------------------


@mutation("fixed")
def snapshot_leaves_leaders_an_old_table(put: Put) -> None:
    load = ClusterState.load

    def _load(self: Any, data: bytes) -> None:
        self.brokers = dict(self.brokers)
        load(self, data)

    put(ClusterState, "load", _load)


@mutation("fixed")
def follower_that_waited_fenced_is_forgotten(put: Put) -> None:
    unfence = ClusterState._unfence

    def _unfence(self: Any, command: c.Unfence) -> None:
        unfence(self, command)
        led = [key for key in self._applied.partitions if self.partition(key).leader != command.broker]
        for key in led:
            del self._applied.partitions[key]

    put(ClusterState, "_HANDLERS", {**ClusterState._HANDLERS, c.Unfence: _unfence})


@mutation("fixed")
def new_log_is_not_synced(put: Put) -> None:
    on_opened = Node.on_opened

    def _on_opened(self: Any, key: Any, log: LogView, now_ms: int) -> list[e.Effect]:
        return [effect for effect in on_opened(self, key, log, now_ms) if not isinstance(effect, e.Flush)]

    put(Node, "on_opened", _on_opened)


@mutation("fixed")
def appends_behind_a_failed_one(put: Put) -> None:
    append = Executor._append

    def _append(self: Any, effect: e.Append) -> Any:
        failed, self._failed = self._failed, set()
        try:
            return append(self, effect)
        finally:
            self._failed |= failed

    put(Executor, "_append", _append)


@mutation("fixed")
def late_registration_silences_the_broker(put: Put) -> None:
    apply = ClusterState.apply

    def _apply(self: Any, data: bytes) -> Any:
        applied = apply(self, data)
        envelope = applied.envelope
        if envelope is not None and isinstance(envelope.command, c.Register) and not applied.duplicate:
            last = LastCommand(envelope.broker, envelope.incarnation, envelope.number, applied.outcome)
            self.last_commands[envelope.broker] = last
        return applied

    put(ClusterState, "apply", _apply)


# Tests of one rule each, in tests/unit: for what no schedule shows, because another rule hides it or because it costs
# availability and no record.
DIRECTED: dict[str, str] = {
    "no-barrier-on-take-over": "core/test_controller.py::test_before_its_barrier_is_applied_it_does_nothing",
    "no-epoch-check-on-the-wire": "core/test_replica.py::test_an_acknowledgement_of_an_older_epoch_counts_for_nothing",
    "alter-isr-without-cas": "core/test_metadata.py::test_an_isr_change_that_does_not_fit_is_refused",
    "no-broker-epoch-in-alter-isr": "core/test_metadata.py::test_an_isr_change_that_does_not_fit_is_refused",
    "proposal-rebuilt-on-retry": "core/test_proposer.py::test_a_retry_is_the_same_bytes",
    "proposal-forgotten-early": "core/test_node.py::test_an_isr_change_goes_through_raft_and_ends_when_it_is_applied",
    "no-resignation": (
        "core/test_replica.py::test_a_leader_that_sees_a_newer_epoch_resigns_at_once_and_answers_all_who_wait"
    ),
    "late-fetch-answer-used": (
        "core/test_follower.py::test_a_late_duplicate_of_a_diverging_answer_never_cuts_what_was_acknowledged"
    ),
    "flush-of-another-generation-counts": (
        "log/test_flusher.py::test_a_log_truncated_during_its_sync_is_not_durable_by_it"
    ),
    "no-leader-epoch-start": (
        "core/test_leader.py::test_a_follower_below_the_start_of_this_leaders_epoch_is_not_proposed"
    ),
    "no-lease": "core/test_leader.py::test_the_lease_is_checked_again_before_the_answer",
    "late-registration-silences-the-broker": (
        "core/test_metadata.py::test_a_late_registration_does_not_silence_the_present_life"
    ),
    "unclean-session-not-told": ("log/test_session.py::test_a_power_cut_loses_what_was_acknowledged_before_its_sync"),
}
