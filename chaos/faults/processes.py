"""Processes that are killed, paused, stopped, or told the wrong time."""

from __future__ import annotations

import time

from chaos.faults.base import FaultBase, Hit, nothing
from chaos.workload import key

HOUR_S = 3_600
STROBES = 20
STROBE_S = 0.1


class ProcessFaults(FaultBase):
    def _kill(self, broker: int, text: str, keys: list[str]) -> Hit:
        self._begin(text, keys)
        self.cluster.kill(broker)
        return Hit(text, keys, lambda: self.cluster.start(broker))

    def kill_leader(self) -> Hit:
        leaders = self._leaders()
        broker = self._some_leader(leaders)
        led_raft = " (controller)" if self.cluster.controller() == broker else ""
        return self._kill(broker, f"kill leader {broker}{led_raft}", self._led_by(broker, leaders))

    def kill_controller(self) -> Hit:
        broker = self._controller()
        return self._kill(broker, f"kill controller {broker}", self._led_by(broker))

    def kill_follower(self) -> Hit:
        broker, keys = self._some_follower()
        return self._kill(broker, f"kill follower {broker}", keys)

    def kill_random(self) -> Hit:
        broker = self._some_broker()
        return self._kill(broker, f"kill {broker}", self._led_by(broker))

    def kill_both(self) -> Hit:
        """Both replicas of a partition. The one that died first is back first, and must not lead."""
        topic = self.rng.choice(self.topics)
        partition = self.rng.choice(self.cluster.describe(topic).partitions)
        name = key(topic, partition.partition)
        first, last = self.rng.sample(partition.replicas, 2)
        text = f"kill {first}, then {last}: all of {name}"
        self._begin(text, [])
        self.cluster.kill(first)
        self._await_isr(topic, partition.partition, [last])
        time.sleep(0.5)  # records that only the last one has
        self.cluster.kill(last)

        def undo() -> None:
            self.cluster.start(first)
            time.sleep(2.0)
            self._begin(f"{last}, the last of {name}, is back", [name])
            self.cluster.start(last)

        return Hit(text, [], undo)

    def _await_isr(self, topic: str, partition: int, isr: list[int], timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.cluster.describe(topic).partitions[partition].isr != isr and time.monotonic() < deadline:
            time.sleep(0.05)

    def kill_all(self) -> Hit:
        everyone = self._all_keys()
        self._begin("kill all", [])
        self.cluster.kill(*range(self.cluster.brokers))
        return Hit("kill all", everyone, lambda: self._start_all(everyone))

    def pause_leader(self) -> Hit:
        leaders = self._leaders()
        broker = self._some_leader(leaders)
        led_raft = " (controller)" if self.cluster.controller() == broker else ""
        return self._pause(broker, f"pause leader {broker}{led_raft}", self._led_by(broker, leaders))

    def pause_controller(self) -> Hit:
        broker = self._controller()
        return self._pause(broker, f"pause controller {broker}", self._led_by(broker))

    def _pause(self, broker: int, text: str, keys: list[str]) -> Hit:
        self._begin(text, keys)
        self.cluster.pause(broker)
        return Hit(text, keys, lambda: self.cluster.resume(broker))

    def stop_random(self) -> Hit:
        broker = self._some_broker()
        text, keys = f"stop {broker}", self._led_by(broker)
        self._begin(text, keys)
        self.cluster.stop(broker)
        return Hit(text, keys, lambda: self.cluster.start(broker))

    def rolling_restart(self) -> Hit:
        """Each broker in turn, when all replicas are in sync again."""
        for broker in range(self.cluster.brokers):
            self._begin(f"restart {broker}", self._all_keys())
            self.cluster.stop(broker)
            self.cluster.start(broker)
            self.cluster.await_whole(self.topics)
        return Hit("rolling restart", [], nothing)

    # -- clocks (needs libfaketime) --------------------------------------------------------------------------------

    def clock_jump(self) -> Hit:
        """An hour forwards or back, on the wall of one broker."""
        broker = self._some_leader()
        offset_s = self.rng.choice([HOUR_S, -HOUR_S])
        text, keys = f"clock of {broker} {offset_s:+d} s", self._led_by(broker)
        self._begin(text, keys)
        self.cluster.set_clock(broker, offset_s)
        return Hit(text, keys, lambda: self.cluster.set_clock(broker, 0))

    def clock_strobe(self) -> Hit:
        """An hour forwards, two back, and so on."""
        broker = self._some_leader()
        text, keys = f"clock of {broker} strobes", self._led_by(broker)
        self._begin(text, keys)
        for nth in range(STROBES):
            self.cluster.set_clock(broker, HOUR_S if nth % 2 else -HOUR_S)
            time.sleep(STROBE_S)
        return Hit(text, keys, lambda: self.cluster.set_clock(broker, 0))
