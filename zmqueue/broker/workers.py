"""Has jobs done beside the loop: on disk by a process of its own, in memory in slices of a turn. One after the other.

The process is started with the first job and then stays. If it ends, its job has failed and nothing else has: jobs
write only files that nobody reads before they are put in place. The next job starts it again, after a pause that grows
as long as none is done. `done` is called on the loop, once for each job, never from within `submit`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from zmqueue.config import LogConfig
from zmqueue.errors import JobFailed
from zmqueue.log.files import Files
from zmqueue.log.jobs import FRAME_HEAD_BYTES, Failed, Job, Result, Steps, framed, result_decoder, steps
from zmqueue.model import KiB, MiB
from zmqueue.transport import Transport

_logger = logging.getLogger(__name__)

# A job must fit into the pipe, as the loop never waits for its reader.
PIPE_BYTES = 1 * MiB
READ_BYTES = 64 * KiB
PAUSE_MS = 1_000
PAUSE_MS_MAX = 60_000
END_S = 2.0
# For jobs in memory: so long in one turn, and so often.
SLICE_S = 0.002
SLICE_MS = 20

Done = Callable[[Result], None]


class _Order(NamedTuple):
    job: Job
    done: Done


class Workers:
    def __init__(self, transport: Transport, config: LogConfig, memory: Files, clock: Callable[[], int]) -> None:
        """`memory`: where jobs for logs in memory find them. `clock` is the loop's, in ms."""
        self._transport = transport
        self._bytes_per_s = config.maintenance_bytes_per_s
        self._memory = memory
        self._clock = clock
        self._waiting: deque[_Order] = deque()
        self._present: _Order | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._received = bytearray()
        self._ended: list[subprocess.Popen[bytes]] = []  # killed, and not yet gone
        self._start_ms = 0  # not to be started before
        self._pause_ms = PAUSE_MS
        self._sliced: deque[tuple[Steps, Done]] = deque()
        self._slice_ms = 0
        self.restarts = 0

    def submit(self, job: Job, done: Done) -> None:
        if job.volatile:
            self._sliced.append((steps(job, self._memory), done))
        else:
            self._waiting.append(_Order(job, done))

    def on_tick(self, now_ms: int) -> None:
        """Every turn of the loop."""
        if self._waiting and self._present is None and now_ms >= self._start_ms:
            self._send(self._waiting.popleft())
        if self._sliced and now_ms >= self._slice_ms:
            self._slice(now_ms)
        if self._ended:
            self._ended = [process for process in self._ended if process.poll() is None]

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def close(self) -> None:
        """Jobs that are not done come to nothing, and nobody hears of them."""
        self._waiting.clear()
        self._sliced.clear()
        self._present = None
        self._end()
        for process in self._ended:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                _logger.warning("worker %d does not end", process.pid)

    # -- the process ---------------------------------------------------------------------------------------------

    def _send(self, order: _Order) -> None:
        self._present = order
        data = framed(order.job)
        try:
            process = self._process or self._started()
            assert process.stdin is not None
            written = os.write(process.stdin.fileno(), data)
        except OSError as error:
            self._fail(f"no job reaches the worker: {error}")
            return
        if written != len(data):
            self._fail(f"a job of {len(data)} bytes does not fit into the worker's pipe")

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "zmqueue.log.worker"]
        command += ["--parent", str(os.getpid()), "--bytes-per-s", str(self._bytes_per_s)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._received.clear()
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        self._transport.watch(process.stdout.fileno(), self._on_output)
        fcntl.fcntl(process.stdin.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return process

    def _on_output(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            data = os.read(self._process.stdout.fileno(), READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._fail("the worker ended")
            return
        self._received += data
        length = FRAME_HEAD_BYTES + int.from_bytes(self._received[:FRAME_HEAD_BYTES], "little")
        if len(self._received) < max(length, FRAME_HEAD_BYTES + 1):
            return
        order, self._present = self._present, None
        try:
            result = result_decoder.decode(self._received[FRAME_HEAD_BYTES:length])
        except msgspec.MsgspecError as error:
            self._present = order
            self._fail(f"no result: {error}")
            return
        del self._received[:length]
        self._pause_ms = PAUSE_MS
        if order is not None:
            order.done(result)

    def _fail(self, reason: str) -> None:
        """Whatever state the process is in, the next job gets another."""
        _logger.error("worker: %s; the next one starts in %d ms", reason, self._pause_ms)
        self._end()
        self.restarts += 1
        self._start_ms = self._clock() + self._pause_ms
        self._pause_ms = min(self._pause_ms * 2, PAUSE_MS_MAX)
        order, self._present = self._present, None
        if order is not None:
            order.done(Failed(JobFailed.code, reason))

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        self._transport.unwatch(process.stdout.fileno())
        process.stdin.close()
        process.stdout.close()
        process.kill()
        if process.poll() is None:
            # It may be in a sync that takes its time; the loop does not wait for it.
            self._ended.append(process)

    # -- in memory -----------------------------------------------------------------------------------------------

    def _slice(self, now_ms: int) -> None:
        work, done = self._sliced[0]
        until = time.perf_counter() + SLICE_S
        count = 0
        result: Result | None = None
        while result is None and time.perf_counter() < until:
            try:
                count += next(work)
            except StopIteration as end:
                result = end.value
        self._slice_ms = now_ms + max(SLICE_MS, count * 1000 // self._bytes_per_s)
        if result is not None:
            self._sliced.popleft()
            done(result)
