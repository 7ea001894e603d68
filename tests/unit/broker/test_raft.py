"""The Raft adapter: links that refuse strangers, rules that PySyncObj lacks, folders that may not vote.

Members run here in one thread, ticked by `pump` until a condition holds; nothing sleeps. `follower` drives a single
member by hand, with the messages of a leader that exists only in the test.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pickle
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pysyncobj.pickle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pysyncobj.node import Node

from zmqueue.broker.raft import Outcome, ProposalOutcome, RaftNode, format_folder
from zmqueue.broker.raft_channel import FRAME_BYTES_MAX, GREETING_BYTES_MAX, Channel
from zmqueue.broker.raft_folder import open_storage
from zmqueue.broker.raft_snapshots import SNAPSHOT_FILE, Snapshots
from zmqueue.broker.raft_transport import STRANGERS_MAX, Poller
from zmqueue.config import RaftConfig
from zmqueue.errors import BadFrame, ConfigError, CorruptLog, WrongCluster
from zmqueue.log.journal import JOURNAL_FILE, VOTE_FILE, Journal

SECRET = b"a secret of thirty-two bytes ..."
CONFIG = RaftConfig(
    append_ms=20, election_ms_min=100, election_ms_max=250, command_bytes_max=1000, disk_reserve_bytes=4096
)
WAIT_S = 20.0


class ListMachine:
    def __init__(self) -> None:
        self.commands: list[bytes] = []

    def apply(self, command: bytes) -> bytes:
        if command == b"raise":
            raise ValueError("the machine is not as total as it should be")
        self.commands.append(command)
        return b"applied " + command

    def snapshot(self) -> bytes:
        return b"\n".join(self.commands)

    def restore(self, data: bytes) -> None:
        self.commands = data.split(b"\n") if data else []


def free_addresses(count: int) -> dict[int, tuple[str, int]]:
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    addresses = {i: sock.getsockname() for i, sock in enumerate(sockets, start=1)}
    for sock in sockets:
        sock.close()
    return addresses


class Members:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[int, RaftNode] = {}
        self.machines: dict[int, ListMachine] = {}

    def start(self, size: int, *, only: set[int] | None = None, formatted: bool = True, **options: Any) -> Members:
        self.addresses = free_addresses(size)
        for member in only or self.addresses:
            if formatted:
                format_folder(self.folder / str(member), "test", member)
            self.join(member, **options)
        return self

    def join(self, member: int, *, secret: bytes = SECRET, config: RaftConfig = CONFIG, **options: Any) -> RaftNode:
        self.machines[member] = ListMachine()
        self.nodes[member] = RaftNode(
            broker_id=member,
            members=self.addresses,
            folder=self.folder / str(member),
            secret=secret,
            config=config,
            machine=self.machines[member],
            **options,
        )
        return self.nodes[member]

    def leave(self, member: int) -> None:
        self.nodes.pop(member).close()

    def pump(self, until: Callable[[], Any], what: str = "it") -> Any:
        end = time.monotonic() + WAIT_S
        while not (found := until()):
            assert time.monotonic() < end, f"{what} did not come: {[node.status() for node in self.nodes.values()]}"
            select.select(list(self.nodes.values()), [], [], 0.005)
            for node in self.nodes.values():
                node.tick()
        return found

    def leader(self) -> RaftNode:
        def agreed() -> RaftNode | None:
            leaders = {node.leader for node in self.nodes.values()}
            return self.nodes.get(leaders.pop() or 0) if len(leaders) == 1 else None

        return self.pump(agreed, "a leader")

    def propose(self, node: RaftNode, command: bytes) -> ProposalOutcome:
        outcomes: list[ProposalOutcome] = []
        node.propose(command, outcomes.append)
        node.tick()
        return self.pump(lambda: outcomes, "an outcome")[0]

    def commit(self, *commands: bytes) -> None:
        for command in commands:
            outcome = self.propose(self.leader(), command)
            assert outcome == (Outcome.COMMITTED, b"applied " + command, "")

    def agree(self) -> list[bytes]:
        self.pump(lambda: len({tuple(m.commands) for m in self.machines.values()}) == 1, "agreement")
        return next(iter(self.machines.values())).commands


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    group = Members(tmp_path)
    yield group
    for member in list(group.nodes):
        group.leave(member)


# -- a group -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 5])
def test_a_group_elects_itself_and_commits_from_any_member(members, size):
    members.start(size)
    members.leader()
    for member, node in members.nodes.items():
        assert members.propose(node, b"from %d" % member).result == b"applied from %d" % member
    assert members.agree() == [b"from %d" % member for member in range(1, size + 1)]
    assert len({node.term for node in members.nodes.values()}) == 1
    assert sum(node.is_leader for node in members.nodes.values()) == 1


def test_a_single_member_needs_no_second_tick_to_commit(members):
    members.start(1)
    node = members.leader()
    outcomes: list[ProposalOutcome] = []
    node.propose(b"now", outcomes.append)
    node.tick()
    assert outcomes == [(Outcome.COMMITTED, b"applied now", "")]


def test_a_command_that_raises_is_counted_and_done_with(members):
    members.start(3)
    assert members.propose(members.leader(), b"raise") == (Outcome.COMMITTED, b"", "")
    members.commit(b"next")
    assert members.agree() == [b"next"]
    members.pump(lambda: all(node.apply_errors == 1 for node in members.nodes.values()))


def test_a_callback_that_raises_harms_nobody(members):
    members.start(1)
    node = members.leader()
    node.propose(b"once", lambda outcome: 1 / 0)
    node.tick()
    members.commit(b"next")
    assert node.callback_errors == 1
    assert members.agree() == [b"once", b"next"]


def test_what_is_certainly_not_applied_is_rejected(members):
    members.start(3, only={1})
    assert members.propose(members.nodes[1], b"nobody leads").kind is Outcome.REJECTED
    assert members.propose(members.nodes[1], bytes(CONFIG.command_bytes_max + 1)).kind is Outcome.REJECTED


def test_outcomes_come_from_tick_and_never_from_propose(members):
    members.start(3, only={1})
    outcomes: list[ProposalOutcome] = []

    def again(outcome: ProposalOutcome) -> None:
        outcomes.append(outcome)
        members.nodes[1].propose(b"again", again)

    members.nodes[1].propose(b"first", again)
    assert outcomes == []
    members.nodes[1].tick()
    assert len(outcomes) == 1


def test_a_leader_cut_off_from_its_majority_answers_unknown_and_stops_leading(members):
    members.start(3, proposal_timeout_ms=300)
    leader = members.leader()
    followers = [member for member, node in members.nodes.items() if node is not leader]
    for member in followers:
        members.leave(member)
    assert members.propose(leader, b"alone").kind is Outcome.UNKNOWN
    members.pump(lambda: not leader.is_leader, "the fall-back")
    assert leader.leader is None


def hand_over(members: Members, leader: RaftNode) -> RaftNode:
    def handed_over() -> RaftNode | None:
        leader.hand_over()
        return members.nodes.get(leader.leader or 0) if not leader.is_leader else None

    return members.pump(handed_over, "a successor")


def test_a_leader_hands_over_to_a_member_that_has_everything(members):
    leader = members.start(3).leader()
    members.commit(b"one")
    term = leader.term
    successor = hand_over(members, leader)
    assert successor is not leader
    assert leader.term == term + 1, "one election was enough, and none was waited for"
    members.commit(b"two")
    assert members.agree() == [b"one", b"two"]


def test_who_may_not_vote_is_passed_over_when_leadership_is_handed_on(members):
    members.start(3, only={1, 2})
    members.commit(b"one")
    leader = members.leader()
    members.join(3)  # was never formatted
    members.agree()
    assert not members.nodes[3].voting
    assert hand_over(members, leader) in (members.nodes[1], members.nodes[2])


def test_close_answers_who_still_waits(members):
    members.start(3)
    leader = members.leader()
    outcomes: list[ProposalOutcome] = []
    leader.propose(b"too late", outcomes.append)
    leader.close()
    assert [outcome.kind for outcome in outcomes] == [Outcome.UNKNOWN]
    leader.propose(b"later still", outcomes.append)
    leader.tick()
    assert outcomes[1].kind is Outcome.REJECTED


def test_state_survives_compaction_and_restart_of_all(members):
    members.start(3)
    members.commit(*[b"command %d" % i for i in range(30)])
    before = list(members.agree())
    for node in members.nodes.values():
        node.compact()
    members.pump(lambda: all(node.status()["log_first_index"] > 10 for node in members.nodes.values()), "compaction")
    for member in list(members.nodes):
        members.leave(member)
    for member in members.addresses:
        members.join(member)
    members.commit(b"after")
    assert members.agree() == [*before, b"after"]


def test_who_missed_what_was_compacted_gets_the_snapshot(members):
    members.start(3)
    members.leader()
    members.leave(2)
    members.machines.pop(2)
    members.commit(*[b"command %d" % i for i in range(30)])
    for node in members.nodes.values():
        node.compact()
    members.pump(lambda: all(node.status()["log_first_index"] > 10 for node in members.nodes.values()), "compaction")
    late = members.join(2)
    members.commit(b"after")
    assert members.agree() == [*[b"command %d" % i for i in range(30)], b"after"]
    assert late.status()["snapshot_index"] > 10


def test_nothing_is_ever_unpickled():
    with pytest.raises(BadFrame):
        pysyncobj.pickle.loads(pickle.dumps({"harmless": 1}))


def test_closing_gives_every_descriptor_back(members):
    gc.collect()  # what tests before this one left open is theirs
    before = len(os.listdir("/proc/self/fd"))
    members.start(3)
    members.leader()
    for member in list(members.nodes):
        members.leave(member)
    assert len(os.listdir("/proc/self/fd")) == before


# -- PySyncObj's rules, corrected ----------------------------------------------------------------------------------


class Follower:
    """Member 1 of three, hearing a leader (2) that the test plays."""

    def __init__(self, members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node = members.start(3, only={1}).nodes[1]
        self.machine = members.machines[1]
        self.sent: list[dict[str, Any]] = []
        monkeypatch.setattr(self.node._transport, "send", self._send)

    def _send(self, node: Any, message: dict[str, Any]) -> bool:
        allowed = self.node._before_send(message)
        if allowed:
            self.sent.append(message)
        return allowed

    def hear(self, **message: Any) -> list[dict[str, Any]]:
        """What it answers."""
        self.sent.clear()
        self.node._group._SyncObj__onMessageReceived(Node("2"), message)
        return list(self.sent)

    def append(self, previous: int, *entries: tuple[bytes, int, int], commit: int = 0, term: int = 1) -> Any:
        previous_term = found[2] if (found := self.node._journal.find(previous)) else term
        return self.hear(
            type="append_entries",
            term=term,
            commit_index=commit,
            entries=list(entries),
            prevLogIdx=previous,
            prevLogTerm=previous_term,
        )


@pytest.fixture
def follower(members: Members, monkeypatch: pytest.MonkeyPatch) -> Follower:
    return Follower(members, monkeypatch)


def entry(index: int, term: int = 1) -> tuple[bytes, int, int]:
    return b"\x00%d" % index, index, term


def test_entries_sent_again_truncate_nothing_that_was_acknowledged(follower):
    follower.append(1, *[entry(i) for i in range(2, 7)])
    size = follower.node._journal.size_bytes
    (answer,) = follower.append(1, entry(2), entry(3))
    assert (answer["success"], answer["next_node_idx"], answer["term"]) == (True, 4, 1)
    assert follower.node._journal[-1] == entry(6)
    assert follower.node._journal.size_bytes == size


def test_nothing_is_committed_past_what_the_leader_confirmed(follower):
    """Entries 3 and 4 are of an old leader; the new one, which has committed others there, confirms only 2."""
    follower.append(1, entry(2), entry(3), entry(4))
    follower.append(2, commit=4, term=2)
    follower.node.tick()
    assert follower.machine.commands == [b"2"]
    follower.append(2, entry(3, term=2), commit=4, term=2)
    follower.node.tick()
    assert follower.machine.commands == [b"2", b"3"]
    assert [e[1:] for e in follower.node._journal[-2:]] == [(2, 1), (3, 2)]


def test_chunks_of_a_snapshot_commit_nothing(follower):
    follower.append(1, entry(2), entry(3))
    follower.hear(type="append_entries", term=2, commit_index=3, serialized=(b"chunk", True, False))
    follower.node.tick()
    assert follower.machine.commands == []


def test_an_old_snapshot_takes_nothing_back(follower, tmp_path):
    follower.append(1, *[entry(i) for i in range(2, 9)], commit=6)
    follower.node.tick()
    (tmp_path / "leader").mkdir()
    for last in (5, 8):  # applied already; in the log, though not committed yet
        source = stored(tmp_path / "leader", last)
        while (chunk := source.getTransmissionData("follower")) is not None:
            assert follower.hear(type="append_entries", term=1, commit_index=8, serialized=chunk) == []
            if chunk[2]:
                break
    assert follower.machine.commands == [b"%d" % i for i in range(2, 7)]
    assert follower.node._journal[-1] == entry(8)


def test_an_acknowledgement_follows_the_sync(follower, monkeypatch):
    order: list[str] = []
    real_sync, real_send = os.fdatasync, follower._send

    def send(node: Any, message: dict[str, Any]) -> bool:
        allowed = real_send(node, message)
        order.append(message["type"])
        return allowed

    monkeypatch.setattr(os, "fdatasync", lambda fd: order.append("sync") or real_sync(fd))
    monkeypatch.setattr(follower.node._transport, "send", send)
    follower.append(1, entry(2))
    assert order == ["sync", "next_node_idx"]


def test_who_cannot_sync_acknowledges_nothing_and_stops(follower, monkeypatch):
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fdatasync", fail)
    assert follower.append(1, entry(2)) == []
    assert follower.node.failed is not None
    assert follower.hear(type="request_vote", term=9, last_log_index=99, last_log_term=9) == []


def test_a_vote_is_stored_before_it_is_given(follower):
    (answer,) = follower.hear(type="request_vote", term=5, last_log_index=9, last_log_term=4)
    assert answer["type"] == "response_vote"
    journal = Journal(follower.node._journal._path.parent)
    assert (journal.getCurrentTerm(), journal.getVotedForNodeId()) == (5, "2")
    journal.close()


def test_a_full_disk_neither_votes_nor_leads_and_says_so(follower, monkeypatch):
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    reserve = follower.node._journal._path.parent / "reserve"
    assert reserve.stat().st_size == CONFIG.disk_reserve_bytes
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(Exception, match="full"):
            follower.append(1, entry(2))
        assert not reserve.exists()
        assert follower.node.low_disk
        assert not follower.node._before_send({"type": "request_vote"})
    (answer,) = follower.append(1, entry(2))
    assert answer["success"]


class Leader(Follower):
    def __init__(self, members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(members, monkeypatch)
        group = self.node._group
        group._SyncObj__raftElectionDeadline = 0.0
        monkeypatch.setattr(group, "_SyncObj__connectedToAnyone", lambda: True)
        group.doTick(0.0)
        self.hear(type="response_vote", term=self.node.term)
        assert self.node.is_leader

    @property
    def next_index(self) -> int:
        return self.node._group._SyncObj__raftNextIndex[Node("2")]

    @property
    def match_index(self) -> int:
        return self.node._group._SyncObj__raftMatchIndex[Node("2")]

    def acknowledge(self, next_index: int, *, term: int | None = None, success: bool = True) -> None:
        term = self.node.term if term is None else term
        self.hear(type="next_node_idx", term=term, next_node_idx=next_index, reset=not success, success=success)


@pytest.fixture
def leader(members: Members, monkeypatch: pytest.MonkeyPatch) -> Leader:
    return Leader(members, monkeypatch)


def test_a_success_never_moves_the_next_index_back(leader):
    leader.node._group._SyncObj__raftNextIndex[Node("2")] = 9
    leader.acknowledge(3)
    assert (leader.next_index, leader.match_index) == (9, 2)


def test_an_acknowledgement_of_another_term_is_dropped(leader):
    leader.acknowledge(3, term=leader.node.term - 1)
    assert leader.match_index == 0


def test_a_follower_with_a_longer_log_does_not_send_the_leader_past_its_own(leader):
    leader.acknowledge(50, success=False)
    assert leader.next_index == leader.node._group.last_index() + 1


@given(
    st.dictionaries(
        st.sampled_from(["type", "term", "entries", "commit_index", "prevLogIdx", "command", "request_id", "success"]),
        st.one_of(
            st.sampled_from(["append_entries", "next_node_idx", "request_vote", "apply_command", "timeout_now"]),
            st.integers(0, 5),
            st.none(),
            st.binary(max_size=3),
            st.lists(st.integers(0, 5), max_size=2),
        ),
    )
)
def test_a_message_of_the_wrong_shape_is_refused_or_harmless(tmp_path_factory, message):
    group = Members(tmp_path_factory.mktemp("shape")).start(3, only={1})
    try:
        group.nodes[1]._group._SyncObj__onMessageReceived(Node("2"), message)
    except BadFrame:
        pass
    finally:
        group.leave(1)
    assert group.machines[1].commands == []


@pytest.mark.parametrize("command", [b"\x01", b"\x02membership", b"\x03version", b"", bytes(2000)])
def test_a_peer_cannot_have_commands_of_pysyncobj_or_huge_ones_applied(follower, command):
    with pytest.raises(BadFrame):
        follower.hear(type="apply_command", command=command, request_id=1)


# -- links ---------------------------------------------------------------------------------------------------------


def channels(secret: bytes = SECRET, **acceptor: Any) -> tuple[Channel, Channel]:
    options: dict[str, Any] = {"secret": secret, "own_id": 1, "members": [1, 2], "peer": None}
    return Channel(secret=SECRET, own_id=2, members=[1, 2], peer=1), Channel(**options | acceptor)


def exchange(one: Channel, other: Channel) -> None:
    while one.outgoing or other.outgoing:
        for sender, receiver in ((one, other), (other, one)):
            data = bytes(sender.outgoing)
            sender.outgoing.clear()
            receiver.feed(data)


def test_two_that_share_the_secret_come_up_and_talk():
    one, other = channels()
    exchange(one, other)
    assert (one.up, other.up, other.peer) == (True, True, 2)
    one.send(b"hello")
    one.send(b"")
    assert other.feed(bytes(one.outgoing)) == [b"hello", b""]
    assert b"hello" not in one.outgoing


def test_bytes_may_arrive_one_by_one():
    one, other = channels()
    exchange(one, other)
    one.send(b"hello")
    assert [payload for byte in one.outgoing for payload in other.feed(bytes([byte]))] == [b"hello"]


@pytest.mark.parametrize("acceptor", [{"secret": b"another secret"}, {"members": [1, 2, 3]}, {"own_id": 3}])
def test_another_secret_group_or_name_is_refused(acceptor):
    one, other = channels(**acceptor)
    with pytest.raises(BadFrame):
        exchange(one, other)
    assert not one.up
    assert not other.up


def test_a_replayed_reordered_or_damaged_frame_ends_the_link():
    for damage in (lambda a, b: a + a, lambda a, b: b + a, lambda a, b: a[:-1] + bytes([a[-1] ^ 1])):
        one, other = channels()
        exchange(one, other)
        one.send(b"first")
        first = bytes(one.outgoing)
        one.outgoing.clear()
        one.send(b"second")
        with pytest.raises(BadFrame):
            other.feed(damage(first, bytes(one.outgoing)))


def test_a_recorded_greeting_opens_no_second_link():
    one, other = channels()
    recorded = bytearray()
    while one.outgoing or other.outgoing:
        recorded += one.outgoing
        other.feed(bytes(one.outgoing))
        one.outgoing.clear()
        one.feed(bytes(other.outgoing))
        other.outgoing.clear()
    _, fresh = channels()
    with pytest.raises(BadFrame):
        fresh.feed(bytes(recorded))
    assert not fresh.up


def test_the_length_is_bounded_before_and_after_the_greeting():
    one, other = channels()
    with pytest.raises(BadFrame):
        other.feed(struct.pack("!I", GREETING_BYTES_MAX + 1))
    one, other = channels()
    exchange(one, other)
    with pytest.raises(BadFrame):
        other.feed(struct.pack("!I", FRAME_BYTES_MAX + 1))


@given(st.binary(max_size=200))
def test_noise_is_refused_or_waited_for(data):
    _, acceptor = channels()
    with contextlib.suppress(BadFrame):
        assert acceptor.feed(data) == []
    assert not acceptor.up


def test_strangers_are_turned_away_and_the_group_goes_on(members):
    members.start(3)
    leader = members.leader()
    address = members.addresses[leader.status()["broker_id"]]
    strangers = []
    try:
        for i in range(STRANGERS_MAX + 8):
            strangers.append(socket.create_connection(address, timeout=WAIT_S))
            if i % 2:
                strangers[-1].sendall(struct.pack("!I", 1 << 30) + b"x" * 1000)
            leader.tick()  # it accepts in this thread: an unattended queue would hold up the next call
        members.commit(b"meanwhile")
        members.pump(lambda: leader.status()["links_refused"] > 0, "a refusal")
        members.commit(b"after")
    finally:
        for stranger in strangers:
            stranger.close()
    assert members.agree() == [b"meanwhile", b"after"]


def test_a_member_with_another_secret_stays_outside(members):
    members.start(3, only={1, 2})
    format_folder(members.folder / "3", "test", 3)
    outsider = members.join(3, secret=b"guessed wrongly, however long")
    members.pump(lambda: members.nodes[1].leader or members.nodes[2].leader, "a leader of the two")
    members.pump(lambda: sum(node.status()["links_refused"] for node in members.nodes.values()) > 1, "refusals")
    assert outsider.leader is None
    assert not any(outsider.status()["links"].values())


def test_a_short_secret_is_refused(members):
    with pytest.raises(ConfigError, match="secret"):
        members.start(1, secret=b"short")


def test_an_address_in_use_is_a_named_error(members):
    members.start(1)
    format_folder(members.folder / "other", "test", 1)
    with pytest.raises(ConfigError, match="cannot be listened on"):
        RaftNode(
            broker_id=1,
            members=members.addresses,
            folder=members.folder / "other",
            secret=SECRET,
            config=CONFIG,
            machine=ListMachine(),
        )


def test_the_descriptor_wakes_a_poller_that_knows_nothing_of_raft(members):
    members.start(1)
    node = members.leader()
    poll = select.poll()
    poll.register(node.fileno(), select.POLLIN)
    assert poll.poll(0) == []
    with socket.create_connection(members.addresses[1]):
        assert poll.poll(WAIT_S * 1000) != []
        node.tick()


def test_a_reused_descriptor_gets_no_event_of_its_predecessor():
    """Two are ready; whichever is called first closes the other and watches something new under its number."""
    poller = Poller()
    pipes = [os.pipe() for _ in range(3)]
    heard: list[str] = []

    def replace_the_other(descr: int, _event: int) -> None:
        heard.append("first")
        other = pipes[1][0] if descr == pipes[0][0] else pipes[0][0]
        poller.unsubscribe(other)
        os.dup2(pipes[2][0], other)
        poller.subscribe(other, lambda descr, event: heard.append("stale"), Poller.READ)

    for reader, writer in pipes[:2]:
        poller.subscribe(reader, replace_the_other, Poller.READ)
        os.write(writer, b"x")
    poller.poll(0.0)
    poller.close()
    for fd in (fd for pipe in pipes for fd in pipe):
        os.close(fd)
    assert heard == ["first"]


# -- folders -------------------------------------------------------------------------------------------------------


def test_a_folder_that_was_never_formatted_does_not_vote(members, caplog):
    members.start(3, only={1, 2}, formatted=False)
    assert not any(node.voting for node in members.nodes.values())
    assert "takes no part in Raft votes" in caplog.text
    ticks = iter(range(100))
    members.pump(lambda: next(ticks) > 90)
    assert {node.term for node in members.nodes.values()} == {0}


def test_who_does_not_vote_promises_no_vote_either(members):
    node = members.start(3, only={1}, formatted=False).nodes[1]
    message = {"type": "request_vote", "term": 5, "last_log_index": 9, "last_log_term": 4}
    node._group._SyncObj__onMessageReceived(Node("2"), message)
    assert (node.term, node._journal.getVotedForNodeId()) == (0, None)


def test_a_wiped_member_follows_without_voting_and_votes_once_admitted(members):
    members.start(3)
    members.commit(b"one", b"two")
    members.agree()
    members.leave(3)
    for path in (members.folder / "3").iterdir():
        path.unlink()
    wiped = members.join(3)
    assert not wiped.voting
    members.commit(b"three")
    assert members.agree() == [b"one", b"two", b"three"]
    members.leave(3)
    format_folder(members.folder / "3", "test", 3, admit=True)
    assert members.join(3).voting
    assert members.agree() == [b"one", b"two", b"three"]


@pytest.mark.parametrize("name", [JOURNAL_FILE, VOTE_FILE, "meta"])
def test_a_damaged_folder_is_left_as_it_is_and_not_voted_from(members, name):
    members.start(1)
    members.commit(b"one", b"two")
    members.leave(1)
    path = members.folder / "1" / name
    damaged = bytearray(path.read_bytes())
    damaged[9] ^= 1
    path.write_bytes(damaged)
    assert not members.join(1).voting
    assert path.read_bytes() == damaged


def test_a_journal_whose_snapshot_is_missing_is_not_voted_from(members):
    members.start(1)
    members.commit(*[b"%d" % i for i in range(9)])
    node = members.nodes[1]
    node.compact()
    members.pump(lambda: node.status()["log_first_index"] > 1)
    members.leave(1)
    (members.folder / "1" / SNAPSHOT_FILE).unlink()
    assert not members.join(1).voting


def test_a_folder_of_another_broker_or_cluster_is_refused(members, tmp_path):
    format_folder(tmp_path / "1", "test", 1)
    format_folder(tmp_path / "1", "test", 1)
    with pytest.raises(WrongCluster):
        format_folder(tmp_path / "1", "another", 1)
    (tmp_path / "1").rename(tmp_path / "2")
    members.addresses = free_addresses(2)
    with pytest.raises(WrongCluster):
        members.join(2)


def test_a_journal_without_its_meta_file_is_not_formatted_over(tmp_path):
    format_folder(tmp_path, "test", 1)
    journal = Journal(tmp_path)
    journal.add(*entry(1))
    journal.close()
    (tmp_path / "meta").unlink()
    with pytest.raises(CorruptLog):
        format_folder(tmp_path, "test", 1)


# -- snapshots and the journal beside them -------------------------------------------------------------------------


def snapshots_of(folder: Path, *, wanted: bool = True) -> Snapshots:
    machine = ListMachine()
    machine.commands = [b"state"]
    return Snapshots(
        folder / SNAPSHOT_FILE,
        machine,
        index=0,
        wanted=lambda entry: wanted,
        on_broken=lambda reason: None,
        on_installed=lambda index: None,
    )


def stored(folder: Path, last: int) -> Snapshots:
    snapshots = snapshots_of(folder)
    snapshots.serialize((None, entry(last), entry(last - 1), None), last - 1)
    while (state := snapshots.checkSerializing()[0]) == 1:
        time.sleep(0)
    assert state == 2
    return snapshots


@pytest.mark.parametrize(
    ("journal_range", "first", "last"),
    [
        ((1, 9), 4, 9),  # killed between storing the snapshot and shortening the journal
        ((4, 9), 4, 9),  # not killed
        ((1, 3), 4, 5),  # killed while a leader's snapshot was installed
        (None, 4, 5),  # killed between clearing the journal and filling it again
    ],
)
def test_a_kill_around_a_compaction_loses_no_entry(tmp_path, journal_range, first, last):
    format_folder(tmp_path, "test", 1)
    journal = Journal(tmp_path)
    if journal_range is not None:
        journal.reset(entry(i) for i in range(journal_range[0], journal_range[1] + 1))
    journal.close()
    stored(tmp_path, 5)
    storage = open_storage(tmp_path, 1, lambda: False)
    assert storage.voting
    assert storage.journal[:] == [entry(i) for i in range(first, last + 1)]
    storage.journal.close()


def transmitted(source: Snapshots, target: Snapshots, damage: Callable[[bytes], bytes] = bytes) -> bool:
    done = False
    while (chunk := source.getTransmissionData("peer")) is not None:
        data, first, last = chunk
        done = target.setTransmissionData((damage(data), first, last))
        if last:
            break
    return done


def test_a_snapshot_arrives_whole_or_not_at_all(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    source, target = stored(tmp_path / "a", 5), snapshots_of(tmp_path / "b")
    assert not transmitted(source, target, lambda data: data[:-1] + b"?" if data else data)
    assert not (tmp_path / "b" / SNAPSHOT_FILE).exists()
    assert transmitted(source, target)
    assert target.deserialize()[1:3] == (entry(5), entry(4))
    target.setTransmissionData((b"", True, False))
    assert not target.setTransmissionData((b"only the end", False, True))
    assert target.deserialize()[1] == entry(5)


def test_a_snapshot_that_brings_nothing_new_is_not_installed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert not transmitted(stored(tmp_path / "a", 5), snapshots_of(tmp_path / "b", wanted=False))
    assert not (tmp_path / "b" / SNAPSHOT_FILE).exists()
