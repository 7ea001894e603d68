"""What can be done to a cluster. Each fault begins, lasts, and is taken back; the runner decides when.

A fault is a method named as scenarios name it. It does its harm and returns a `Hit`: what was done, the keys it hit
(for availability), and how to take it back. Everything runs in the main thread, one fault after the other; two may
last at the same time where the scenario says so.

Disks are damaged only while every replica is in sync, and nobody else is touched until all are again. What one replica
alone has acknowledged is worth that replica's disk, and this is how sole copies are left alone.
"""

from __future__ import annotations

from chaos.faults.base import HARNESS, Hit, Plan, Window
from chaos.faults.disks import DiskFaults
from chaos.faults.links import LinkFaults
from chaos.faults.members import MemberFaults
from chaos.faults.pressure import PressureFaults
from chaos.faults.processes import ProcessFaults

__all__ = ["HARNESS", "Faults", "Hit", "Plan", "Window", "is_fault"]


class Faults(ProcessFaults, DiskFaults, LinkFaults, PressureFaults, MemberFaults):
    def heal(self) -> None:
        """Everything runs and nothing is slow, full, cut or off its time."""
        cluster = self.cluster
        for broker in list(cluster.paused):
            cluster.resume(broker)
        if cluster.proxy is not None:
            cluster.proxy.heal()
        for broker in range(cluster.brokers):
            cluster.delay_fsync(broker, self._plan.fsync_delay_ms)
            cluster.set_clock(broker, 0)
            for filler in self._fillers(broker):
                filler.unlink(missing_ok=True)
        cluster.revive()
        cluster.start_all()


def is_fault(name: str) -> bool:
    return not name.startswith("_") and name != "heal" and callable(getattr(Faults, name, None))
