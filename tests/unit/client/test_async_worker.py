"""One thread that does one call at a time for an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from unit.client.event_loop import run

from zmqueue import errors
from zmqueue.client.aio_gate import Gate
from zmqueue.client.aio_worker import Worker


class Client:
    """A client that blocks: its poll waits for something in `there`, or to be interrupted."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.there: list[Any] = []
        self.interrupted = False
        self.polls = 0
        self.log: list[Any] = []

    def put(self, item: Any) -> None:
        with self.changed:
            self.there.append(item)
            self.changed.notify_all()

    def interrupt(self) -> None:
        with self.changed:
            self.interrupted = True
            self.changed.notify_all()

    def poll(self, timeout_s: float) -> Any:
        with self.changed:
            self.polls += 1
            self.changed.wait_for(lambda: self.there or self.interrupted, min(timeout_s, 30))
            if self.interrupted:
                self.interrupted = False
                raise errors.WakeupError
            return self.there.pop(0) if self.there else None

    def undo(self, item: Any) -> None:
        self.there.insert(0, item)


@asynccontextmanager
async def working() -> AsyncIterator[tuple[Client, Worker]]:
    client = Client()
    worker = Worker(Gate("client"), "test", client.interrupt)
    try:
        yield client, worker
    finally:
        worker.stop()


def poll(client: Client, worker: Worker, timeout_s: float = 30) -> Any:
    return asyncio.ensure_future(worker.result(worker.poll(client.poll, timeout_s, client.undo)))


def call(worker: Worker, function: Any) -> Any:
    return worker.result(worker.call(function))


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0.001)


def test_a_result_that_nobody_took_is_undone_before_anything_else_happens() -> None:
    async def main() -> None:
        async with working() as (client, worker):
            job = worker.poll(client.poll, 30, client.undo)
            task = asyncio.ensure_future(worker.result(job))
            behind = []

            def when_it_is_there(_: Any) -> None:
                """Before the task has run."""
                task.cancel()
                behind.append(worker.call(lambda: list(client.there)))

            job.future.add_done_callback(when_it_is_there)
            await turns(1)
            client.put("record")
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await worker.result(behind[0]) == ["record"]
            assert await poll(client, worker) == "record"
            assert worker.idle

    run(main())


def test_a_call_interrupts_a_poll_that_goes_on_in_its_turn() -> None:
    async def main() -> None:
        async with working() as (client, worker):
            first, second = poll(client, worker), poll(client, worker)
            for n in range(5):
                assert await call(worker, lambda n=n: n) == n
            client.put("one")
            client.put("two")
            assert [await first, await second] == ["one", "two"]

    run(main())


def test_an_interruption_that_comes_too_late_ends_no_other_call() -> None:
    async def main() -> None:
        async with working() as (client, worker):
            client.put("record")
            client.interrupt()
            assert await poll(client, worker) == "record"
            client.interrupt()
            assert await call(worker, lambda: client.poll(0)) is None

    run(main())


def test_polls_do_not_chase_each_other() -> None:
    async def main() -> None:
        async with working() as (client, worker):
            polls = [poll(client, worker) for _ in range(10)]
            await turns()
            assert client.polls == 1
            for n in range(10):
                client.put(n)
            assert await asyncio.gather(*polls) == list(range(10))
            assert client.polls == 10

    run(main())


def test_a_listener_runs_in_the_loop_and_may_call_but_not_poll() -> None:
    async def main() -> None:
        async with working() as (client, worker):
            loop_thread = threading.current_thread()

            async def on_revoked(partitions: list[int]) -> None:
                assert threading.current_thread() is loop_thread
                client.log.append(("revoked", partitions))
                client.log.append(await call(worker, lambda: "committed"))
                with pytest.raises(errors.IllegalState, match="cannot poll"):
                    worker.poll(client.poll, 30)

            def poll_with_rebalance(_: float) -> str:
                worker.call_in_loop(on_revoked, [1, 2])
                worker.call_in_loop(client.log.append, "a plain function")
                return "record"

            assert await worker.result(worker.poll(poll_with_rebalance, 30)) == "record"
            assert client.log == [("revoked", [1, 2]), "committed", "a plain function"]
            assert worker.idle

    run(main())


