"""The Raft group of the brokers: one ordered, durable list of commands, applied by every broker to its own machine.

PySyncObj decides who leads, what is replicated and what is committed. What it does not promise is added around it:
raft_group corrects its rules, raft_transport its links, raft_snapshots and the log layer's journal its files.

Invariants
- No message that acknowledges, votes or replicates leaves before everything it relies on is on the disk. Without that
  the message is not sent at all, which Raft takes for a lost one.
- A command is applied once per member and start, in order; an exception of the machine is logged and counted, and the
  command is done with. Callbacks run outside PySyncObj, after the tick, each once, whatever they raise.
- A member that may have forgotten what it promised neither votes nor stands (`voting` is False, see raft_folder).

Not here: what commands mean (core), when to tick (the broker's loop).
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from zmqueue.broker.raft_folder import RESERVE_FILE, Reserve, format_folder, open_storage
from zmqueue.broker.raft_group import (
    COMMANDS_MAX,
    CONNECTION_RETRY_S,
    CONNECTION_TIMEOUT_S,
    FAIL_REASON,
    REGULAR,
    Group,
    Node,
    conf_of,
    in_place_of,
)
from zmqueue.broker.raft_snapshots import SNAPSHOT_FILE, Snapshots
from zmqueue.broker.raft_transport import Message, Poller, Seldom, Transport
from zmqueue.config import RaftConfig
from zmqueue.errors import ZmqueueError
from zmqueue.log.journal import Entry

__all__ = ["Outcome", "ProposalOutcome", "RaftMachine", "RaftNode", "format_folder"]

log = logging.getLogger(__name__)

_PASSES_MAX = 8
_HAND_OVER_S = 0.25  # for a member to win an election, before another one is asked


# -- the broker's side of the contract -----------------------------------------------------------------------------


class RaftMachine(Protocol):
    """The replicated state. All three run inside `tick()`."""

    def apply(self, command: bytes) -> bytes: ...

    def snapshot(self) -> bytes: ...

    def restore(self, data: bytes) -> None: ...


class Outcome(Enum):
    COMMITTED = "committed"
    REJECTED = "rejected"  # certainly not applied, now or later
    UNKNOWN = "unknown"  # may have been applied or may yet be: ask again with the same operation id


class ProposalOutcome(NamedTuple):
    kind: Outcome
    result: bytes = b""
    reason: str = ""


_CERTAINLY_NOT = {
    FAIL_REASON.QUEUE_FULL: "the queue of commands is full",
    FAIL_REASON.MISSING_LEADER: "no leader",
    FAIL_REASON.DISCARDED: "another leader's command took its place",
    FAIL_REASON.NOT_LEADER: "the leader has changed",
    FAIL_REASON.REQUEST_DENIED: "denied",
}


class RaftNode:
    """One member of the group. Single-threaded: every method belongs to the broker's loop.

    The loop watches `fileno()` and calls `tick()` when it is readable, after `propose()`, and every `tick_ms` at least.
    """

    def __init__(
        self,
        *,
        broker_id: int,
        members: dict[int, tuple[str, int]],
        folder: Path,
        secret: bytes,
        config: RaftConfig,
        machine: RaftMachine,
        time_scale: float = 1.0,
        proposal_timeout_ms: int = 2_000,
    ) -> None:
        assert broker_id in members, f"broker {broker_id} is not among {sorted(members)}"
        folder.mkdir(parents=True, exist_ok=True)
        self._broker_id = broker_id
        self._members = members
        self._config = config
        self._machine = machine
        self._proposal_timeout_s = proposal_timeout_ms / 1000 * time_scale
        self._broken: str | None = None
        self._closed = False
        self._proposals = 0
        self._waiting: dict[int, tuple[Callable[[ProposalOutcome], None], float]] = {}
        self._outcomes: deque[tuple[Callable[[ProposalOutcome], None], ProposalOutcome]] = deque()
        self._checked_disk = time.monotonic()
        self._handed_over = 0
        self._hand_over_due = 0.0
        self._seldom = Seldom()
        self.apply_errors = self.callback_errors = self.tick_errors = 0
        self._reserve = Reserve(folder / RESERVE_FILE, config.disk_reserve_bytes)
        storage = open_storage(folder, broker_id, self._reserve.release)
        self._journal = storage.journal
        self._voting = storage.voting
        self._snapshots = Snapshots(
            storage.folder / SNAPSHOT_FILE,
            machine,
            index=storage.snapshot_index,
            wanted=self._wants,
            on_broken=self._on_broken,
            on_installed=self._on_installed,
        )
        self._poller = Poller()
        nodes = {member: Node(str(member)) for member in members}
        try:
            self._transport = Transport(
                poller=self._poller,
                own_id=broker_id,
                members=members,
                nodes=nodes,
                secret=secret,
                before_send=self._before_send,
                retry_s=CONNECTION_RETRY_S * time_scale,
                ping_s=config.ping_ms / 1000 * time_scale,
                silence_s_max=CONNECTION_TIMEOUT_S * time_scale,
            )
            with in_place_of(self._journal, self._poller, self._snapshots):
                self._group = Group(
                    nodes[broker_id],
                    [node for member, node in nodes.items() if member != broker_id],
                    conf_of(config, time_scale, storage.folder / SNAPSHOT_FILE),
                    self._transport,
                    self._apply,
                    self._voting,
                    config.command_bytes_max,
                )
        except BaseException:
            self._journal.close()
            self._poller.close()
            raise

    def _wants(self, last: Entry) -> bool:
        """Of a leader's snapshot: not if this member has its last entry, in its log or already applied."""
        return self._journal.find(last[1]) != last and last[1] > self._group.raftLastApplied

    def _on_broken(self, reason: str) -> None:
        log.critical("broker %d leaves the Raft group: %s", self._broker_id, reason)
        self._broken = reason

    def _on_installed(self, index: int) -> None:
        self._journal.setRaftCommitIndex(index)
        self._group.forget_waiting(index)

    # -- what the broker asks --------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Readable when `tick()` has work from the network."""
        return self._poller.fileno()

    @property
    def failed(self) -> str | None:
        """Why this member has stopped for good; the process should end and start again."""
        return self._broken or self._journal.failed

    @property
    def voting(self) -> bool:
        return self._voting

    @property
    def has_others(self) -> bool:
        return len(self._members) > 1

    @property
    def has_quorum(self) -> bool:
        """A majority is linked to this member, itself included: there may be a leader, now or soon."""
        return bool(self._group.hasQuorum)

    @property
    def low_disk(self) -> bool:
        return self._reserve.low or self._journal.full

    @property
    def term(self) -> int:
        return int(self._group.raftCurrentTerm)

    @property
    def is_leader(self) -> bool:
        """Leads as far as it knows, and a majority answered within the fallback time."""
        return bool(
            self._group._isLeader() and self.failed is None and not self._closed and self._group.heard_by_majority()
        )

    @property
    def leader(self) -> int | None:
        node = self._group._getLeader()
        if node is None or self.failed is not None:
            return None
        leader = int(node.id)
        return leader if leader != self._broker_id or self.is_leader else None

    def status(self) -> dict[str, Any]:
        group = self._group.getStatus()
        return {
            "broker_id": self._broker_id,
            "leader": self.leader,
            "is_leader": self.is_leader,
            "term": self.term,
            "voting": self.voting,
            "failed": self.failed,
            "low_disk": self.low_disk,
            "commit_index": group["commit_idx"],
            "applied_index": group["last_applied"],
            "log_first_index": self._journal[0][1],
            "log_last_index": self._journal[-1][1],
            "journal_bytes": self._journal.size_bytes,
            "journal_syncs": self._journal.syncs,
            "snapshot_index": self._snapshots.index,
            "proposals_waiting": len(self._waiting),
            "apply_errors": self.apply_errors,
            "callback_errors": self.callback_errors,
            "tick_errors": self.tick_errors,
            "links_refused": self._transport.refused,
            "links": {member: self._transport.is_up(member) for member in self._members if member != self._broker_id},
        }

    def compact(self) -> None:
        """Store a snapshot and drop the entries it covers at the next ticks, however few they are."""
        self._group.forceLogCompaction()

    def hand_over(self) -> None:
        """Let another member lead, if this one does. Call it until `is_leader` is false: a member may decline."""
        now = time.monotonic()
        if self.is_leader and now >= self._hand_over_due and self._group.hand_over(self._handed_over):
            self._handed_over += 1
            self._hand_over_due = now + _HAND_OVER_S

    def propose(self, command: bytes, done: Callable[[ProposalOutcome], None]) -> None:
        """Ask the group to apply `command`. `done` is called once, from a later `tick()` or from `close()`."""
        leader = self.leader
        refusal = None
        if self._closed or self.failed is not None:
            refusal = "this member has stopped"
        elif len(command) > self._config.command_bytes_max:
            refusal = f"{len(command)} bytes, allowed are {self._config.command_bytes_max}"
        elif len(self._waiting) >= COMMANDS_MAX:
            refusal = f"{COMMANDS_MAX} proposals are waiting"
        elif self._journal.full and self.is_leader:
            refusal = "the leader's disk is full"
        elif leader is None:
            refusal = "no leader"
        elif leader != self._broker_id and not self._transport.is_up(leader):
            refusal = f"no link to the leader, broker {leader}"
        if refusal is not None:
            self._outcomes.append((done, ProposalOutcome(Outcome.REJECTED, reason=refusal)))
            return
        self._proposals += 1
        number = self._proposals
        self._waiting[number] = (done, time.monotonic() + self._proposal_timeout_s)
        self._group._applyCommand(REGULAR + command, functools.partial(self._on_result, number))

    def tick(self) -> None:
        """Everything that is due: messages, elections, appends, commits, outcomes. Never waits, never raises."""
        if self._closed:
            self._deliver()
            return
        now = time.monotonic()
        if self.failed is None:
            self._guarded(self._run)
            self._guarded(functools.partial(self._transport.tick, now))
        if now - self._checked_disk >= 1.0:
            self._checked_disk = now
            self._reserve.check()
            self._journal.full = self._journal.full and self._reserve.low
        self._expire(now)
        self._deliver()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for number in list(self._waiting):
            self._resolve(number, ProposalOutcome(Outcome.UNKNOWN, reason="closed"))
        self._snapshots.close()
        self._group.destroy()
        self._group.close_pipe()
        self._poller.close()
        self._deliver()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Messages first, because PySyncObj polls last and would act on them only at the next tick."""
        self._poller.poll(0.0)
        for _ in range(_PASSES_MAX):
            seen = self._poller.dispatched
            if not self._voting:
                self._group.never_stand()
            self._group.doTick(0.0)
            # The leader counts itself among those that have an entry: at its next pass, hence durable before that.
            self._journal.sync()
            alone_and_behind = len(self._members) == 1 and self._group.raftCommitIndex < self._group.last_index()
            if self._poller.dispatched == seen and not alone_and_behind:
                return

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            self.tick_errors += 1
            self._seldom.log(
                logging.ERROR, f"raft tick failed: {error!r}", exc_info=not isinstance(error, ZmqueueError)
            )

    def _before_send(self, message: Message) -> bool:
        """Whether a message may go out, made durable what it relies on. PySyncObj takes no for a lost message."""
        kind = message["type"]
        if kind in ("apply_command", "apply_command_response"):
            return True  # they promise nothing
        if self.failed is not None:
            return False
        if kind in ("request_vote", "response_vote") and not self._voting:
            return False
        if self._journal.full and kind in ("append_entries", "request_vote", "response_vote"):
            return False  # who cannot write cannot lead; others elect one who can
        if kind == "next_node_idx":
            message["term"] = self.term
        try:
            self._journal.sync()
        except ZmqueueError as error:
            self._seldom.log(logging.ERROR, f"raft messages {kind} are withheld: {error}")
            return False
        return True

    def _apply(self, command: bytes) -> bytes:
        try:
            return self._machine.apply(command)
        except Exception:
            # Raised again, PySyncObj would repeat the command for ever and apply no other.
            self.apply_errors += 1
            log.exception("a command of %d bytes failed and counts as done: %s", len(command), command[:64].hex())
            return b""

    def _on_result(self, number: int, result: bytes | None, reason: int) -> None:
        if reason == FAIL_REASON.SUCCESS:
            self._resolve(number, ProposalOutcome(Outcome.COMMITTED, result or b""))
        elif reason in _CERTAINLY_NOT:
            self._resolve(number, ProposalOutcome(Outcome.REJECTED, reason=_CERTAINLY_NOT[reason]))
        else:
            self._resolve(number, ProposalOutcome(Outcome.UNKNOWN, reason="the leader changed meanwhile"))

    def _resolve(self, number: int, outcome: ProposalOutcome) -> None:
        """The first outcome counts: what comes after a timeout is not reported."""
        if (waiting := self._waiting.pop(number, None)) is not None:
            self._outcomes.append((waiting[0], outcome))

    def _expire(self, now: float) -> None:
        for number, (_done, deadline) in list(self._waiting.items()):
            if deadline > now and self.failed is None:
                return  # in the order of their deadlines
            self._resolve(number, ProposalOutcome(Outcome.UNKNOWN, reason="no answer in time"))

    def _deliver(self) -> None:
        """Only what is there now: a callback that proposes again must not keep the loop here."""
        for _ in range(len(self._outcomes)):
            done, outcome = self._outcomes.popleft()
            try:
                done(outcome)
            except Exception:
                self.callback_errors += 1
                log.exception("the callback of a proposal failed")
