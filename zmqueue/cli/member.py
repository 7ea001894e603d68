"""`consume -g`: a member of a group that prints what it is given, each record at least once.

An offset is committed only after its record has left for stdout, so a crash, or a partition that goes to another member
too soon, lets records be printed again; none is passed over.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from typing import IO, TYPE_CHECKING, Any

from zmqueue.cli.consume import POLL_MS, chosen_partitions
from zmqueue.errors import ZmqueueError

if TYPE_CHECKING:
    from zmqueue.model import ConsumerRecord, TopicPartition

# Somebody who interrupts does not want to wait for brokers that are away.
INTERRUPTED_MS_MAX = 2_000


def consume_as_member(
    bootstrap: str,
    topic: str,
    group: str,
    reset: str,
    count: int | None,
    exit_at_end: bool,
    write: Callable[[ConsumerRecord], bytes],
) -> None:
    from zmqueue import Consumer

    with Consumer(
        bootstrap_servers=bootstrap,
        client_id="zmqueue-consume",
        group_id=group,
        auto_offset_reset=reset,
        enable_auto_commit=False,
    ) as consumer:
        partitions = chosen_partitions(consumer, topic, ())
        ends = consumer.end_offsets(partitions) if exit_at_end else None
        member = PrintingMember(consumer, write, sys.stdout.buffer)
        consumer.subscribe([topic], listener=member)
        member.run(count, ends)


class PrintingMember:
    """The listener of its consumer as well: what was printed of a partition is committed before it goes."""

    def __init__(self, consumer: Any, write: Callable[[ConsumerRecord], bytes], out: IO[bytes]) -> None:
        self._consumer = consumer
        self._write = write
        self._out = out
        self._printed: dict[TopicPartition, int] = {}  # and not known to be committed: the offset to go on from

    def run(self, count: int | None, ends: dict[TopicPartition, int] | None) -> None:
        """Until `count` records, or until everything that the member holds is read up to `ends`."""
        left = count
        try:
            while left != 0 and not (ends is not None and self._has_read(ends)):
                polled = self._consumer.poll(timeout_ms=POLL_MS, max_records=left)
                for records in polled.values():
                    self._out.write(b"".join(map(self._write, records)))
                    left = left if left is None else left - len(records)
                self._out.flush()
                self._printed |= {partition: records[-1].offset + 1 for partition, records in polled.items()}
                if polled:
                    self._consumer.commit_async(self._offsets(polled))
        except BaseException:
            with contextlib.suppress(ZmqueueError):  # the error that is on its way says more
                self._commit(self._printed, INTERRUPTED_MS_MAX)
            raise
        else:
            self._commit(self._printed)
        finally:
            self._printed.clear()  # the consumer that is closed now tells that its partitions go

    def _has_read(self, ends: dict[TopicPartition, int]) -> bool:
        held = self._consumer.assignment()
        return bool(held) and all(self._consumer.position(each) >= ends.get(each, 0) for each in held)

    def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Nothing is to be done: reading begins where the group stands."""

    def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        gone = list(revoked)
        self._commit(gone)
        for partition in gone:
            self._printed.pop(partition, None)

    def on_partitions_lost(self, lost: Iterable[TopicPartition]) -> None:
        """Others have them already: what was not committed they print again."""
        for partition in lost:
            self._printed.pop(partition, None)

    def _commit(self, partitions: Iterable[TopicPartition], timeout_ms: int | None = None) -> None:
        offsets = self._offsets(partitions)
        if offsets:
            self._consumer.commit(offsets, timeout_ms=timeout_ms)

    def _offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Any]:
        from zmqueue.model import OffsetAndMetadata

        printed = self._printed
        return {each: OffsetAndMetadata(printed[each]) for each in partitions if each in printed}
