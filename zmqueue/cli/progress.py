"""How far long work has come, on stderr: one line that is written over on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

TERMINAL_S = 1.0
ELSEWHERE_S = 10.0


class Progress:
    """`show` may be called as often as one likes."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._pause_s = TERMINAL_S if self._terminal else ELSEWHERE_S
        self._begun_s = time.monotonic()
        self._due_s = self._begun_s + self._pause_s
        self._shown = False

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun_s

    def rate(self, count: int) -> str:
        """What to say behind a count: how long it took, and how many that is in a second."""
        elapsed_s = max(self.elapsed_s, 1e-3)
        return f" in {elapsed_s:.1f} s ({count / elapsed_s:,.0f}/s)"

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._due_s

    def show(self, text: str) -> None:
        if not self.due:
            return
        self._due_s = time.monotonic() + self._pause_s
        self._shown = True
        # Back to the beginning, and what is left of a longer line is blanked.
        print(f"\r{text}\x1b[K" if self._terminal else text, end="" if self._terminal else "\n", file=sys.stderr)
        sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._terminal and self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
