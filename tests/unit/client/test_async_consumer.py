"""The consumer for asyncio against a scripted cluster."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from unit.client.event_loop import Ticking, each_cancellation, run, until
from unit.client.fake_broker import DEFAULT, SILENCE, FakeCluster

from zmqueue import AsyncConsumer, TopicPartition, errors
from zmqueue.wire import batch as wire_batch
from zmqueue.wire.frames import Operation

CLIENT_ID = "async-consumer-under-test"
T = TopicPartition("t", 0)
WAIT_MS = 30_000


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(1, {"t": 1, "many": 4}) as cluster:
        yield cluster


def fill(cluster: FakeCluster, count: int, topic: str = "t", number: int = 0, size: int = 10) -> None:
    partition = cluster.partition(topic, number)
    for at in range(partition.log_end, partition.log_end + count, size):
        partition.append(*wire_batch.encode([b"%d" % n for n in range(at, at + size)], base_timestamp=1000 + at))


def consumer(cluster: FakeCluster, *topics: str, **settings: Any) -> AsyncConsumer:
    defaults = {"auto_offset_reset": "earliest", "fetch_max_wait_ms": 50, "client_id": CLIENT_ID}
    return AsyncConsumer(*topics, bootstrap_servers=cluster.bootstrap, **(defaults | settings))


def offsets(polled: Any) -> list[int]:
    return [record.offset for records in polled.values() for record in records]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if CLIENT_ID in thread.name]


# -- records -------------------------------------------------------------------------------------------------------


def test_records_come_one_by_one_and_the_position_covers_those_that_came(cluster: FakeCluster) -> None:
    fill(cluster, 100)

    async def main() -> None:
        async with consumer(cluster, "t", max_poll_records=30) as c:
            count = 0
            async for record in c:
                assert (record.topic, record.offset, record.value) == ("t", count, b"%d" % count)
                count += 1
                if count == 45:
                    break
            assert await c.position(T) == 45
            assert (await c.getone()).offset == 45
            assert offsets(await c.poll(WAIT_MS, max_records=5)) == list(range(46, 51))
            assert await c.position(T) == 51
            assert offsets(await c.getmany(timeout_ms=WAIT_MS)) == list(range(51, 60))

    run(main())


def test_columns_come_as_they_were_fetched(cluster: FakeCluster) -> None:
    fill(cluster, 40)

    async def main() -> None:
        async with consumer(cluster, "t") as c:
            batches = await c.poll_batches(WAIT_MS)
            assert [offset for batch in batches for offset in batch.offsets] == list(range(40))
            assert await c.poll_batches() == []

    run(main())


def test_an_empty_poll_ends_in_time_and_iteration_after_consumer_timeout_ms(cluster: FakeCluster) -> None:
    async def main() -> None:
        async with consumer(cluster, "t", consumer_timeout_ms=50) as c:
            assert await c.poll() == {}
            assert await c.poll(30) == {}
            assert [record async for record in c] == []
            fill(cluster, 10)
            assert [record.offset async for record in c] == list(range(10))

    run(main())


def test_each_record_goes_to_one_of_several_tasks(cluster: FakeCluster) -> None:
    fill(cluster, 200)

    async def main() -> None:
        async with consumer(cluster, "t", max_poll_records=7) as c:
            got: list[int] = []

            async def read() -> None:
                while True:
                    got.append((await c.getone()).offset)

            tasks = [asyncio.ensure_future(read()) for _ in range(5)]
            await until(lambda: len(got) == 200)
            fill(cluster, 10)
            await until(lambda: len(got) == 210)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert sorted(got) == list(range(210))

    run(main())


def test_polls_whose_time_is_over_while_another_waits_end(cluster: FakeCluster) -> None:
    async def main() -> None:
        async with consumer(cluster, "t") as c:
            waiting = asyncio.ensure_future(c.getone())
            assert await asyncio.gather(c.poll(20), c.poll(40)) == [{}, {}]
            fill(cluster, 10)
            assert (await waiting).offset == 0
            assert offsets(await c.poll(WAIT_MS)) == list(range(1, 10))

    run(main())


def test_what_is_wrong_is_raised_and_reading_goes_on_behind_it(cluster: FakeCluster) -> None:
    fill(cluster, 10)

    async def main() -> None:
        async with consumer(cluster, "t", auto_offset_reset="none") as c:
            with pytest.raises(errors.OffsetOutOfRange):
                await c.getone()
            await c.seek(T, 4)
            assert (await c.getone()).offset == 4
            with pytest.raises(errors.IllegalState):
                await c.seek(T, -1)

    run(main())


# -- calls while a poll waits ----------------------------------------------------------------------------------------


def test_a_call_goes_before_a_poll_that_waits_and_the_poll_goes_on(cluster: FakeCluster) -> None:
    fill(cluster, 10)

    async def main() -> None:
        async with consumer(cluster) as c:
            await c.assign([T])
            await c.seek_to_end()
            waiting = asyncio.ensure_future(c.getone())
            also = asyncio.ensure_future(c.poll(WAIT_MS, 1))
            for _ in range(20):
                assert await c.position(T) == 10
                assert await c.end_offsets([T]) == {T: 10}
            assert not waiting.done()
            await c.seek(T, 7)
            assert (await waiting).offset == 7
            assert offsets(await also) == [8]
            assert await c.assignment() == {T}
            assert await c.partitions_for_topic("many") == {0, 1, 2, 3}

    run(main())


def test_the_loop_goes_on_while_the_cluster_does_not_answer(cluster: FakeCluster) -> None:
    async def main() -> None:
        async with consumer(cluster, request_timeout_ms=500) as c:
            await c.topics()
            cluster.script = lambda seen: SILENCE if seen.operation == Operation.LIST_OFFSETS else DEFAULT
            async with Ticking() as ticking:
                with pytest.raises(errors.ZmqueueError):
                    await c.end_offsets([T])
                assert ticking.turns > 100

    run(main())


def test_what_was_paused_is_not_handed_out_though_it_was_fetched(cluster: FakeCluster) -> None:
    fill(cluster, 10)

    async def main() -> None:
        async with consumer(cluster, "t") as c:
            assert (await c.getone()).offset == 0
            await c.pause(T)
            assert await c.paused() == {T}
            assert await c.poll(30) == {}
            await c.resume(T)
            assert (await c.getone()).offset == 1

    run(main())


# -- cancellation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["poll", "getone", "iterate", "poll_batches"])
def test_a_cancelled_poll_loses_no_record_wherever_it_is_cancelled(cluster: FakeCluster, how: str) -> None:
    async def main() -> None:
        async with consumer(cluster, "t", max_poll_records=4) as c:

            async def one() -> list[int]:
                match how:
                    case "poll":
                        return offsets(await c.poll(WAIT_MS))
                    case "getone":
                        return [(await c.getone()).offset]
                    case "iterate":
                        async for record in c:
                            return [record.offset]
                return [offset for batch in await c.poll_batches(WAIT_MS) for offset in batch.offsets]

            got: list[int] = []
            cancellations = 0
            for _ in range(10):

                def soon() -> Any:
                    asyncio.get_running_loop().call_later(0.005, fill, cluster, 10)
                    return one()

                async for cancelled, found in each_cancellation(soon):
                    cancellations += cancelled
                    got += found or []
                    assert await c.position(T) == len(got)
                    while len(got) < cluster.partition().log_end:
                        got += await one()
            assert cancellations >= 20
            assert got == list(range(cluster.partition().log_end))

    run(main())


@pytest.mark.parametrize("seed", range(5))
def test_a_storm_of_cancellations_loses_and_repeats_nothing(cluster: FakeCluster, seed: int) -> None:
    chance = random.Random(seed)
    fill(cluster, 400)

    async def main() -> None:
        async with consumer(cluster, "t", max_poll_records=20) as c:
            got: list[int] = []

            async def poll() -> None:
                got.extend(offsets(await c.poll(WAIT_MS, chance.choice([None, 3]))))

            async def getone() -> None:
                got.append((await c.getone()).offset)

            async def position() -> None:
                position = await c.position(T)
                assert position == len(got), (position, len(got))

            async def move() -> None:
                await c.resume(T)
                await c.seek(T, len(got))

            while len(got) < 400:
                action: Callable[[], Any] = chance.choice([poll, getone, getone, position, move])
                task = asyncio.ensure_future(action())
                for _ in range(chance.choice([0, 1, 2, 3, 5, 50])):
                    await asyncio.sleep(0)
                if chance.random() < 0.7:
                    task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():
                    task.result()
            assert got == list(range(400))

    run(main())


def test_a_cancelled_call_leaves_the_consumer_as_it_was(cluster: FakeCluster) -> None:
    fill(cluster, 50)

    async def main() -> None:
        async with consumer(cluster, "t") as c:
            waiting = asyncio.ensure_future(c.getone())
            calls: list[Callable[[], Any]] = [
                lambda: c.position(T),
                lambda: c.end_offsets([T]),
                lambda: c.offsets_for_times({T: 1005}),
                lambda: c.topics(),
            ]
            for call in calls:
                results = [result async for cancelled, result in each_cancellation(call) if not cancelled]
                assert len(results) == 2
            assert (await waiting).offset == 0
            assert await c.position(T) == 1

    run(main())


# -- the end -------------------------------------------------------------------------------------------------------


def test_whoever_waits_when_it_is_closed_hears_of_it(cluster: FakeCluster) -> None:
    async def main() -> None:
        c = await consumer(cluster, "t").start()
        waiting = [asyncio.ensure_future(call) for call in (c.getone(), c.poll(WAIT_MS), c.poll_batches(WAIT_MS))]
        await asyncio.sleep(0.01)
        await asyncio.gather(c.close(), c.close())
        for task in waiting:
            with pytest.raises(errors.ClientClosed):
                await task
        for call in (c.poll(), c.getone(), c.position(T), c.__anext__()):
            with pytest.raises(errors.ClientClosed):
                await call
        await c.close()
        await until(lambda: threads() == [])

    run(main())


def test_leaving_by_cancellation_ends_the_threads(cluster: FakeCluster) -> None:
    async def main() -> None:
        async def read() -> None:
            async with consumer(cluster, "t") as c:
                async for _ in c:
                    pass

        task = asyncio.ensure_future(read())
        for turns in (1, 2, 20):
            for _ in range(turns):
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: threads() == [])
            task = asyncio.ensure_future(read())
        task.cancel()
        await asyncio.wait([task])

    run(main())


def test_a_cancelled_close_still_closes(cluster: FakeCluster) -> None:
    made: list[AsyncConsumer] = []

    async def used() -> None:
        made.append(consumer(cluster, "t"))
        await made[-1].topics()

    async def main() -> None:
        await used()
        async for _ in each_cancellation(lambda: made[-1].close()):
            await until(lambda: threads() == [])
            await made[-1].close()
            await used()
        await made[-1].close()

    run(main())


def test_a_consumer_belongs_to_the_loop_it_was_first_used_in(cluster: FakeCluster) -> None:
    fill(cluster, 10)
    c = consumer(cluster, "t")

    async def first() -> None:
        await c.getone()

    async def second() -> None:
        for call in (c.getone(), c.poll(), c.position(T), c.start(), c.close(), c.__anext__()):
            with pytest.raises(errors.IllegalState, match="another event loop"):
                await call

    run(first())
    run(second())


def test_a_consumer_that_is_dropped_ends_its_threads(cluster: FakeCluster) -> None:
    async def main() -> None:
        c = consumer(cluster, "t")
        await c.poll(1)
        await c.topics()
        del c
        gc.collect()
        await until(lambda: threads() == [])

    run(main())
