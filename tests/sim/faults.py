"""What goes wrong, and how much of it is allowed at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.disk import Folder
from tests.sim.plan import Fault
from zmqueue.core import commands as c
from zmqueue.model import NO_BROKER

if TYPE_CHECKING:
    from tests.sim.broker import SimBroker
    from tests.sim.world import World


class Faults:
    def __init__(self, world: World) -> None:
        self._world = world
        self._ended = False
        self._copies: dict[int, Folder] = {}
        self.injected = 0

    def inject(self, fault: Fault) -> None:
        if self._ended:
            return
        world = self._world
        broker = world.brokers[fault.broker]
        kind = fault.kind
        if kind.endswith("_leader"):
            kind = kind.removesuffix("_leader")
            led = [p.leader for _, _, p in world.raft.truth.all_partitions() if p.leader != NO_BROKER]
            if led:
                broker = world.brokers[led[fault.detail % len(led)]]
        if getattr(self, f"_{kind}")(broker, fault):
            self.injected += 1
            world.note(broker, f"fault {kind}", f"for {fault.for_ms} ms")

    def end(self) -> None:
        """Everything that goes wrong stops going wrong."""
        self._ended = True
        world = self._world
        world.network.cuts.clear()
        world.raft.stale.clear()
        world.raft.held_until.clear()
        world.raft.mute_until.clear()
        for broker in world.brokers:
            broker.disk.full = broker.disk.full_once = broker.disk.broken = broker.slow = False
            broker.disk.crash_in = 0
            if broker.paused:
                self._resume(broker, broker.life)

    def _later(self, delay_ms: int, undo: object, *args: object) -> None:
        self._world.at(delay_ms, None, None, undo, args)  # type: ignore[arg-type]

    # -- the budget

    def _may_lose(self, broker: SimBroker, *, memory_only: bool = False) -> bool:
        """Whether every partition that this broker holds has another complete replica, in a running process."""
        world = self._world
        truth = world.raft.truth
        for key, topic, partition in truth.all_partitions():
            complete = [*partition.isr, *partition.elr]
            if broker.id not in complete or (memory_only and topic.storage != "memory"):
                continue
            for member in complete:
                other = world.brokers[member]
                registered = other.alive and truth.brokers[member].incarnation == other.incarnation
                doomed = other.leaving or other.disk.crash_in or other.disk.broken
                if other is not broker and registered and not doomed and key in other.mirrors:
                    break
            else:
                return False
        return True

    def _may_die(self, broker: SimBroker, power: bool) -> bool:
        forgets = power and broker.config.log.fsync != "always"
        return self._may_lose(broker, memory_only=not forgets)

    # -- processes and machines

    def _kill(self, broker: SimBroker, fault: Fault, power: bool = False) -> bool:
        if not broker.alive or not self._may_die(broker, power):
            return False
        self._world.died(broker, power, fault.for_ms)
        return True

    def _power(self, broker: SimBroker, fault: Fault) -> bool:
        return self._kill(broker, fault, power=True)

    def _power_all(self, broker: SimBroker, fault: Fault) -> bool:
        if broker.config.log.fsync != "always" or any(t.storage == "memory" for t in self._world.plan.topics):
            return False
        for other in self._world.brokers:
            if other.alive:
                self._world.died(other, True, fault.for_ms + int(self._world.random() * 300))
        return True

    def _crash(self, broker: SimBroker, fault: Fault) -> bool:
        power = fault.detail % 2 == 0
        if not broker.alive or not self._may_die(broker, power):
            return False
        broker.power_after_crash = power
        broker.disk.crash_in = 1 + fault.detail // 2 % 12
        self._later(fault.for_ms, self._no_crash, broker)
        return True

    def _no_crash(self, broker: SimBroker) -> None:
        broker.disk.crash_in = 0

    def _pause(self, broker: SimBroker, fault: Fault) -> bool:
        if not broker.alive or broker.paused:
            return False
        broker.paused = True
        self._later(fault.for_ms, self._resume, broker, broker.life)
        return True

    def _resume(self, broker: SimBroker, life: int) -> None:
        if not broker.paused or broker.life != life:
            return
        broker.paused = False
        self._world.note(broker, "resumed", len(broker.backlog))
        while broker.backlog and not broker.paused:
            broker.turn(*broker.backlog.popleft())

    def _leave(self, broker: SimBroker, fault: Fault) -> bool:
        if not broker.alive or broker.leaving or broker.paused or not self._may_die(broker, False):
            return False
        broker.leaving = True
        broker.node.leave()
        return True

    # -- disks

    def _full(self, broker: SimBroker, fault: Fault) -> bool:
        if fault.detail % 2:
            broker.disk.full_once = True
            return True
        broker.disk.full = True
        self._later(fault.for_ms, self._not_full, broker)
        return True

    def _not_full(self, broker: SimBroker) -> None:
        broker.disk.full = False

    def _slow(self, broker: SimBroker, fault: Fault) -> bool:
        broker.slow = True
        self._later(fault.for_ms, self._not_slow, broker)
        return True

    def _not_slow(self, broker: SimBroker) -> None:
        broker.slow = False

    def _broken(self, broker: SimBroker, fault: Fault) -> bool:
        if broker.config.log.fsync != "always" or not self._may_die(broker, False):
            return False
        broker.disk.broken = True
        return True

    def _wipe(self, broker: SimBroker, fault: Fault) -> bool:
        if not self._may_lose(broker):
            return False
        if broker.alive:
            self._world.died(broker, False, fault.for_ms)
        broker.disk.wipe()
        self._world.lost_disks.add(broker.id)
        return True

    def _rollback(self, broker: SimBroker, fault: Fault) -> bool:
        """A copy of the folder now, and a restart; when the cluster knows the next life, the copy is put back.

        A copy of the very life that the cluster knows last cannot be told from the folder itself: nobody promises that.
        """
        if not broker.alive or not self._may_die(broker, False):
            return False
        self._copies[broker.id] = broker.disk.copy()
        self._world.died(broker, False, 20)
        self._later(fault.for_ms, self._put_back, broker, fault, broker.incarnation)
        return True

    def _put_back(self, broker: SimBroker, fault: Fault, copied: int) -> None:
        if self._ended or not self._may_lose(broker):
            return
        if self._world.raft.truth.brokers[broker.id].incarnation == copied:
            self._later(100, self._put_back, broker, fault, copied)
            return
        if broker.alive:
            self._world.died(broker, False, fault.for_ms)
        broker.disk.put_back(self._copies[broker.id])
        self._world.lost_disks.add(broker.id)
        self._world.note(broker, "rolled back")

    # -- network and metadata

    def _cut(self, broker: SimBroker, fault: Fault) -> bool:
        world = self._world
        side = {broker.id}
        if fault.detail % 3 == 0:
            side.add(fault.detail // 3 % len(world.brokers))
        world.network.cut(side, len(world.brokers), 1)
        self._later(fault.for_ms, self._uncut, side)
        return True

    def _uncut(self, side: set[int]) -> None:
        if not self._ended:
            self._world.network.cut(side, len(self._world.brokers), -1)

    def _stale(self, broker: SimBroker, fault: Fault) -> bool:
        self._world.raft.stale.add(broker.id)
        self._later(fault.for_ms, self._world.raft.stale.discard, broker.id)
        return True

    def _raft(self, broker: SimBroker, fault: Fault) -> bool:
        self._world.raft.depose()
        return True

    def _hold(self, broker: SimBroker, fault: Fault) -> bool:
        """What this broker proposes meanwhile is on its way, and arrives in the end."""
        self._world.raft.held_until[broker.id] = self._world.now + fault.for_ms
        return True

    def _mute(self, broker: SimBroker, fault: Fault) -> bool:
        """What this broker proposes meanwhile is lost, and it has to send it again."""
        self._world.raft.mute_until[broker.id] = self._world.now + fault.for_ms
        return True

    def _fence(self, broker: SimBroker, fault: Fault) -> bool:
        """The controller takes a healthy broker for dead: that costs an election, and never a record."""
        world = self._world
        known = world.raft.truth.brokers[broker.id]
        if world.raft.leader == NO_BROKER or known.fenced:
            return False
        controller = world.brokers[world.raft.leader]
        world.at(0, controller, None, controller.on_command, (c.Fence([c.BrokerRef(known.id, known.epoch)]),))
        return True

    def _snapshot(self, broker: SimBroker, fault: Fault) -> bool:
        if broker.alive and not broker.paused:
            broker.later(0, self._world.raft.install, broker)
        return broker.alive

    def _delete(self, broker: SimBroker, fault: Fault) -> bool:
        """Records deleted on demand: no fault, but it comes at any time as faults do."""
        world = self._world
        chosen = list(world.raft.truth.all_partitions())
        key, _, partition = chosen[fault.detail % len(chosen)]
        if partition.leader != NO_BROKER:
            leader = world.brokers[partition.leader]
            world.at(0, leader, None, leader.on_delete_records, (key, fault.detail // 7))
        return partition.leader != NO_BROKER

    def _prefer(self, broker: SimBroker, fault: Fault) -> bool:
        self._world.at(0, broker, None, broker.on_command, (c.ElectPreferred(),))
        return True

    def _reassign(self, broker: SimBroker, fault: Fault) -> bool:
        world = self._world
        chosen = list(world.raft.truth.all_partitions())
        key, topic, _ = chosen[fault.detail % len(chosen)]
        first = fault.detail // 7
        wanted = [(first + nth) % len(world.brokers) for nth in range(topic.replication_factor)]
        world.at(0, broker, None, broker.on_command, (c.Reassign(c.PartitionRef(*key), wanted),))
        return True
