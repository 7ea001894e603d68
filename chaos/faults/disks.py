"""Disks that tear, flip, forget, slow down, fill up or lose their power."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from chaos import disk
from chaos.cluster import NotHealed
from chaos.faults.base import HARNESS, FaultBase, Hit
from chaos.history import OK

POWER_OFF_AFTER_S = 1.0
FILLER = "filler"
STANDSTILL_S_MAX = 60.0
PAGE_BYTES = 4096


class DiskFaults(FaultBase):
    def _damage(self, what: str, broker: int, damage: Callable[[], str], count: int = 1) -> Hit:
        self.cluster.await_whole(self.topics)
        keys = self._led_by(broker)
        self._begin(f"{what} {broker}", keys)
        self.cluster.kill(broker)
        return Hit(f"{what} {broker}: {damage()}", keys, lambda: self.cluster.start(broker), count)

    def torn_tail(self) -> Hit:
        broker = self._some_broker()
        return self._damage("tear", broker, lambda: disk.tear(self.cluster.folder(broker), self.rng))

    def flip_bits(self, flips: int = 3) -> Hit:
        broker = self._some_broker()
        return self._damage("flip", broker, lambda: disk.flip(self.cluster.folder(broker), self.rng, flips), flips)

    def wipe(self) -> Hit:
        broker = self._some_broker()
        return self._damage("wipe", broker, lambda: disk.wipe(self.cluster.folder(broker)))

    def roll_back(self) -> Hit:
        """To what the folder held when this broker was here before; the first time it is only copied."""
        broker = self._some_broker()
        copy = self.cluster.root / f"copy-{broker}"

        def damage() -> str:
            if copy.exists():
                return disk.restore(self.cluster.folder(broker), copy)
            disk.save(self.cluster.folder(broker), copy)
            return "copied"

        return self._damage("roll back", broker, damage)

    # -- the Raft folder -------------------------------------------------------------------------------------------

    def _damage_raft(self, what: str, damage: Callable[[Path], str]) -> Hit:
        """Of any broker, one at a time: with all others there it is admitted again before the fault is over."""
        broker = self._some_broker()
        hit = self._damage(what, broker, lambda: damage(self.cluster.folder(broker)))

        def undo() -> None:
            hit.undo()
            self.cluster.await_whole(self.topics)
            self.cluster.admit(broker)

        return hit._replace(undo=undo)

    def flip_raft(self) -> Hit:
        return self._damage_raft("flip", lambda folder: disk.flip(folder, self.rng, 1, raft=True))

    def wipe_raft(self) -> Hit:
        return self._damage_raft("wipe", lambda folder: disk.wipe(folder, raft=True))

    # -- slow and full ---------------------------------------------------------------------------------------------

    def slow_fsync_leader(self, delay_ms: int = 500) -> Hit:
        broker = self._some_leader()
        return self._slow(broker, f"fsync +{delay_ms} ms on leader {broker}", self._led_by(broker), delay_ms)

    def slow_fsync_follower(self, delay_ms: int = 500) -> Hit:
        broker, keys = self._some_follower()
        return self._slow(broker, f"fsync +{delay_ms} ms on follower {broker}", keys, delay_ms)

    def _slow(self, broker: int, text: str, keys: list[str], delay_ms: int) -> Hit:
        self._begin(text, keys)
        self.cluster.delay_fsync(broker, delay_ms)
        return Hit(text, keys, lambda: self.cluster.delay_fsync(broker, self._plan.fsync_delay_ms))

    def disk_full(self) -> Hit:
        """Needs folders on a tmpfs of their own; all the room that is left is taken."""
        broker = self._some_leader()
        return self._fill(f"disk full on {broker}", broker, self._fillers(broker)[0])

    def raft_disk_full(self, controller: bool = False) -> Hit:
        """The same where the Raft folder alone has a tmpfs. The journal gives up its reserve and lives on that, then on
        what is left of its last page: the fault is there once it stands still while those of others grow."""
        broker = self._controller() if controller else self._some_leader()
        who = f"controller {broker}" if controller else str(broker)
        filler = self._fillers(broker)[1]
        hit = self._fill(f"Raft disk full on {who}", broker, filler)
        deadline = time.monotonic() + STANDSTILL_S_MAX
        while (filler.parent / "reserve").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._take_room(filler)
        before = self._journal_sizes()
        while not self._stands_still(broker, before):
            if time.monotonic() > deadline:
                raise NotHealed(f"the Raft journal of {broker} does not fill its disk within {STANDSTILL_S_MAX:g} s")
            time.sleep(0.1)
        return hit._replace(text=f"{hit.text}, journal stands still")

    def _journal_sizes(self) -> list[int]:
        brokers = range(self.cluster.brokers)
        return [(self.cluster.folder(broker) / "raft" / "journal").stat().st_size for broker in brokers]

    def _stands_still(self, broker: int, before: list[int]) -> bool:
        """Others have written a page more than it has: no message is under way for so long."""
        growth = [now - then for now, then in zip(self._journal_sizes(), before, strict=True)]
        return max(growth) - growth[broker] > PAGE_BYTES

    def _fillers(self, broker: int) -> tuple[Path, Path]:
        return self.cluster.node(broker) / FILLER, self.cluster.folder(broker) / "raft" / FILLER

    def _fill(self, text: str, broker: int, filler: Path) -> Hit:
        keys = self._led_by(broker)
        self._begin(text, keys)
        text += f" after {self._take_room(filler) >> 20} MiB"
        return Hit(text, keys, lambda: filler.unlink(missing_ok=True))

    def _take_room(self, filler: Path) -> int:
        """All that is left on its disk; how large it is now."""
        with filler.open("ab", buffering=0) as file:
            try:
                while file.write(bytes(1 << 16)):
                    continue
            except OSError:  # full, as wanted
                return file.tell()
        raise AssertionError("a write of nothing was a success")

    # -- power -----------------------------------------------------------------------------------------------------

    def power_cut(self) -> Hit:
        keys = self._all_keys()
        self._begin("power cut", [])
        self.cluster.kill(*range(self.cluster.brokers))
        lost = sum(self._cut(broker) for broker in range(self.cluster.brokers))
        if self._plan.loses_unsynced:
            time.sleep(0.3)  # answers that are still in the clients' sockets belong to the era that ends
            self._recorder.add(HARNESS, OK, "era")
        return Hit(f"power cut: {lost} unsynced bytes lost", keys, lambda: self._start_all(keys))

    def lying_disks(self) -> Hit:
        """All five lose bytes that were synced, and none can know. Nothing survives this: the judge must see it."""
        keys = self._all_keys()
        self._begin("lying disks", [])
        self.cluster.kill(*range(self.cluster.brokers))
        lost = sum(disk.shorten(self.cluster.folder(broker), self.rng) for broker in range(self.cluster.brokers))
        return Hit(f"lying disks: {lost} synced bytes lost", keys, lambda: self._start_all(keys))

    def pauses_and_power(self) -> Hit:
        """Two stand still while a third loses its power; when they go on, the other two stand still."""
        one, two, three, four, five = self.rng.sample(range(self.cluster.brokers), 5)
        text = f"pause {one}, {two}; power cut of {three}; then pause {four}, {five}"
        self._begin(text, [])
        self.cluster.pause(one)
        self.cluster.pause(two)
        time.sleep(POWER_OFF_AFTER_S)
        self.cluster.kill(three)
        self._cut(three)
        self.cluster.resume(one)
        self.cluster.resume(two)
        self.cluster.pause(four)
        self.cluster.pause(five)
        self.cluster.start(three)

        def undo() -> None:
            self.cluster.resume(four)
            self.cluster.resume(five)

        return Hit(text, [], undo)

    def _cut(self, broker: int) -> int:
        self.cluster.change_boot_id(broker)
        return disk.cut_power(self.cluster.folder(broker), self.cluster.hooks(broker) / "ledger", self.rng)
