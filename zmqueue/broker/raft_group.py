"""PySyncObj with its rules corrected, and closed towards the world.

The only importer of pysyncobj, pinned to one version because private names are overridden: a method called
`_SyncObj__x` here takes the place of its `__x`.

What is corrected, and why
- Commands are bytes with a type byte in front, not pickled calls: adding a method can never renumber journaled ones.
- A follower's commit index follows what a message confirmed of its log, not what its log happens to hold; the journal
  keeps unconfirmed entries until a leader contradicts them.
- Acknowledgements carry their term. One from a former leadership may speak of entries that are gone.
- A success never moves a follower's next index back, a refusal is answered at once and not at the next heartbeat.
- Commands under way to a leader whose link broke are answered (with "unknown") and not kept for ever.
- Nothing is unpickled, ever. Messages have the shapes listed here or end their link.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import msgspec
import pysyncobj.pickle
import pysyncobj.syncobj
from pysyncobj.config import FAIL_REASON, SyncObjConf
from pysyncobj.monotonic import monotonic
from pysyncobj.node import Node

from zmqueue.broker.raft_folder import REGULAR
from zmqueue.broker.raft_snapshots import Snapshots
from zmqueue.broker.raft_transport import Message, Poller, Transport
from zmqueue.config import RaftConfig
from zmqueue.errors import BadFrame
from zmqueue.log.journal import Entry, Journal
from zmqueue.model import KiB

__all__ = ["FAIL_REASON", "REGULAR", "Group", "Node", "conf_of", "in_place_of"]

COMMANDS_MAX = 1_000
CONNECTION_TIMEOUT_S = 2.0
CONNECTION_RETRY_S = 0.5

_LEADER_FALLBACK_S = 1.5
_COMPACTION_S = 300.0


def _refuse_pickle(*_: object) -> None:
    raise BadFrame("nothing is unpickled here")


# Every path to these is closed above; should one have been missed, it ends here and not in someone else's code.
pysyncobj.pickle.load = pysyncobj.pickle.loads = _refuse_pickle


class _NotTruncated(logging.Filter):
    """PySyncObj announces a truncation whenever entries are sent again. This journal truncates on conflict only."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "truncating already-applied" not in str(record.msg)


logging.getLogger("pysyncobj.syncobj").addFilter(_NotTruncated())

# -- what peers may say --------------------------------------------------------------------------------------------


class _AppendEntries(TypedDict):
    type: str
    term: int
    commit_index: int
    entries: NotRequired[list[Entry]]
    prevLogIdx: NotRequired[int | None]
    prevLogTerm: NotRequired[int | None]
    serialized: NotRequired[tuple[bytes, bool, bool] | None]


class _NextNodeIdx(TypedDict):
    type: str
    term: int
    next_node_idx: int
    reset: bool
    success: bool


class _RequestVote(TypedDict):
    type: str
    term: int
    last_log_index: int
    last_log_term: int


class _ResponseVote(TypedDict):
    type: str
    term: int


class _TimeoutNow(TypedDict):
    type: str
    term: int


class _ApplyCommand(TypedDict):
    type: str
    command: bytes
    request_id: int


class _ApplyCommandResponse(TypedDict):
    type: str
    request_id: int
    error: NotRequired[int]
    log_idx: NotRequired[int]
    log_term: NotRequired[int]


_SHAPES: dict[str, Any] = {
    "append_entries": _AppendEntries,
    "next_node_idx": _NextNodeIdx,
    "request_vote": _RequestVote,
    "response_vote": _ResponseVote,
    "timeout_now": _TimeoutNow,
    "apply_command": _ApplyCommand,
    "apply_command_response": _ApplyCommandResponse,
}


