"""Who gets which partition of the topics that a group reads.

An assignor is a pure function of the group's members and of what they hold. What it returns need not be possible at
once: the coordinator gives a partition away only when its owner has let it go.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol

from zmqueue.model import TopicPartition


class Assignor(Protocol):
    def __call__(
        self,
        members: Mapping[str, AbstractSet[str]],
        partitions: Mapping[str, int],
        owned: Mapping[str, AbstractSet[TopicPartition]],
    ) -> Mapping[str, AbstractSet[TopicPartition]]:
        """Every partition of a topic that somebody subscribes to goes to one of its subscribers.

        `members`: topics by member. `partitions`: how many each topic has. `owned`: what members hold by the last
        assignment, all of which exists and is subscribed to.
        """


BUILT_IN: dict[str, Assignor] = {}
