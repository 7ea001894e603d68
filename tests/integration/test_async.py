"""The clients for asyncio on a real cluster: many records, cancellations all the time, a broker that dies meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from zmqueue import AsyncConsumer, AsyncProducer, ConsumerRebalanceListener, TopicPartition
from zmqueue.testing import Cluster

PARTITIONS = 10
RECORDS = 100_000
DEADLINE_S = 90


def run(coroutine: Coroutine[Any, Any, Any]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


def clients(cluster: Cluster, topic: str, **settings: Any) -> tuple[AsyncProducer, AsyncConsumer]:
    cluster.command("topic", "create", topic, "-p", str(PARTITIONS))
    servers = cluster.bootstrap_servers
    consumer = AsyncConsumer(topic, bootstrap_servers=servers, auto_offset_reset="earliest", **settings)
    return AsyncProducer(bootstrap_servers=servers), consumer


async def ends(consumer: AsyncConsumer, topic: str) -> int:
    return sum((await consumer.end_offsets([TopicPartition(topic, n) for n in range(PARTITIONS)])).values())


def test_a_hundred_thousand_records_go_through_in_their_order(cluster: Cluster) -> None:
    async def main() -> None:
        producer, consumer = clients(cluster, "many")
        async with producer, consumer:
            half = RECORDS // 2
            # By call, by tasks that wait, and in bulk; to a partition by number.
            for n in range(half // 2):
                await producer.send("many", b"%d" % n, partition=n % PARTITIONS)
            for at in range(half // 2, half, 1_000):
                sends = [producer.send_and_wait("many", b"%d" % n, partition=n % 10) for n in range(at, at + 1_000)]
                await asyncio.gather(*sends)
            values = [b"%d" % n for n in range(half, RECORDS)]
            bulks = [await producer.send_many("many", values[n::10], partition=n) for n in range(PARTITIONS)]
            assert sum([len(await bulk) for bulk in bulks]) == half
            read: list[list[int]] = [[] for _ in range(PARTITIONS)]
            count = 0
            async for record in consumer:
                assert record.offset == len(read[record.partition])
                read[record.partition].append(int(record.value))
                count += 1
                if count == RECORDS:
                    break
            assert read == [list(range(n, RECORDS, PARTITIONS)) for n in range(PARTITIONS)]

    run(main())


@pytest.mark.parametrize("seed", range(2))
def test_cancellations_all_the_time_lose_nothing_and_double_nothing(cluster: Cluster, seed: int) -> None:
    chance = random.Random(seed)
    topic = f"storm-{seed}"

    async def main() -> None:
        producer, consumer = clients(cluster, topic, max_poll_records=20)
        numbers = itertools.count()
        taken: set[bytes] = set()
        acknowledged: set[bytes] = set()
        read: Counter[bytes] = Counter()

        async def send() -> None:
            value = b"%d" % next(numbers)
            future = await producer.send(topic, value)
            taken.add(value)
            await future
            acknowledged.add(value)

        async def send_many() -> None:
            values = [b"%d" % next(numbers) for _ in range(30)]
            future = await producer.send_many(topic, values)
            taken.update(values)
            await future
            acknowledged.update(values)

        async def getone() -> None:
            read[(await consumer.getone()).value] += 1

        async def poll() -> None:
            for records in (await consumer.poll(20)).values():
                read.update(record.value for record in records)

        async def stormy(action: Callable[[], Coroutine[Any, Any, None]]) -> None:
            task = asyncio.ensure_future(action())
            await asyncio.wait([task], timeout=chance.choice([0, 0, 0.001, 0.005, 0.05]))
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()

        async with producer, consumer:
            actions = [send, send_many, getone, poll, producer.flush]
            for _ in range(600):
                await asyncio.gather(*(stormy(chance.choice(actions)) for _ in range(4)))
            await producer.flush()
            there = await ends(consumer, topic)
            while sum(read.values()) < there:
                await getone()
            assert acknowledged <= taken == set(read)
            assert there == len(read)
            assert set(read.values()) == {1}

    run(main())


def test_a_broker_killed_in_the_middle_loses_no_acknowledged_record(cluster: Cluster) -> None:
    async def main() -> None:
        producer, consumer = clients(cluster, "kill")
        acknowledged: set[bytes] = set()
        read: Counter[bytes] = Counter()

        async def send(name: int) -> None:
            while len(acknowledged) < 15_000:
                value = b"%d-%d" % (name, len(acknowledged))
                await producer.send_and_wait("kill", value)
                acknowledged.add(value)

        async def consume() -> None:
            async for record in consumer:
                read[record.value] += 1

        async def until(count: int) -> None:
            while len(acknowledged) < count:
                await asyncio.sleep(0.02)

        async with producer, consumer:
            reading = asyncio.ensure_future(consume())
            senders = [asyncio.ensure_future(send(n)) for n in range(50)]
            await until(5_000)
            await asyncio.to_thread(cluster.kill, 1)
            await until(10_000)
            await asyncio.to_thread(cluster.start, 1)
            await asyncio.gather(*senders)
            while sum(read.values()) < len(acknowledged):
                await asyncio.sleep(0.02)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
            assert read == Counter(acknowledged)

    run(main())
    cluster.wait_healthy()


def test_members_come_and_go_and_are_cancelled_and_every_record_is_read(cluster: Cluster) -> None:
    """Each member commits what it gives back, so records come twice only where a cancellation hit the commit."""
    records, chance = 20_000, random.Random(1)

    class Commits(ConsumerRebalanceListener):
        def __init__(self, consumer: AsyncConsumer) -> None:
            self.consumer = consumer

        async def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:  # type: ignore[override]
            await self.consumer.commit()

    async def main() -> None:
        producer, _ = clients(cluster, "group")
        read: Counter[bytes] = Counter()

        async def member() -> None:
            options: dict[str, Any] = {"group_id": "members", "auto_offset_reset": "earliest", "max_poll_records": 50}
            async with AsyncConsumer(
                bootstrap_servers=cluster.bootstrap_servers, enable_auto_commit=False, **options
            ) as consumer:
                await consumer.subscribe(["group"], listener=Commits(consumer))
                async for record in consumer:
                    read[record.value] += 1

        async with producer:
            await (
                await producer.send_many(
                    "group", [b"%d" % n for n in range(records)], [b"%d" % n for n in range(records)]
                )
            )
            members = [asyncio.ensure_future(member()) for _ in range(3)]
            for _ in range(12):
                await asyncio.sleep(chance.choice([0.05, 0.2, 0.5]))
                leaver = members.pop(0)
                leaver.cancel()
                await asyncio.wait([leaver])
                assert leaver.cancelled()
                members.append(asyncio.ensure_future(member()))
            while len(read) < records:
                await asyncio.sleep(0.05)
            for each in members:
                each.cancel()
            await asyncio.wait(members)
            assert set(read) == {b"%d" % n for n in range(records)}
            assert set(read.values()) == {1}

    run(main())
