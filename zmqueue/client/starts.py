"""Where partitions begin that a group has committed offsets for, when no assignment has brought them along.

That is so for partitions that were assigned by hand, and for those that a member was given back while it was letting
them go. In the IO thread; slots that wait for this have `asks_group` set.
"""

from __future__ import annotations

import time
from functools import partial

from zmqueue.client.coordinator import Ask, Coordinator
from zmqueue.client.fetcher import Fetcher
from zmqueue.client.network import Answer
from zmqueue.client.routing import Router
from zmqueue.client.slots import Slot
from zmqueue.errors import ClientClosed, ZmqueueError
from zmqueue.wire.frames import Operation
from zmqueue.wire.group_messages import FetchOffsetsRequest
from zmqueue.wire.messages import PartitionEntry


class Starts:
    def __init__(
        self, router: Router, coordinator: Coordinator, fetcher: Fetcher, group: str, timeout_s: float
    ) -> None:
        self._router, self._coordinator, self._fetcher = router, coordinator, fetcher
        self._group, self._timeout_s = group, timeout_s
        router.listeners.append(self.pump)

    def pump(self) -> None:
        asked: list[tuple[Slot, int, PartitionEntry]] = []
        with self._fetcher.changed:
            for slot in self._fetcher.slots.values():
                if slot.asks_group and not slot.waits and not slot.stopped and slot.error is None:
                    entry = self._entry(slot)
                    if entry is not None:
                        slot.waits = True
                        asked.append((slot, slot.token, entry))
        if asked:
            message = FetchOffsetsRequest(self._group, [entry for _, _, entry in asked])
            Ask(
                self._coordinator,
                self._router.network.call_later,
                Operation.FETCH_OFFSETS,
                message,
                time.monotonic() + self._timeout_s,
                partial(self._on_answer, asked),
            ).start()

    def _entry(self, slot: Slot) -> PartitionEntry | None:
        topic_id = slot.topic_id
        if topic_id is None:
            view = self._router.metadata.topics.get(slot.partition.topic)
            if view is None:
                self._router.refresh()
                return None
            topic_id = view.topic_id
        return PartitionEntry(topic_id, slot.partition.partition)

    def _on_answer(self, asked: list[tuple[Slot, int, PartitionEntry]], result: Answer | ZmqueueError) -> None:
        if isinstance(result, ClientClosed):
            return
        rows = {}
        if isinstance(result, Answer):
            rows = {(row.topic_id, row.partition): row for row in result.message.rows}
        with self._fetcher.changed:
            for slot, token, entry in asked:
                if slot.token != token:
                    continue
                slot.waits = False
                row = rows.get((entry.topic_id, entry.partition))
                if isinstance(result, ZmqueueError):
                    slot.error = None if result.retriable else result
                elif row is not None:
                    slot.begin(row.offset, row.leader_epoch)
                else:
                    slot.look_up(slot.reset)
            self._fetcher.changed.notify_all()
        if isinstance(result, ZmqueueError):
            self.pump()
        else:
            self._fetcher.pump()
