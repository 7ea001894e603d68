"""Messages between brokers: lost, doubled, late, out of order. What one publishes to one other stays in order.

A message to a broker that has been restarted meanwhile reaches the new process, as with queued sockets; an answer
reaches only the process that asked. A cut between two brokers loses most of what is sent across it; some of it arrives
long after, as from a queue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.sim.broker import SimBroker
    from tests.sim.world import World


class Network:
    def __init__(self, world: World, drop: float, duplicate: float, straggle: float) -> None:
        self._world = world
        self._random = world.random
        self.drop = drop
        self.duplicate = duplicate
        self.straggle = straggle
        self.cuts: dict[tuple[int, int], int] = {}  # how many faults cut this pair
        self._published: dict[tuple[int, int], int] = {}

    def connected(self, a: int, b: int) -> bool:
        return not self.cuts or not self.cuts.get((a, b) if a < b else (b, a))

    def cut(self, side: set[int], brokers: int, by: int) -> None:
        for a in range(brokers):
            for b in range(a + 1, brokers):
                if (a in side) != (b in side):
                    self.cuts[a, b] = self.cuts.get((a, b), 0) + by
                    if not self.cuts[a, b]:
                        del self.cuts[a, b]

    def _delay_ms(self, source: int, target: int) -> int:
        """-1: lost."""
        random = self._random
        if self.drop and random() < self.drop:
            return -1
        delay_ms = 1 + int(random() * 3)
        if self.straggle and random() < self.straggle:
            delay_ms += int(random() * 500)
        if self.cuts and not self.connected(source, target):
            return delay_ms + 100 + int(random() * 1_500) if random() < 0.1 else -1
        return delay_ms

    def send(self, source: SimBroker, target: int, handle: Callable[..., None], *args: Any) -> None:
        self._deliver(source.id, target, None, handle, args)

    def reply(self, source: SimBroker, address: tuple[int, int], handle: Callable[..., None], *args: Any) -> None:
        self._deliver(source.id, address[0], address[1], handle, args)

    def _deliver(
        self, source: int, target: int, life: int | None, handle: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        world = self._world
        delay_ms = self._delay_ms(source, target)
        broker = world.brokers[target]
        args = (broker, *args)
        if delay_ms >= 0:
            world.at(delay_ms, broker, life, handle, args)
        if self.duplicate and self._random() < self.duplicate:
            world.at(1 + int(self._random() * 400), broker, life, handle, args)

    def publish(self, source: SimBroker, target: int, handle: Callable[..., None], *args: Any) -> None:
        world = self._world
        delay_ms = self._delay_ms(source.id, target)
        if delay_ms < 0:
            return
        broker = world.brokers[target]
        due_ms = max(world.now + delay_ms, self._published.get((source.id, target), 0))
        self._published[source.id, target] = due_ms
        world.at(due_ms - world.now, broker, broker.life, handle, (broker, *args))
