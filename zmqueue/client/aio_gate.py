"""From a client's threads into the one event loop that the client belongs to.

A client belongs to the loop in which it was first used (`start`, `async with`, or any call that is awaited): futures
and waiting tasks live there, and a loop is not safe to touch from elsewhere. Using it in another raises IllegalState.

What threads want run in the loop they `tell` the gate. However much they tell, the loop is woken once until it has
come to it: waking a loop costs a system call and a turn, and a busy producer has thousands of things to tell a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from zmqueue.errors import IllegalState

T = TypeVar("T")


class Gate:
    def __init__(self, client: str) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.wakes = 0
        self._client = client
        self._told: deque[Callable[[], None]] = deque()
        self._woken = False

    def enter(self) -> asyncio.AbstractEventLoop:
        """The client's loop, in which the caller must be running. The first to enter says which that is."""
        loop = asyncio.get_running_loop()
        if loop is not self.loop:
            if self.loop is not None:
                raise IllegalState(f"this {self._client} belongs to another event loop, the one it was first used in")
            self.loop = loop
        return loop

    def tell(self, action: Callable[[], None]) -> None:
        """Any thread: run in the loop, soon. Dropped when the loop is closed, for nobody waits there any more."""
        assert self.loop is not None
        self._told.append(action)
        # Set after the action was added and cleared before actions are taken, so none is left behind.
        if not self._woken:
            self._woken = True
            self.wakes += 1
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        assert self.loop is not None
        self._woken = False
        for _ in range(len(self._told)):
            try:
                self._told.popleft()()
            except Exception as error:
                self.loop.call_exception_handler(
                    {"message": f"a callback of {self._client} failed", "exception": error}
                )

    def in_thread(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run something that blocks, in a thread of its own. It runs to its end even if nobody waits for it any more.

        Not the loop's executor: that may be full of the application's work, which may be waiting for this.
        """
        future: asyncio.Future[T] = self.enter().create_future()

        def end(result: T | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            try:
                result = function()
            except BaseException as error:
                self.tell(lambda error=error: end(None, error))  # type: ignore[misc]
            else:
                self.tell(lambda: end(result, None))

        threading.Thread(target=run, name=f"zmqueue-{self._client}", daemon=True).start()
        return future
