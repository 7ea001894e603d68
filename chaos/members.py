"""The group that is disturbed, as the harness sees it: its members' processes, and the history that they make together.

Members are numbered in the order of their birth; a number is never used again. What they did is in a file each, and
merged with what the harness knows: who was killed or suspended when, and when a coordinator removed whom (from the
brokers' logs, whose wall clock is the harness's).
"""

from __future__ import annotations

import heapq
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import msgspec

from chaos.cluster import Cluster, NotHealed, tied
from chaos.history import INVOKE, OK, Event, Recorder, read_file
from zmqueue import Admin

GROUP = "members"
HARNESS = 900  # its number in the history
DRAIN_S_MAX = 60.0
END_S_MAX = 30.0
JOIN_S_MAX = 60.0
_REMOVED = re.compile(r"^(\S+ \S+) broker \d+ \w+ \S+ group (\S+): (member-(\d+)-\S+) is removed")


class Members:
    def __init__(self, folder: Path, recorder: Recorder, cluster: Cluster, topic: str) -> None:
        self.running: dict[int, int] = {}  # number: pid
        self.suspended: set[int] = set()
        self._folder = folder
        self._recorder = recorder
        self._cluster = cluster
        self._topic = topic
        self._births = 0
        self._lines: list[Event] = []
        folder.mkdir()
        # Its clock is the recorder's.
        self._began = time.monotonic() - recorder.now()
        root = str(Path(__file__).resolve().parents[1])
        arguments = [cluster.bootstrap, GROUP, topic, str(folder), repr(self._began)]
        with (folder / "members.log").open("ab") as log:
            self._nursery = subprocess.Popen(
                tied([sys.executable, "-m", "chaos.member", *arguments]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": root},
                text=True,
                bufsize=1,
            )

    # -- what is done to them --------------------------------------------------------------------------------------

    def join(self) -> int:
        number, self._births = self._births, self._births + 1
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        self._nursery.stdin.write(f"{number}\n")
        self._nursery.stdin.flush()
        self.running[number] = int(self._nursery.stdout.readline())
        return number

    def leave(self, number: int) -> None:
        os.kill(self.running.pop(number), signal.SIGTERM)

    def kill(self, number: int) -> None:
        os.kill(self.running.pop(number), signal.SIGKILL)
        self._note(OK, "killed", number)

    def suspend(self, number: int) -> None:
        self._note(INVOKE, "suspended", number)
        os.kill(self.running[number], signal.SIGSTOP)
        self.suspended.add(number)

    def resume(self, number: int) -> None:
        self._note(OK, "suspended", number)
        self.suspended.discard(number)
        os.kill(self.running[number], signal.SIGCONT)

    def _note(self, e: str, f: str, number: int) -> None:
        self._lines.append(Event(self._recorder.now(), number, e, f))

    def await_shared(self, partitions: int) -> None:
        """Until the group is stable with everybody in it."""
        deadline = time.monotonic() + JOIN_S_MAX
        with Admin(bootstrap_servers=self._cluster.bootstrap) as admin:
            while True:
                members = self._cluster.ask(lambda: admin.describe_group(GROUP)).members
                held = sum(len(member.assignment) for member in members)
                if len(members) == len(self.running) and held == partitions:
                    return
                if time.monotonic() > deadline:
                    raise NotHealed(f"{len(self.running)} members run, {len(members)} share {held} of {partitions}")
                time.sleep(0.1)

    # -- the end ---------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Until the group has committed all that there is."""
        deadline = time.monotonic() + DRAIN_S_MAX
        with Admin(bootstrap_servers=self._cluster.bootstrap) as admin:
            while True:
                rows = self._cluster.ask(lambda: admin.group_lag(GROUP))
                behind = {row.partition: row.lag for row in rows if row.lag != 0}
                if rows and not behind:
                    return
                if time.monotonic() > deadline:
                    raise NotHealed(f"the group has not read on within {DRAIN_S_MAX:g} s: {behind} records behind")
                time.sleep(0.2)

    def close(self) -> None:
        """Everybody leaves; whoever does not is killed with the nursery."""
        self._note(OK, "end", HARNESS)
        pids = list(self.running.values())
        for number in list(self.running):
            if number in self.suspended:
                self.resume(number)
            self.leave(number)
        deadline = time.monotonic() + END_S_MAX
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._nursery.kill()
        self._nursery.wait()
        for pipe in (self._nursery.stdin, self._nursery.stdout):
            if pipe is not None:
                pipe.close()
        lines = sorted([*self._lines, *self._removals()], key=lambda event: event.t)
        (self._folder / "harness.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    def _removals(self) -> Iterator[Event]:
        clock = time.time() - self._recorder.now()
        for path in self._cluster.root.glob("broker-*.log"):
            for line in path.read_text(errors="replace").splitlines():
                found = _REMOVED.match(line)
                if found and found[2] == GROUP:
                    at = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp() - clock
                    yield Event(at, int(found[4]), OK, "removed", x=found[3])


def history(records: Path, folder: Path) -> Iterator[Event]:
    """Everything in the order of time: what the members did, what was done to them, what producers sent."""
    paths = [records, *sorted(folder.glob("*.jsonl"))]
    return heapq.merge(*map(read_file, paths), key=lambda event: event.t)
