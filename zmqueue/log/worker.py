"""`python -m zmqueue.log.worker`: the process in which a broker has jobs done (see jobs.py), one after the other.

Jobs come in by stdin, results go out by stdout, both framed; logs go to stderr. It ends when stdin does, and whenever
its broker ends, however that comes about: what it would still write belongs to nobody then, and might meet the files of
the broker's next life. It works at low priority and at a bounded rate. It is not in its broker's process group, so an
interrupt from the keyboard is the broker's alone.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
from typing import BinaryIO

from zmqueue.log.files import open_files
from zmqueue.log.jobs import FRAME_HEAD_BYTES, Pace, framed, job_decoder, run

NICENESS = 10
_PR_SET_PDEATHSIG = 1  # of prctl(2)


def main() -> int:
    parser = argparse.ArgumentParser(prog="zmqueue worker", description="Does a broker's work on full segments.")
    parser.add_argument("--parent", type=int, required=True, help="the process to end with")
    parser.add_argument("--bytes-per-s", type=int, required=True, help="how much to read and write in a second")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s worker %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not _end_with(arguments.parent):
        return 0
    os.nice(NICENESS)
    # Whatever else might be printed goes to stderr: it would be taken for a result.
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as results:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        return serve(sys.stdin.buffer, results, Pace(arguments.bytes_per_s))


def serve(jobs: BinaryIO, results: BinaryIO, pace: Pace) -> int:
    while head := jobs.read(FRAME_HEAD_BYTES):
        job = job_decoder.decode(jobs.read(int.from_bytes(head, "little")))
        # New for each: a name that was read for the last job may be another file by now.
        files = open_files("disk")
        try:
            result = run(job, files, pace)
        finally:
            files.close()
        try:
            results.write(framed(result))
            results.flush()
        except BrokenPipeError:
            return 0
    return 0


def _end_with(parent: int) -> bool:
    """Have the kernel end us with our parent. False if that has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


if __name__ == "__main__":
    sys.exit(main())
