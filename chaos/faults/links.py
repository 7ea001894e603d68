"""Links that carry nothing: between brokers, and between clients and one broker. Needs the proxy."""

from __future__ import annotations

import time

from chaos.faults.base import FaultBase, Hit
from chaos.proxy import CLIENTS


class LinkFaults(FaultBase):
    def _cut_links(self, text: str, pairs: list[tuple[int, int]], keys: list[str]) -> Hit:
        proxy = self.cluster.proxy
        assert proxy is not None, "partitions need `proxied = true`"
        self._begin(text, keys)
        proxy.cut(pairs)
        return Hit(text, keys, lambda: proxy.heal(pairs))

    def _between(self, some: list[int], others: list[int]) -> list[tuple[int, int]]:
        return [pair for a in some for b in others for pair in ((a, b), (b, a))]

    def isolate_leader(self) -> Hit:
        broker = self._some_leader()
        pairs = self._between([broker], self._others(broker))
        led_raft = " (controller)" if self.cluster.controller() == broker else ""
        return self._cut_links(f"isolate leader {broker}{led_raft}", pairs, self._led_by(broker))

    def isolate_controller(self) -> Hit:
        broker = self._controller()
        pairs = self._between([broker], self._others(broker))
        return self._cut_links(f"isolate controller {broker}", pairs, self._led_by(broker))

    def split(self) -> Hit:
        """Two against the rest. Partitions with both replicas among the two wait for the heal."""
        few = self.rng.sample(range(self.cluster.brokers), 2)
        many = [broker for broker in range(self.cluster.brokers) if broker not in few]
        return self._cut_links(f"split {sorted(few)} from {many}", self._between(few, many), [])

    def bridge(self) -> Hit:
        """Two pairs that see each other only through the fifth."""
        one, two, three, four, middle = self.rng.sample(range(self.cluster.brokers), 5)
        return self._cut_links(f"bridge over {middle}", self._between([one, two], [three, four]), [])

    def one_way(self) -> Hit:
        """A leader is heard by nobody, or hears nobody."""
        broker = self._some_leader()
        led_raft = " (controller)" if self.cluster.controller() == broker else ""
        if self.rng.random() < 0.5:
            text, pairs = f"nobody hears {broker}{led_raft}", [(broker, other) for other in self._others(broker)]
        else:
            text, pairs = f"{broker}{led_raft} hears nobody", [(other, broker) for other in self._others(broker)]
        return self._cut_links(text, pairs, self._led_by(broker))

    def flap(self) -> Hit:
        """A leader is cut off and back every second."""
        broker = self._some_leader()
        pairs = self._between([broker], self._others(broker))
        hit = self._cut_links(f"flap {broker}", pairs, [])
        for _ in range(2):
            time.sleep(1.0)
            hit.undo()
            time.sleep(1.0)
            assert self.cluster.proxy is not None
            self.cluster.proxy.cut(pairs)
        return hit

    def cut_off_clients(self) -> Hit:
        """From a leader alone: it goes on leading, since all brokers see it, and no client reaches it."""
        broker = self._some_leader()
        keys = self._led_by(broker)
        hit = self._cut_links(f"clients cut off from {broker}", self._between([CLIENTS], [broker]), [])

        def undo() -> None:
            self._begin(f"clients reach {broker} again", keys)
            hit.undo()

        return hit._replace(undo=undo)