def test_what_a_listener_raises_is_raised_by_the_poll() -> None:
    async def main() -> None:
        async with working() as (_, worker):

            async def fail() -> None:
                raise KeyError("partition")

            async def end() -> None:
                raise asyncio.CancelledError

            with pytest.raises(KeyError):
                await worker.result(worker.poll(lambda _: worker.call_in_loop(fail), 30))
            with pytest.raises(errors.IllegalState, match="cancelled"):
                await worker.result(worker.poll(lambda _: worker.call_in_loop(end), 30))
            assert await call(worker, lambda: "goes on") == "goes on"

    run(main())


def test_other_tasks_calls_are_served_while_a_listener_runs_and_their_polls_wait() -> None:
    async def main() -> None:
        async with working() as (client, worker):
            listens, goes_on = asyncio.Event(), asyncio.Event()

            async def listener() -> None:
                listens.set()
                await goes_on.wait()

            rebalancing = asyncio.ensure_future(
                worker.result(worker.poll(lambda _: worker.call_in_loop(listener), 30)),
            )
            await listens.wait()
            waiting = poll(client, worker)
            client.put("record")
            assert await call(worker, lambda: "served") == "served"
            assert not waiting.done()
            goes_on.set()
            await rebalancing
            assert await waiting == "record"

    run(main())


def test_the_last_call_ends_the_thread_and_all_that_waits() -> None:
    async def main() -> None:
        async with working() as (client, worker):
            running, behind = poll(client, worker), poll(client, worker)
            await turns(1)
            await worker.close(lambda: client.log.append("closed")).future
            for task in (running, behind):
                with pytest.raises(errors.ClientClosed):
                    await task
            with pytest.raises(errors.ClientClosed):
                worker.call(lambda: None)
            assert client.log == ["closed"]
            worker._thread.join(10)
            assert not worker._thread.is_alive()

    run(main())


def test_closing_waits_for_a_listener_that_runs_and_serves_it() -> None:
    async def main() -> None:
        async with working() as (client, worker):
            listens, goes_on = asyncio.Event(), asyncio.Event()

            async def listener() -> None:
                listens.set()
                await goes_on.wait()
                with pytest.raises(errors.IllegalState, match="cannot close"):
                    worker.close(lambda: None)
                client.log.append(await call(worker, lambda: "committed"))

            async def last_listener() -> None:
                client.log.append(await call(worker, lambda: "committed at the end"))

            def close() -> None:
                worker.call_in_loop(last_listener)
                client.log.append("closed")

            rebalancing = asyncio.ensure_future(worker.result(worker.poll(lambda _: worker.call_in_loop(listener), 30)))
            await listens.wait()
            rebalancing.cancel()
            closing = worker.close(close)
            with pytest.raises(errors.ClientClosed):
                worker.call(lambda: None)
            await turns()
            goes_on.set()
            await worker.result(closing)
            assert client.log == ["committed", "committed at the end", "closed"]

    run(main())


def test_a_listener_that_a_call_sets_off_may_outlast_the_one_it_was_called_in() -> None:
    async def main() -> None:
        async with working() as (client, worker):
            outer_goes_on, inner_goes_on, inner_listens = asyncio.Event(), asyncio.Event(), asyncio.Event()

            async def inner() -> None:
                inner_listens.set()
                await inner_goes_on.wait()
                client.log.append("inner")

            async def outer() -> None:
                await outer_goes_on.wait()
                client.log.append("outer")

            rebalancing = asyncio.ensure_future(worker.result(worker.poll(lambda _: worker.call_in_loop(outer), 30)))
            await turns()
            calling = asyncio.ensure_future(call(worker, lambda: worker.call_in_loop(inner)))
            await inner_listens.wait()
            outer_goes_on.set()
            await turns()
            inner_goes_on.set()
            await asyncio.gather(rebalancing, calling)
            assert client.log == ["outer", "inner"]
            assert worker.idle

    run(main())
