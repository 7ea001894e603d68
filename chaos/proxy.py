"""Links between brokers that can be cut in either direction, without network namespaces and without root.

Every broker gets a `cluster.json` of its own in which each peer stands at a port of this proxy, one per ordered pair
and kind of link. The proxy forwards to the peer's real port. A cut direction forwards nothing: connections stay open
and stall, new ones are accepted and lead nowhere, as with packets that are dropped. Healing lets what was held go on.

Clients know the real ports, so they reach both sides of a partition; or, where a run wants to cut them off as well,
every broker advertises a port of the proxy for its client port. One thread with one event loop carries it all.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterable
from typing import NamedTuple

_CHUNK_BYTES = 1 << 16
_START_S_MAX = 10.0

CLIENTS = -1  # as the source of a route: all of them


class Route(NamedTuple):
    """Broker `source` connects to `listen` and reaches broker `target` at `port`."""

    source: int
    target: int
    listen: int
    port: int


class Proxy:
    def __init__(self, host: str, routes: Iterable[Route]) -> None:
        self._host = host
        self._routes = list(routes)
        self._loop = asyncio.new_event_loop()
        self._gates: dict[tuple[int, int], asyncio.Event] = {}
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(_START_S_MAX)

    def close(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_START_S_MAX)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_START_S_MAX)
            self._loop.close()

    def cut(self, pairs: Iterable[tuple[int, int]]) -> None:
        """From now on nothing gets from the first to the second broker of each pair."""
        for pair in pairs:
            self._loop.call_soon_threadsafe(self._gates[pair].clear)

    def heal(self, pairs: Iterable[tuple[int, int]] | None = None) -> None:
        """These pairs, or all."""
        for pair in self._gates if pairs is None else pairs:
            self._loop.call_soon_threadsafe(self._gates[pair].set)

    async def _listen(self) -> None:
        for route in self._routes:
            for pair in ((route.source, route.target), (route.target, route.source)):
                if pair not in self._gates:
                    self._gates[pair] = asyncio.Event()
                    self._gates[pair].set()
            server = await asyncio.start_server(self._serve(route), self._host, route.listen)
            self._servers.append(server)

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _serve(self, route: Route):  # type: ignore[no-untyped-def]
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                with contextlib.suppress(OSError, asyncio.CancelledError):
                    await self._carry(route, reader, writer)
            finally:
                writer.close()
                self._tasks.discard(task)

        return serve

    async def _carry(self, route: Route, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = self._gates[route.source, route.target], self._gates[route.target, route.source]
        await there.wait()
        await back.wait()
        far_reader, far_writer = await asyncio.open_connection(self._host, route.port)
        pipes = [
            asyncio.ensure_future(_pipe(reader, far_writer, there)),
            asyncio.ensure_future(_pipe(far_reader, writer, back)),
        ]
        try:
            await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pipe in pipes:
                pipe.cancel()
            await asyncio.gather(*pipes, return_exceptions=True)
            far_writer.close()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
    """Ends when its connection does; an end, too, gets through only while the gate is open."""
    while data := await reader.read(_CHUNK_BYTES):
        await gate.wait()
        writer.write(data)
        await writer.drain()
    await gate.wait()
