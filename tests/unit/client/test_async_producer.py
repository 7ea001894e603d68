"""The producer for asyncio against a scripted cluster."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from unit.client.event_loop import Ticking, each_cancellation, run, until
from unit.client.fake_broker import DEFAULT, SILENCE, FakeCluster, Seen

from zmqueue import AsyncProducer, errors
from zmqueue.client.serializers import Serializer
from zmqueue.wire.batch import decode
from zmqueue.wire.frames import Operation

LONG_MS = 600_000
CLIENT_ID = "async-producer-under-test"


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(1, {"t": 1, "many": 4}) as cluster:
        yield cluster


def producer(cluster: FakeCluster, **settings: Any) -> AsyncProducer:
    return AsyncProducer(bootstrap_servers=cluster.bootstrap, client_id=CLIENT_ID, **settings)


def written(cluster: FakeCluster, topic: str = "t", number: int = 0) -> list[bytes]:
    batches = cluster.partition(topic, number).batches
    return [value for header, body in batches for value in decode(header, body).values]


def hold_produces(cluster: FakeCluster) -> list[Seen]:
    """Leave produce requests unanswered; those that came."""
    held: list[Seen] = []

    def hold(seen: Seen) -> Any:
        if seen.operation == Operation.PRODUCE:
            held.append(seen)
            return SILENCE
        return DEFAULT

    cluster.script = hold
    return held


def let_go(cluster: FakeCluster, held: list[Seen]) -> None:
    def answer() -> None:
        cluster.script = lambda seen: DEFAULT
        for seen in held:
            cluster._produce(seen, None)

    cluster.do(answer)


# -- sending -------------------------------------------------------------------------------------------------------


def test_a_delivery_is_awaited_as_often_as_one_likes(cluster: FakeCluster) -> None:
    async def main() -> None:
        async with producer(cluster) as p:
            future = await p.send("t", b"v", key=b"k", headers=[("h", b"x")], partition=0, timestamp_ms=7)
            first, second = await asyncio.gather(future, future)
            assert first == second == await future == future.result()
            assert (first.topic, first.partition, first.offset, first.timestamp) == ("t", 0, 0, 7)
            assert future.done()
            assert future.exception() is None
            assert (await p.send_and_wait("t", b"w")).offset == 1

    run(main())
    assert written(cluster) == [b"v", b"w"]


def test_what_was_refused_raises_where_it_is_awaited(cluster: FakeCluster) -> None:
    cluster.script = lambda seen: errors.InvalidRecord.code if seen.operation == Operation.PRODUCE else DEFAULT

    async def main() -> None:
        async with producer(cluster) as p:
            future = await p.send("t", b"v")
            with pytest.raises(errors.IllegalState):
                future.result()
            for _ in range(2):
                with pytest.raises(errors.InvalidRecord):
                    await future
            assert isinstance(future.exception(), errors.InvalidRecord)
            with pytest.raises(errors.MessageTooLarge):
                await p.send("t", bytes(2 << 20))

    run(main())


def test_tasks_that_send_and_wait_share_a_batch_that_then_does_not_linger(cluster: FakeCluster) -> None:
    async def main() -> None:
        async with producer(cluster, linger_ms=LONG_MS) as p:
            await p.partitions_for("t")
            sent = await asyncio.gather(*(p.send_and_wait("t", b"%d" % n) for n in range(500)))
            assert [each.offset for each in sent] == list(range(500))

    run(main())
    assert len(cluster.partition().batches) == 1


def test_the_loop_is_woken_for_batches_and_not_for_records(cluster: FakeCluster) -> None:
    async def main() -> None:
        async with producer(cluster) as p:
            await p.send_and_wait("t", b"")
            before, batches = p._gate.wakes, len(cluster.partition().batches)
            await asyncio.gather(*(p.send_and_wait("t", b"v") for _ in range(5_000)))
            assert p._gate.wakes - before <= len(cluster.partition().batches) - batches

    run(main())
    assert len(cluster.partition().batches) < 500


def test_a_task_that_never_waits_lets_the_loop_run(cluster: FakeCluster) -> None:
    async def main() -> None:
        async with producer(cluster) as p:
            await p.send_and_wait("t", b"")
            async with Ticking() as ticking:
                for _ in range(10_000):
                    await p.send("t", b"v")
                assert ticking.turns >= 9

    run(main())


# -- many ----------------------------------------------------------------------------------------------------------


def test_many_records_go_in_slices_and_come_back_as_one(cluster: FakeCluster) -> None:
    values = [b"%d" % n for n in range(20_000)]

    async def main() -> None:
        async with producer(cluster) as p:
            await p.send_and_wait("many", b"", partition=0)
            async with Ticking() as ticking:
                future = await p.send_many("many", values, keys=[b"%d" % (n % 7) for n in range(20_000)])
                assert ticking.turns >= 3
            metadata = await future
            assert len(future) == len(metadata) == 20_000
            for number in range(4):
                ours = [n for n in range(20_000) if metadata[n].partition == number]
                base = 1 if number == 0 else 0
                assert [metadata[n].offset for n in ours] == list(range(base, base + len(ours)))
                assert written(cluster, "many", number)[base:] == [values[n] for n in ours]
            assert await (await p.send_many("t", [])) is not None

    run(main())


def test_columns_of_different_lengths_are_refused_before_anything_is_taken(cluster: FakeCluster) -> None:
    async def main() -> None:
        async with producer(cluster) as p:
            for columns in ({"keys": [b"k"]}, {"headers": [None]}, {"timestamps_ms": [1]}):
                with pytest.raises(errors.InvalidRecord):
                    await p.send_many("t", [b"v"] * 9_999, **columns)

    run(main())
    assert written(cluster) == []


def test_many_records_wait_for_room_slice_by_slice(cluster: FakeCluster) -> None:
    held = hold_produces(cluster)

    async def main() -> None:
        async with producer(cluster, buffer_memory=200_000) as p:
            task = asyncio.ensure_future(p.send_many("t", [b"v" * 1000] * 2_000))
            await until(lambda: held and p._inner.memory > 200_000)
            assert not task.done()
            assert p._inner.memory < 200_000 + (1 << 20)
            let_go(cluster, held)
            assert len(await (await task)) == 2_000

    run(main())
    assert len(written(cluster)) == 2_000


# -- waiting before a record is taken ------------------------------------------------------------------------------


def test_a_topic_that_does_not_exist_yet_is_awaited_while_the_loop_goes_on(cluster: FakeCluster) -> None:
    async def main() -> None:
        async with producer(cluster) as p, Ticking() as ticking:
            tasks = [asyncio.ensure_future(p.send_and_wait(topic, b"v")) for topic in ("later", "later", "last")]
            await until(lambda: ticking.turns > 50)
            assert (await p.send_and_wait("t", b"other topics go on")).offset == 0
            cluster.do(lambda: cluster.add_topic("later", 1))
            assert {(await task).offset for task in tasks[:2]} == {0, 1}
            assert not tasks[2].done()
            cluster.do(lambda: cluster.add_topic("last", 1))
            assert (await tasks[2]).topic == "last"
            assert await p.partitions_for("many") == {0, 1, 2, 3}
            assert await p.bootstrap_connected()

    run(main())


def test_a_topic_that_never_comes_is_an_error_after_max_block_ms(cluster: FakeCluster) -> None:
    async def main() -> None:
        async with producer(cluster, max_block_ms=300) as p:
            with pytest.raises(errors.UnknownTopicOrPartition):
                await p.send("nowhere", b"v")
            with pytest.raises(errors.UnknownTopicOrPartition):
                await p.partitions_for("nowhere", timeout=0.1)
            with pytest.raises(errors.InvalidTopic):
                await p.send("no/where", b"v")
        cluster.kill(0)
        async with producer(cluster, max_block_ms=50) as p:
            with pytest.raises(errors.NoBrokersAvailable):
                await p.send("t", b"v")

    run(main())


def test_a_full_buffer_is_awaited_in_turn_and_nothing_lingers_meanwhile(cluster: FakeCluster) -> None:
    held = hold_produces(cluster)

    async def main() -> None:
        async with producer(cluster, buffer_memory=2_000, linger_ms=LONG_MS) as p:
            await p.send("t", b"%d" % 0 * 2_000)
            tasks = [asyncio.ensure_future(p.send("t", b"%d" % n * 2_000)) for n in range(1, 6)]
            await until(lambda: held)
            async with Ticking() as ticking:
                await until(lambda: ticking.turns > 50)
            assert not any(task.done() for task in tasks)
            let_go(cluster, held)
            await asyncio.gather(*tasks)
            await p.flush()

    run(main())
    assert written(cluster) == [b"%d" % n * 2_000 for n in range(6)]


def test_a_buffer_that_stays_full_is_an_error_after_max_block_ms(cluster: FakeCluster) -> None:
    held = hold_produces(cluster)

    async def main() -> None:
        async with producer(cluster, buffer_memory=2_000, max_block_ms=100) as p:
            await p.partitions_for("t", timeout=10)
            future = await p.send("t", b"v" * 2_000)
            results = await asyncio.gather(*(p.send("t", b"v") for _ in range(3)), return_exceptions=True)
            assert [type(result) for result in results] == [errors.BufferFull] * 3
            await until(lambda: held)
            let_go(cluster, held)
            await future
            await p.send_and_wait("t", b"room again")

    run(main())
    assert written(cluster) == [b"v" * 2_000, b"room again"]


def test_a_serializer_that_waits_for_the_cluster_first_does_not_block_the_loop(cluster: FakeCluster) -> None:
    class Slow(Serializer):
        def __init__(self) -> None:
            self.goes_on = threading.Event()
            self.stored_in: list[str] = []

        def store(self) -> None:
            assert self.goes_on.wait(10)
            self.stored_in.append(threading.current_thread().name)

        def serialize(self, topic: str, value: Any) -> bytes | None:
            return str(value).encode()

    slow, here = Slow(), threading.current_thread().name

    async def main() -> None:
        async with producer(cluster, value_serializer=slow) as p, Ticking() as ticking:
            tasks = [asyncio.ensure_future(p.send("t", n)) for n in range(3)]
            await until(lambda: ticking.turns > 50)
            tasks[1].cancel()
            assert not tasks[0].done()
            slow.goes_on.set()
            await asyncio.wait(tasks)
            assert tasks[1].cancelled()

    run(main())
    assert sorted(written(cluster)) == [b"0", b"2"]
    assert len(slow.stored_in) == 1
    assert here not in slow.stored_in


# -- cancellation ----------------------------------------------------------------------------------------------------


def test_a_send_cancelled_while_it_waits_for_its_topic_takes_nothing(cluster: FakeCluster) -> None:
    async def main() -> None:
        async with producer(cluster) as p:
            names = (f"new-{n}" for n in range(100))

            def send() -> Any:
                name = next(names)
                asyncio.get_running_loop().call_soon(lambda: cluster.do(lambda: cluster.add_topic(name, 1)))
                return p.send(name, b"v")

            taken = [result async for cancelled, result in each_cancellation(send) if not cancelled]
            await p.flush()
            assert all([(await future).offset == 0 for future in taken])
            assert sum(len(written(cluster, name)) for name in cluster.topics) == len(taken) == 2

    run(main())


def test_a_send_cancelled_while_it_waits_for_room_takes_nothing_and_gives_its_turn_away(cluster: FakeCluster) -> None:
    async def main() -> None:
        async with producer(cluster, buffer_memory=2_000) as p:
            await p.send_and_wait("t", b"first")
            held: list[Seen] = []
            behind: list[asyncio.Task[Any]] = []

            def send() -> Any:
                nonlocal held
                held = hold_produces(cluster)
                p._inner.send("t", b"v" * 2_000)
                loop = asyncio.get_running_loop()
                loop.call_soon(lambda: behind.append(asyncio.ensure_future(p.send("t", b"behind"))))
                loop.call_later(0.02, lambda: let_go(cluster, held))
                return p.send("t", b"cancelled?")

            taken = 0
            async for cancelled, _ in each_cancellation(send):
                taken += not cancelled
                await behind[-1]
                await p.flush()
            assert len(behind) > 2
            values = written(cluster)
            assert values.count(b"v" * 2_000) == values.count(b"behind") == len(behind)
            assert values.count(b"cancelled?") == taken

    run(main())


def test_a_record_whose_delivery_is_no_longer_awaited_is_still_under_way(cluster: FakeCluster) -> None:
    async def main() -> None:
        async with producer(cluster, linger_ms=20) as p:
            await p.send_and_wait("t", b"first")
            runs = 0
            async for _ in each_cancellation(lambda: p.send_and_wait("t", b"v")):
                runs += 1
            await p.flush()
            assert len(written(cluster)) == 1 + runs
            assert runs > 2

            held = hold_produces(cluster)
            future = await p.send("t", b"again")
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(future, 0.01)
            assert not any(p._endings.waiting.values())
            await until(lambda: held)
            let_go(cluster, held)
            assert (await future).offset == 1 + runs

    run(main())


def test_a_cancelled_call_of_many_has_taken_what_comes_first_in_it(cluster: FakeCluster) -> None:
    values = [b"%d" % n for n in range(9_000)]

    async def main() -> list[int]:
        async with producer(cluster) as p:
            await p.send_and_wait("t", b"first")
            counts = []
            async for _ in each_cancellation(lambda: p.send_many("t", values)):
                await p.flush()
                new = written(cluster)[1 + sum(counts) :]
                assert new == values[: len(new)]
                counts.append(len(new))
            return counts

    counts = run(main())
    assert counts.count(9_000) == 2
    assert min(counts) < 9_000


def test_a_cancelled_flush_leaves_the_producer_as_it_was(cluster: FakeCluster) -> None:
    async def main() -> None:
        async with producer(cluster, linger_ms=20) as p:
            await p.send_and_wait("t", b"first")

            def flush() -> Any:
                p._inner.send("t", b"v")
                return p.flush()

            runs = [cancelled async for cancelled, _ in each_cancellation(flush)]
            assert True in runs
            assert p._inner._buffer._flushing == 0
            hold_produces(cluster)
            await p.send("t", b"held")
            with pytest.raises(errors.RequestTimedOut):
                await p.flush(timeout=0.05)
            cluster.script = lambda seen: DEFAULT
            cluster.kill(0)
            cluster.start(0)
            await p.flush()
            assert written(cluster) == [b"first", *[b"v"] * len(runs), b"held"]

    run(main())


# -- the end -------------------------------------------------------------------------------------------------------


def io_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == f"zmqueue-{CLIENT_ID}"]


def test_leaving_sends_everything_and_ends_the_thread(cluster: FakeCluster) -> None:
    async def main() -> None:
        async with producer(cluster, linger_ms=LONG_MS) as p:
            futures = [await p.send("t", b"v") for _ in range(10)]
        assert all(future.done() for future in futures)
        await until(lambda: io_threads() == [])
        await p.close()
        for call in (p.send("t", b"v"), p.send_many("t", [b"v"]), p.flush(), p.partitions_for("t")):
            with pytest.raises(errors.ClientClosed):
                await call

    run(main())
    assert len(written(cluster)) == 10


def test_leaving_by_cancellation_sends_everything_and_ends_the_thread(cluster: FakeCluster) -> None:
    async def main() -> None:
        inside = asyncio.Event()

        async def use() -> None:
            async with producer(cluster, linger_ms=LONG_MS) as p:
                await p.send("t", b"v")
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.ensure_future(use())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: io_threads() == [])

    run(main())
    assert written(cluster) == [b"v"]


def test_a_cancelled_close_ends_the_thread_and_whoever_waits_hears_of_it(cluster: FakeCluster) -> None:
    made: list[AsyncProducer] = []

    async def used() -> list[asyncio.Task[Any]]:
        """One that has a record under way, a task that waits for room and one that waits for a topic."""
        cluster.script = lambda seen: DEFAULT
        p = producer(cluster, max_block_ms=LONG_MS, buffer_memory=2_000)
        await p.send_and_wait("t", b"first")
        hold_produces(cluster)
        tasks = []
        for topic in ("t", "t", "nowhere"):
            tasks.append(asyncio.ensure_future(p.send_and_wait(topic, b"v" * 2_000)))
            await asyncio.sleep(0)
        made.append(p)
        return tasks

    async def main() -> None:
        waiting = await used()
        cancellations = 0
        async for cancelled, _ in each_cancellation(lambda: made[-1].close(timeout=0.02)):
            cancellations += cancelled
            ended = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(each) for each in ended] == [errors.ClientClosed] * 3
            await made[-1].close()
            await until(lambda: io_threads() == [])
            waiting = await used()
        assert cancellations >= 4
        await made[-1].close(timeout=0)
        await asyncio.gather(*waiting, return_exceptions=True)

    run(main())


def test_a_producer_belongs_to_the_loop_it_was_first_used_in(cluster: FakeCluster) -> None:
    p = producer(cluster)

    async def first() -> Any:
        return await p.send("t", b"v")

    future = run(first())

    async def second() -> None:
        for call in (p.send("t", b"v"), p.flush(), p.start(), p.close()):
            with pytest.raises(errors.IllegalState, match="another event loop"):
                await call
        if not future.done():
            with pytest.raises(errors.IllegalState, match="another event loop"):
                await future

    run(second())
    p._inner.close()


def test_a_producer_that_is_dropped_ends_its_thread(cluster: FakeCluster) -> None:
    async def main() -> None:
        p = producer(cluster)
        await p.send_and_wait("t", b"v")
        del p
        gc.collect()
        await until(lambda: io_threads() == [])

    run(main())
