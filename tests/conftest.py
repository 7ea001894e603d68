"""What every test can rely on, however the run was started."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """A shell starts what it puts in the background with Ctrl-C ignored, and children inherit that: tests that
    interrupt a process would wait for ever."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
