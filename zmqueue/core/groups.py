"""The coordinator of the groups of one partition of `__consumer_offsets`, in one leader epoch. A pure state machine.

A life: `replay` of every record of the partition, `activate` once the high watermark has passed all of them, events,
`close` when this broker no longer leads. A new leader epoch gets a new object.

The shell, per partition that it leads:
- answers COORDINATOR_LOADING until `activate`, which comes when everything up to the epoch's first offset is replayed
  and below the high watermark;
- hands events in and performs the effects that come out in order (see group_effects.py);
- calls `on_written` once for every `Write`, `on_topics` when metadata of topics changed, `on_tick` when `next_due_ms`
  is reached (None: nothing is due), or more often;
- on `GiveUp` closes this coordinator, reads the partition again up to the end of its log, and activates a new one when
  the high watermark has reached that end.

Tokens are the shell's handles of requests; each is answered or refused exactly once, at once or later.
"""

from __future__ import annotations

from collections.abc import Mapping

from zmqueue.config import GroupsConfig
from zmqueue.core.assignors import Assignor
from zmqueue.core.cluster import Cluster
from zmqueue.core.effects import Effect, Token
from zmqueue.core.lease import Lease
from zmqueue.wire.group_messages import (
    CommitOffsetsRequest,
    DeleteGroupRequest,
    DescribeGroupRequest,
    FetchOffsetsRequest,
    GroupHeartbeatRequest,
    GroupRow,
)


class Coordinator:
    """`cluster` is only read: which topics there are. `assignors` by name: `core.assignors.BUILT_IN` and custom ones.

    `grace_ms`: for how long a deposed coordinator may still answer (`replication.read_lease_ms`).
    """

    def __init__(
        self, config: GroupsConfig, cluster: Cluster, assignors: Mapping[str, Assignor], lease: Lease, grace_ms: int
    ) -> None:
        raise NotImplementedError

    # -- taking over and giving up -------------------------------------------------------------------------------

    def replay(self, key: bytes | None, value: bytes | None) -> None:
        """The next record of the partition. Raises CorruptBatch if it cannot be read; FutureFormat if not by us."""
        raise NotImplementedError

    def activate(self, now_ms: int, wall_ms: int) -> list[Effect]:
        """Everything is replayed and committed. Every member gets one full session from now."""
        raise NotImplementedError

    def close(self, code: int, text: str) -> list[Effect]:
        """Nothing more will be answered: whoever waits is refused with this code."""
        raise NotImplementedError

    # -- requests ------------------------------------------------------------------------------------------------

    def on_heartbeat(self, token: Token, request: GroupHeartbeatRequest, now_ms: int) -> list[Effect]:
        raise NotImplementedError

    def on_commit(self, token: Token, request: CommitOffsetsRequest, now_ms: int, wall_ms: int) -> list[Effect]:
        raise NotImplementedError

    def on_fetch_offsets(self, token: Token, request: FetchOffsetsRequest, now_ms: int) -> list[Effect]:
        raise NotImplementedError

    def on_describe(self, token: Token, request: DescribeGroupRequest, now_ms: int) -> list[Effect]:
        raise NotImplementedError

    def on_delete(self, token: Token, request: DeleteGroupRequest, now_ms: int) -> list[Effect]:
        raise NotImplementedError

    def list_groups(self) -> list[GroupRow]:
        raise NotImplementedError

    # -- the world -----------------------------------------------------------------------------------------------

    def on_written(self, number: int, code: int, now_ms: int) -> list[Effect]:
        """A `Write` is replicated (code 0), or failed."""
        raise NotImplementedError

    def on_topics(self, now_ms: int) -> list[Effect]:
        """Topics were made, deleted or given more partitions."""
        raise NotImplementedError

    def on_tick(self, now_ms: int, wall_ms: int) -> list[Effect]:
        raise NotImplementedError

    @property
    def next_due_ms(self) -> int | None:
        raise NotImplementedError
