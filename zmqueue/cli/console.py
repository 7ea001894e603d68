"""The line console of a foreground `up`: the same commands that another shell has, without leaving the terminal.

A console takes lines and gives back lines, and acts only on the data folder, so it needs nothing from the supervisor
but a way to end it. Where the lines come from (the terminal here) is the caller's business.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zmqueue.supervisor import Supervisor

PROMPT = "zmqueue> "
LINE_BYTES_MAX = 4096

HELP = """\
status                          every broker, and whether the cluster is ready
broker list                     every broker
broker stop|start|restart|kill N
restart all                     one after the other
help                            this
quit                            stop the brokers and leave"""

# A console serves its own cluster: what would start another or block it for good is not for it.
ALLOWED = {"status", "health", "broker", "restart", "topic", "group", "version"}


class Console:
    """Runs one line at a time."""

    def __init__(self, data_dir: Path, bootstrap: str, quit_: Callable[[], None]) -> None:
        self._data_dir = data_dir
        self._bootstrap = bootstrap
        self._quit = quit_

    def run(self, line: str) -> str:
        """What the line prints, errors included."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            return f"not understood: {error}"
        match words:
            case []:
                return ""
            case ["help" | "?", *_]:
                return HELP
            case ["quit" | "exit"]:
                self._quit()
                return "stopping"
            case [name, *_] if name in ALLOWED:
                return self._command(words)
        return f"unknown command {words[0]!r}: try help"

    def _command(self, words: list[str]) -> str:
        from zmqueue.cli.main import cli, run
        from zmqueue.cli.options import Choices

        choices = Choices()
        choices.given_data_dir = str(self._data_dir)
        choices.given_bootstrap = self._bootstrap
        output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            run(cli, words, choices)
        output.seek(0)
        return output.read().rstrip("\n")


def start_console(supervisor: Supervisor) -> None:
    """Reads the terminal in a thread of its own, so that a command that waits does not keep the supervisor waiting."""
    members = supervisor.cluster.members
    bootstrap = ",".join(f"{member.host}:{member.client}" for member in members)
    console = Console(supervisor.data_dir, bootstrap, supervisor.stop)
    threading.Thread(target=_serve_terminal, args=(console,), name="console", daemon=True).start()


def _serve_terminal(console: Console) -> None:
    for line in _terminal_lines(sys.stdin.fileno()):
        # redirect_stdout is process-wide, so what is printed goes to the real streams by name.
        answer = console.run(line)
        if answer and sys.__stdout__ is not None:
            sys.__stdout__.write(answer + "\n")
            sys.__stdout__.flush()


def _terminal_lines(descriptor: int) -> Iterator[str]:
    # os.read and not sys.stdin: a daemon thread inside the latter would hold its lock at the interpreter's end.
    while True:
        print(PROMPT, end="", file=sys.__stderr__, flush=True)
        raw = os.read(descriptor, LINE_BYTES_MAX)
        if not raw:
            return
        yield raw.decode(errors="replace")
