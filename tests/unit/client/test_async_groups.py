"""Members of a group in an event loop, against a scripted coordinator."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from unit.client.event_loop import each_cancellation, run, until
from unit.client.fake_broker import FakeCluster
from unit.client.test_consumer import fill

from zmqueue import AsyncConsumer, ConsumerRebalanceListener, TopicPartition, errors

T = TopicPartition("t", 0)
MANY = [TopicPartition("many", number) for number in range(4)]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(1, {"t": 1, "many": 4}) as cluster:
        yield cluster


def member(cluster: FakeCluster, *topics: str, **settings: Any) -> AsyncConsumer:
    defaults = {
        "group_id": "g",
        "auto_offset_reset": "earliest",
        "fetch_max_wait_ms": 50,
        "heartbeat_interval_ms": 100,
    }
    return AsyncConsumer(*topics, bootstrap_servers=cluster.bootstrap, **(defaults | settings))


class Told(ConsumerRebalanceListener):
    """Commits what it is told to give back, as an async function."""

    def __init__(self, consumer: AsyncConsumer) -> None:
        self.calls: list[str] = []
        self.consumer = consumer

    def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
        self.calls.append(f"assigned {len(assigned)} in {threading.current_thread().name}")

    async def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:  # type: ignore[override]
        await self.consumer.commit()
        self.calls.append(f"revoked {len(revoked)} in {threading.current_thread().name}")


def test_a_listener_runs_in_the_loop_and_commits_what_it_gives_back(cluster: FakeCluster) -> None:
    for number in range(4):
        fill(cluster, [b"%d" % n for n in range(10)], "many", number)
    here = threading.current_thread().name

    async def main() -> None:
        async with member(cluster, enable_auto_commit=False, max_poll_records=5) as first:
            told = Told(first)
            await first.subscribe(["many"], listener=told)
            read = Counter([((r := await first.getone()).partition, r.offset) for _ in range(7)])
            assert told.calls == [f"assigned 4 in {here}"]
            await first.pause(*MANY)
            async with member(cluster, "many", enable_auto_commit=False) as second:

                async def read_second() -> None:
                    async for record in second:
                        read[record.partition, record.offset] += 1

                reading = asyncio.ensure_future(read_second())
                while len(told.calls) < 2:
                    assert await first.poll(20) == {}
                await first.resume(*await first.assignment())
                while read.total() < 40:
                    for records in (await first.poll(20)).values():
                        read.update((record.partition, record.offset) for record in records)
                reading.cancel()
                await asyncio.wait([reading])
                assert told.calls[1] == f"revoked 2 in {here}"
                assert set(read.values()) == {1}

    run(main())


def test_partitions_that_are_lost_are_told_to_an_async_function_for_revoked_ones(cluster: FakeCluster) -> None:
    async def main() -> None:
        async with member(cluster, enable_auto_commit=False) as consumer:
            lost = []

            class Listener(ConsumerRebalanceListener):
                async def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:  # type: ignore[override]
                    await asyncio.sleep(0)
                    lost.append(revoked)

            await consumer.subscribe(["many"], listener=Listener())
            while not await consumer.assignment():
                await consumer.poll(20)
            cluster.do(lambda: cluster.coordinator.expel(next(iter(cluster.coordinator.members))))
            while not lost:
                await consumer.poll(20)
            assert lost == [MANY]

    run(main())


def test_leaving_commits_what_was_handed_out_and_no_more(cluster: FakeCluster) -> None:
    fill(cluster, [b"%d" % n for n in range(40)])

    async def main() -> None:
        at = 0
        for _ in range(3):
            async with member(cluster, "t") as consumer:
                async for record in consumer:
                    assert record.offset == at
                    at += 1
                    if at % 5 == 0:
                        break
                waiting = asyncio.ensure_future(consumer.poll(10_000))
                waiting.cancel()
                await asyncio.wait([waiting])

    run(main())


def test_a_cancelled_commit_leaves_the_consumer_as_it_was(cluster: FakeCluster) -> None:
    fill(cluster, [b"%d" % n for n in range(10)])

    async def main() -> None:
        async with member(cluster, "t", enable_auto_commit=False) as consumer:
            for at in range(3):
                assert (await consumer.getone()).offset == at
                async for _ in each_cancellation(lambda: consumer.commit()):
                    pass
                assert await consumer.committed(T) == at + 1
            seen: list[Any] = []
            await consumer.commit_async({T: 2}, lambda offsets, error: seen.append((offsets[T].offset, error)))
            await until(lambda: seen)
            assert seen == [(2, None)]
            with pytest.raises(errors.IllegalState):
                await consumer.commit({T: -1})
            assert (await consumer.group_metadata()).group_id == "g"

    run(main())


@pytest.mark.parametrize("seed", range(4))
def test_cancellations_and_commits_in_any_order_commit_nothing_that_was_not_handed_out(
    cluster: FakeCluster, seed: int
) -> None:
    chance = random.Random(seed)
    fill(cluster, [b"%d" % n for n in range(300)])

    async def main() -> None:
        async with member(cluster, "t", enable_auto_commit=False, max_poll_records=10) as consumer:
            got = [(await consumer.getone()).offset]

            async def poll() -> None:
                got.extend(r.offset for records in (await consumer.poll(5_000)).values() for r in records)

            async def getone() -> None:
                got.append((await consumer.getone()).offset)

            async def batches() -> None:
                got.extend(offset for batch in await consumer.poll_batches(5_000) for offset in batch.offsets)

            while len(got) < 300:
                task = asyncio.ensure_future(chance.choice([poll, poll, getone, getone, getone, batches])())
                for _ in range(chance.choice([0, 1, 2, 4, 30])):
                    await asyncio.sleep(0)
                if chance.random() < 0.8:
                    task.cancel()
                # Behind it, or in its way: the commit is what another reader would go on from.
                committing = asyncio.ensure_future(consumer.commit())
                await asyncio.wait([task])
                if not task.cancelled():
                    task.result()
                before = len(got)
                await committing
                assert (await consumer.committed(T) or 0) <= before
            assert got == list(range(300))

    run(main())
