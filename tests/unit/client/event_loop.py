"""Running coroutines in tests: with a deadline, and with a cancellation at each place where they can be cancelled."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")
DEADLINE_S = 60


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


class CancelledAt:
    """Awaits a coroutine, and has its task cancelled when it is suspended for the `step`th time.

    Early: while it waits. Late: what it waited for has come, and before it can see that it is cancelled.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], step: int, *, late: bool) -> None:
        self._coroutine, self._step, self._late = coroutine, step, late
        self.reached = False

    def __await__(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        step, send, value = 0, self._coroutine.send, None
        while True:
            try:
                awaited = send(value)  # type: ignore[arg-type]
            except StopIteration as stop:
                return stop.value
            if step == self._step:
                self.reached = True
                if self._late and awaited is not None:
                    awaited.add_done_callback(lambda _: task.cancel())
                else:
                    asyncio.get_running_loop().call_soon(task.cancel)
            step += 1
            try:
                value = yield awaited
                send = self._coroutine.send
            except BaseException as error:
                value, send = error, self._coroutine.throw  # type: ignore[assignment]


async def each_cancellation(operation: Callable[[], Coroutine[Any, Any, Any]]) -> AsyncIterator[tuple[bool, Any]]:
    """Start it again and again, and cancel it at its first suspension, its second …, early and late.

    Gives (whether it was cancelled, its result) for each run, until one has come to its end uncancelled.
    """
    for late in (False, True):
        for step in itertools.count():
            cancelling = CancelledAt(operation(), step, late=late)

            async def alone(cancelling: CancelledAt = cancelling) -> Any:
                return await cancelling

            task = asyncio.ensure_future(alone())
            await asyncio.wait([task])
            yield task.cancelled(), None if task.cancelled() else task.result()
            if not cancelling.reached:
                break


async def until(ready: Callable[[], Any]) -> None:
    """The loop runs on until it is true."""
    while not ready():
        await asyncio.sleep(0.001)


class Ticking:
    """Counts turns of the loop while something else goes on in it."""

    def __init__(self) -> None:
        self.turns = 0

    async def __aenter__(self) -> Ticking:
        self._task = asyncio.ensure_future(self._run())
        return self

    async def _run(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0)

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
