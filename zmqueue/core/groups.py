"""The coordinator of the groups of one partition of `__consumer_offsets`, in one leader epoch. A pure state machine.

A life: `replay` of every record of the partition, `activate` once the high watermark has passed all of them, events,
`close` when this broker no longer leads. A new leader epoch gets a new object.

The shell, per partition that it leads:
- answers COORDINATOR_LOADING until `activate`, which comes when everything up to the epoch's first offset is replayed
  and below the high watermark;
- hands events in and performs the effects that come out in order (see group_effects.py);
- calls `on_written` once for every `Write`, `on_topics` when metadata of topics changed, `on_tick` when `next_due_ms`
  is reached (None: nothing is due), or more often;
- on `GiveUp` drops this coordinator, reads the partition again up to the end of its log, and activates a new one when
  the high watermark has reached that end.

Tokens are the shell's handles of requests; each is answered or refused exactly once, at once or later.

Invariants:
- of each group at most one write is under way; what changes meanwhile goes into the next;
- a group is *clean* when all that it has become is replicated. What members are told, that they are no members any more
  included, is said only while their group is clean: nothing is ever told that a new coordinator would not know;
- a commit is held against the group as it is now, and its record follows the group's last in the log: whoever is given
  a partition hears of it after that partition's last allowed commit has been written;
- state never goes back. A write that is known to have failed is repeated, with what has come since; when it is not
  known whether the log has it, memory can no longer be what a replay would give: the coordinator gives up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from msgspec import Struct, field

from zmqueue import errors
from zmqueue.config import GroupsConfig
from zmqueue.core.assignors import Assignor
from zmqueue.core.cluster import Cluster
from zmqueue.core.effects import Effect, Token
from zmqueue.core.group import Member
from zmqueue.core.group_desk import Around, Desk
from zmqueue.core.group_effects import Answer, GiveUp, Log, Refuse, Write, refusal, served
from zmqueue.core.group_offsets import Commit, Pending
from zmqueue.core.group_requests import check_row, description
from zmqueue.core.group_snapshot import restore
from zmqueue.core.lease import Lease
from zmqueue.model import PartitionKey
from zmqueue.wire.group_messages import (
    CommitOffsetsRequest,
    CommitOffsetsResponse,
    CommittedRow,
    DeleteGroupRequest,
    DescribeGroupRequest,
    FetchOffsetsRequest,
    FetchOffsetsResponse,
    GroupHeartbeatRequest,
    GroupRow,
)
from zmqueue.wire.group_records import (
    CommittedOffset,
    GroupKey,
    OffsetKey,
    decode_group,
    decode_key,
    decode_offset,
    encode,
)
from zmqueue.wire.messages import Done

STALL_MS = 500  # whoever ticks us later than this has not listened either: nobody is taken for dead for that
RECORD_BYTES = 32  # what a record takes up in a batch beside its key and value, at most

Record = tuple[bytes, bytes | None]
_T = TypeVar("_T")


class Deletion(Struct):
    """Of offsets, and perhaps of the whole group; in several writes if there are many. `code`: what went wrong."""

    desk: Desk
    token: Token | None
    whole: bool
    open: int = 0
    code: int = 0


class GroupWrite(Struct):
    desk: Desk


class CommitWrite(Struct):
    desk: Desk
    pending: list[Pending] = field(default_factory=list)


class DeletionWrite(Struct):
    """`keys` of offsets; None is the group itself."""

    deletion: Deletion
    keys: list[PartitionKey | None] = field(default_factory=list)


AnyWrite = GroupWrite | CommitWrite | DeletionWrite


class Coordinator:
    """`cluster` is only read: which topics there are. `assignors` by name: `core.assignors.BUILT_IN` and custom ones.

    `grace_ms`: for how long a deposed coordinator may still answer (`replication.read_lease_ms`).
    """

    def __init__(
        self, config: GroupsConfig, cluster: Cluster, assignors: Mapping[str, Assignor], lease: Lease, grace_ms: int
    ) -> None:
        self._around = Around(config, cluster, assignors, lease, self._write_group)
        self._config = config
        self._cluster = cluster
        self._lease = lease
        self._grace_ms = grace_ms
        self._active = False
        self._desks: dict[str, Desk] = {}
        self._writes: dict[int, AnyWrite] = {}
        self._number = 0
        self._committing = 0  # requests that wait for the writes of their rows
        self._cleanup_ms = 0

    # -- taking over and giving up -------------------------------------------------------------------------------

    def replay(self, key: bytes | None, value: bytes | None) -> None:
        """The next record of the partition.

        Raises InvalidRecord for one that is not of a group: it means nothing, and replay can go on. FutureFormat for
        one of a newer version of zmqueue: going on would lose what it says.
        """
        if key is None:
            raise errors.InvalidRecord("not a group's record: it has no key")
        about = decode_key(key)
        if isinstance(about, OffsetKey):
            offset = None if value is None else decode_offset(value)
            committed = self._desk(about.group).offsets.committed
            partition = PartitionKey(about.topic_id, about.partition)
            if offset is None:
                committed.pop(partition, None)
            else:
                committed[partition] = offset
        elif value is None:
            self._desk(about.group).forget()
        else:
            self._desk(about.group).group = restore(about.group, decode_group(value))

    def _desk(self, group: str) -> Desk:
        return self._desks.setdefault(group, Desk(group, self._around))

    def activate(self, now_ms: int, wall_ms: int) -> list[Effect]:
        """Everything is replayed and committed. Every member gets one full session from now."""
        self._active = True
        self._around.wall_ahead_ms = wall_ms - now_ms
        self._desks = {name: desk for name, desk in self._desks.items() if not desk.unused}
        effects: list[Effect] = []
        for desk in self._desks.values():
            effects += desk.begin(now_ms, self._grace_ms)
        return effects + self._clean_up(now_ms)

    def close(self, code: int, text: str) -> list[Effect]:
        """Nothing more will be answered: whoever waits is refused with this code."""
        waiting = {id(commit): commit for desk in self._desks.values() for commit in desk.offsets.waiting()}
        tokens = [commit.token for commit in waiting.values()]
        for desk in self._desks.values():
            tokens += desk.tokens()
        deletions = {id(w.deletion): w.deletion for w in self._writes.values() if isinstance(w, DeletionWrite)}
        tokens += [deletion.token for deletion in deletions.values() if deletion.token is not None]
        self._active = False
        self._desks, self._writes = {}, {}
        return [Refuse(token, code, text) for token in tokens]

    def _give_up(self, code: int) -> list[Effect]:
        """Whether the log has what we wrote, only a replay can tell."""
        gone = errors.CoordinatorNotAvailable("the group's state is being read again")
        return [*self.close(gone.code, str(gone)), GiveUp(f"a write ended with {_text(code)}")]

    # -- members -------------------------------------------------------------------------------------------------

    def on_heartbeat(self, token: Token, request: GroupHeartbeatRequest, now_ms: int) -> list[Effect]:
        desk, refused = self._find(token, request.group)
        if desk is None:
            return refused
        effects = desk.on_heartbeat(token, request, now_ms)
        self._keep(desk)
        return effects

    def _find(self, token: Token, group: str) -> tuple[Desk | None, list[Effect]]:
        """The group's desk, or a new one, to be kept if something comes of the request."""
        if not self._active:
            return None, [refusal(token, errors.CoordinatorLoading())]
        desk = self._desks.get(group)
        if desk is None and len(self._desks) >= self._config.groups_max:
            return None, [refusal(token, errors.GroupFull(f"there are {len(self._desks)} groups already"))]
        return desk or Desk(group, self._around), []

    def _keep(self, desk: Desk) -> None:
        if not desk.unused:
            self._desks[desk.group.name] = desk
        elif self._desks.get(desk.group.name) is desk:
            del self._desks[desk.group.name]

    # -- offsets -------------------------------------------------------------------------------------------------

    def on_commit(self, token: Token, request: CommitOffsetsRequest, now_ms: int, wall_ms: int) -> list[Effect]:
        """Held against the group as it is now, and appended in the same step."""
        desk, refused = self._find(token, request.group)
        if desk is None:
            return refused
        self._around.wall_ahead_ms = wall_ms - now_ms
        if self._committing >= self._config.commits_waiting_max:
            return [refusal(token, errors.Busy(f"{self._committing} commits are being written"))]
        group = desk.group
        if not request.member_id:
            return desk.when_clean(token, lambda now_ms: self._commit_of_nobody(token, desk, request, now_ms), now_ms)
        member = group.members.get(request.member_id)
        if member is not None:
            return self._commit(token, desk, member, request, now_ms)
        if group.was_replaced(request.member_id):
            return desk.gate(refusal(token, errors.FencedInstance("another process of this instance has joined")))
        return desk.gate(refusal(token, errors.UnknownMember()))

    def _commit_of_nobody(self, token: Token, desk: Desk, request: CommitOffsetsRequest, now_ms: int) -> list[Effect]:
        if desk.group.members:
            return [refusal(token, errors.NonEmptyGroup(f"group {request.group} has members, who commit themselves"))]
        return self._commit(token, desk, None, request, now_ms)

    def _commit(
        self, token: Token, desk: Desk, member: Member | None, request: CommitOffsetsRequest, now_ms: int
    ) -> list[Effect]:
        wall_ms = now_ms + self._around.wall_ahead_ms
        number = request.number if member is not None else 0
        commit = Commit(token, [check_row(row, request, member, self._config, self._cluster) for row in request.rows])
        pending = []
        for at, row in enumerate(request.rows):
            if commit.results[at] == 0:
                value = CommittedOffset(row.offset, row.leader_epoch, row.metadata, wall_ms, request.member_id, number)
                pending.append(desk.offsets.add(commit, at, row, value))
        if commit.open == 0:
            return [Answer(token, CommitOffsetsResponse(commit.results))]
        self._committing += 1
        self._keep(desk)
        records = ((desk.offsets.record(each), each) for each in pending if each is not None)
        return [
            self._write(CommitWrite(desk, [each for _, each in some]), [record for record, _ in some])
            for some in self._chunks(records)
        ]

    def on_fetch_offsets(self, token: Token, request: FetchOffsetsRequest, now_ms: int) -> list[Effect]:
        if not self._active:
            return [refusal(token, errors.CoordinatorLoading())]
        desk = self._desks.get(request.group)
        committed = desk.offsets.committed if desk is not None else {}
        asked = (
            sorted(committed)
            if request.entries is None
            else [PartitionKey(e.topic_id, e.partition) for e in request.entries]
        )
        rows = [_committed_row(key, committed[key]) for key in asked if key in committed]
        return [served(self._lease, token, FetchOffsetsResponse(rows), now_ms)]

    # -- groups as a whole ---------------------------------------------------------------------------------------

    def on_describe(self, token: Token, request: DescribeGroupRequest, now_ms: int) -> list[Effect]:
        """As it is here and now, which members may not have heard of yet."""
        if not self._active:
            return [refusal(token, errors.CoordinatorLoading())]
        desk = self._desks.get(request.group)
        if desk is None:
            return [refusal(token, errors.GroupNotFound(f"no group {request.group!r}"))]
        return [served(self._lease, token, description(desk.group), now_ms)]

    def on_delete(self, token: Token, request: DeleteGroupRequest, now_ms: int) -> list[Effect]:
        if not self._active:
            return [refusal(token, errors.CoordinatorLoading())]
        desk = self._desks.get(request.group)
        if desk is None:
            return [refusal(token, errors.GroupNotFound(f"no group {request.group!r}"))]

        def delete(now_ms: int) -> list[Effect]:
            if desk.group.members:
                return [refusal(token, errors.NonEmptyGroup(f"group {request.group} has members"))]
            return self._delete(Deletion(desk, token, whole=True), desk.offsets.partitions())

        return desk.when_clean(token, delete, now_ms)

    def list_groups(self) -> list[GroupRow]:
        groups = [desk.group for _, desk in sorted(self._desks.items())]
        return [GroupRow(g.name, g.state, g.generation, len(g.members), g.assignor) for g in groups]

    def _delete(self, deletion: Deletion, keys: list[PartitionKey]) -> list[Effect]:
        """Offsets first: as long as any are left, the group is."""
        desk = deletion.desk
        records: list[tuple[Record, PartitionKey | None]] = [(desk.offsets.tombstone(key), key) for key in keys]
        if deletion.whole:
            records.append(((encode(GroupKey(desk.group.name)), None), None))
        desk.deletions += 1
        effects: list[Effect] = []
        for some in self._chunks(records):
            deletion.open += 1
            write = DeletionWrite(deletion, [key for _, key in some])
            effects.append(self._write(write, [record for record, _ in some]))
        return effects

    def _end_deletion(self, number: int, write: DeletionWrite, code: int) -> list[Effect]:
        deletion, desk = write.deletion, write.deletion.desk
        deletion.open -= 1
        deletion.code = deletion.code or code
        for key in write.keys if code == 0 else ():
            if key is not None:
                desk.offsets.committed.pop(key, None)
            elif desk.clean and desk.written_last < number:
                desk.forget()  # nobody has joined meanwhile
        if deletion.open:
            return []
        desk.deletions -= 1
        self._keep(desk)
        if deletion.token is None:
            return []
        if deletion.code:
            return [Refuse(deletion.token, deletion.code, _text(deletion.code))]
        return [Answer(deletion.token, Done())]

    # -- writing -------------------------------------------------------------------------------------------------

    def _write(self, write: AnyWrite, records: list[Record]) -> Write:
        self._number += 1
        self._writes[self._number] = write
        return Write(self._number, records)

    def _write_group(self, desk: Desk, records: list[Record]) -> Write:
        return self._write(GroupWrite(desk), records)

    def _chunks(self, records: Iterable[tuple[Record, _T]]) -> Iterator[list[tuple[Record, _T]]]:
        """As many together as fit into one write."""
        some: list[tuple[Record, _T]] = []
        size = 0
        for record, about in records:
            bytes_ = len(record[0]) + len(record[1] or b"") + RECORD_BYTES
            if some and size + bytes_ > self._config.write_bytes_max:
                yield some
                some, size = [], 0
            some.append((record, about))
            size += bytes_
        if some:
            yield some

    def on_written(self, number: int, code: int, now_ms: int) -> list[Effect]:
        """A `Write` is replicated (code 0), or failed."""
        write = self._writes.pop(number, None)
        if write is None:
            return []  # of a coordinator that has given up
        known = errors.BY_CODE.get(code)
        if code != 0 and (known is None or known.indeterminate):
            self._writes[number] = write
            return self._give_up(code)
        match write:
            case GroupWrite(desk):
                return desk.on_written(code, _text(code), now_ms)
            case CommitWrite(desk, pending):
                ended = list(desk.offsets.end(pending, code))
                self._committing -= len(ended)
                self._keep(desk)
                answers = [Answer(commit.token, CommitOffsetsResponse(commit.results)) for commit in ended]
                return [*answers, *desk.on_commits_written(now_ms)]
            case DeletionWrite():
                return self._end_deletion(number, write, code)

    # -- the world -----------------------------------------------------------------------------------------------

    def on_topics(self, now_ms: int) -> list[Effect]:
        """Topics were made, deleted or given more partitions."""
        if not self._active:
            return []
        effects = [effect for desk in self._desks.values() for effect in desk.on_topics(now_ms)]
        return effects + self._forget_topics()

    def _forget_topics(self) -> list[Effect]:
        """Offsets of topics that are no more."""
        effects: list[Effect] = []
        for desk in self._desks.values():
            gone = [key for key in desk.offsets.partitions() if key.topic_id not in self._cluster.topics]
            if gone and not desk.deletions:
                effects += self._delete(Deletion(desk, None, whole=False), gone)
        return effects

    def on_tick(self, now_ms: int, wall_ms: int) -> list[Effect]:
        if not self._active:
            return []
        self._around.wall_ahead_ms = wall_ms - now_ms
        due_ms = self.next_due_ms
        if due_ms is not None and now_ms - due_ms > STALL_MS:
            for desk in self._desks.values():
                desk.excuse(now_ms)
        effects: list[Effect] = []
        for desk in self._desks.values():
            if desk.due_ms is not None and now_ms >= desk.due_ms:
                effects += desk.on_due(now_ms)
        if now_ms >= self._cleanup_ms:
            effects += self._clean_up(now_ms)
        return effects

    def _clean_up(self, now_ms: int) -> list[Effect]:
        self._cleanup_ms = now_ms + self._config.cleanup_ms
        effects = self._forget_topics()
        keep_ms, wall_ms = self._config.offset_retention_ms, now_ms + self._around.wall_ahead_ms
        for desk in self._desks.values():
            group = desk.group
            idle = desk.clean and not group.members and not desk.deletions
            used_ms = max(group.emptied_ms, desk.offsets.latest_ms())
            if idle and used_ms >= 0 and keep_ms >= 0 and wall_ms - used_ms >= keep_ms:
                effects.append(Log(f"group {group.name} has had no members for {keep_ms} ms: removed"))
                effects += self._delete(Deletion(desk, None, whole=True), desk.offsets.partitions())
        return effects

    @property
    def next_due_ms(self) -> int | None:
        if not self._active:
            return None
        return min([self._cleanup_ms, *(desk.due_ms for desk in self._desks.values() if desk.due_ms is not None)])


def _committed_row(key: PartitionKey, offset: CommittedOffset) -> CommittedRow:
    return CommittedRow(*key, offset.offset, offset.leader_epoch, offset.metadata, offset.committed_ms)


def _text(code: int) -> str:
    return str(errors.from_code(code)) if code else ""