class Group(pysyncobj.syncobj.SyncObj):
    """One member, as PySyncObj sees it."""

    def __init__(
        self,
        own: Any,
        others: list[Any],
        conf: SyncObjConf,
        transport: Transport,
        apply: Callable[[bytes], bytes],
        voting: bool,
        command_bytes_max: int,
    ) -> None:
        self._apply = apply
        self._voting = voting
        self._command_bytes_max = command_bytes_max
        super().__init__(own, others, conf, transport=transport)

    def last_index(self) -> int:
        return int(self._SyncObj__raftLog[-1][1])

    def never_stand(self) -> None:
        """PySyncObj sets a deadline for the next election on each message of a leader; this takes it away."""
        self._SyncObj__raftElectionDeadline = math.inf

    def hand_over(self, nth: int) -> bool:
        """Ask a member that has every entry to stand for election at once: the `nth` of them, counted round."""
        matched = self._SyncObj__raftMatchIndex
        complete = [
            node for node in self.otherNodes if self.isNodeConnected(node) and matched[node] == self.last_index()
        ]
        if not complete:
            return False
        self.transferLeadership(sorted(complete, key=lambda node: node.id)[nth % len(complete)])
        return True

    def heard_by_majority(self) -> bool:
        """As PySyncObj judges at each tick, but true at this moment even if ticks were late."""
        since = monotonic() - self.conf.leaderFallbackTimeout
        heard = 1 + sum(when > since for when in self._SyncObj__lastResponseTime.values())
        return bool(heard * 2 > len(self.otherNodes) + 1)

    def forget_waiting(self, index: int) -> None:
        """A snapshot skipped these entries: whether they were the ones waited for cannot be known any more."""
        waiting = self._SyncObj__commandsWaitingCommit
        for skipped in [i for i in waiting if i <= index]:
            for _term, callback in waiting.pop(skipped):
                callback(None, FAIL_REASON.UNKNOWN_OUTCOME)

    def close_pipe(self) -> None:
        """PySyncObj wakes itself through a pipe that it never closes."""
        notifier = self._SyncObj__pipeNotifier
        os.close(notifier._PipeNotifier__pipeR)
        os.close(notifier._PipeNotifier__pipeW)

    def _SyncObj__doApplyCommand(self, command: bytes) -> bytes | None:
        return self._apply(command[1:]) if command[:1] == REGULAR else None

    def _SyncObj__onNodeDisconnected(self, node: Any) -> None:
        """Commands on their way to this leader get no answer any more."""
        super()._SyncObj__onNodeDisconnected(node)
        if node == self._getLeader():
            self._SyncObj__onLeaderChanged()

    def _SyncObj__onMessageReceived(self, node: Any, message: Message) -> None:
        kind = message.get("type")
        try:
            checked: Any = msgspec.convert(message, _SHAPES[kind] if isinstance(kind, str) else None)
        except (KeyError, msgspec.ValidationError) as error:
            raise BadFrame(f"a message {kind!r} that is none: {error}") from error
        if kind == "next_node_idx":
            self._on_progress(node, checked)
            return
        if kind in ("request_vote", "timeout_now") and not self._voting:
            return
        if kind == "append_entries":
            _limit_commit(checked)
        if kind == "apply_command" and not self._may_apply(checked["command"]):
            raise BadFrame("a command of PySyncObj's own, or one too long")
        super()._SyncObj__onMessageReceived(node, checked)

    def _may_apply(self, command: bytes) -> bool:
        return command[:1] == REGULAR and len(command) <= self._command_bytes_max + 1

    def _on_progress(self, node: Any, message: _NextNodeIdx) -> None:
        if message["term"] != self.raftCurrentTerm or not self._isLeader():
            return  # from a former leadership of this member: the log it speaks of may be gone
        # A follower's unconfirmed tail may be longer than this log, which cannot send what it does not have.
        message["next_node_idx"] = min(message["next_node_idx"], self.last_index() + 1)
        next_index = self._SyncObj__raftNextIndex
        before = next_index[node]
        super()._SyncObj__onMessageReceived(node, message)
        if message["success"]:
            # Later entries are under way already; going back would send them twice.
            next_index[node] = max(before, next_index[node])
        elif next_index[node] != before and next_index[node] > self._SyncObj__raftLog[0][1]:
            self._SyncObj__newAppendEntriesTime = 0.0  # the next attempt need not wait for the next heartbeat


def _limit_commit(message: _AppendEntries) -> None:
    """Lower the commit index to what this message confirms of the follower's log."""
    entries = message.get("entries", [])
    previous = message.get("prevLogIdx")
    if previous is None:
        message["commit_index"] = 0
        return
    if any(entry[1] != previous + 1 + i for i, entry in enumerate(entries)):
        raise BadFrame(f"entries {[entry[1] for entry in entries]} do not follow {previous}")
    message["commit_index"] = min(message["commit_index"], previous + len(entries))


@contextlib.contextmanager
def in_place_of(journal: Journal, poller: Poller, snapshots: Snapshots) -> Iterator[None]:
    """PySyncObj builds these three through names of its module; for one construction the names are ours."""
    module = pysyncobj.syncobj
    names = {
        "createJournal": lambda _file: journal,
        "createPoller": lambda _kind: poller,
        "Serializer": lambda *_: snapshots,
    }
    saved = {name: getattr(module, name) for name in names}
    for name, ours in names.items():
        setattr(module, name, ours)
    try:
        yield
    finally:
        for name, theirs in saved.items():
            setattr(module, name, theirs)


def conf_of(config: RaftConfig, scale: float, snapshot_path: Path) -> SyncObjConf:
    return SyncObjConf(
        autoTick=False,
        autoTickPeriod=config.tick_ms / 1000,
        appendEntriesPeriod=config.append_ms / 1000 * scale,
        raftMinTimeout=config.election_ms_min / 1000 * scale,
        raftMaxTimeout=config.election_ms_max / 1000 * scale,
        connectionTimeout=max(CONNECTION_TIMEOUT_S, config.election_ms_max / 1000) * scale,
        connectionRetryTime=CONNECTION_RETRY_S * scale,
        leaderFallbackTimeout=max(_LEADER_FALLBACK_S, config.election_ms_max / 1000) * scale,
        appendEntriesUseBatch=False,
        # An entry as long as a batch would be sent in pieces, which PySyncObj pickles.
        appendEntriesBatchSizeBytes=max(64 * KiB, 2 * config.command_bytes_max),
        commandsQueueSize=COMMANDS_MAX,
        commandsWaitLeader=False,
        logCompactionMinEntries=config.compaction_entries_min,
        logCompactionMinTime=_COMPACTION_S,
        dynamicMembershipChange=False,
        useFork=False,
        fullDumpFile=str(snapshot_path),
    )
