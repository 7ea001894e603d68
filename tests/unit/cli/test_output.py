"""How results look, and what the console understands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zmqueue.cli.console import HELP, Console
from zmqueue.cli.output import duration, plain_table


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0s"),
        (4.25, "4.2s"),
        (60, "1m00s"),
        (187, "3m07s"),
        (3600, "1h00m"),
        (18_130, "5h02m"),
        (183_600, "2d03h"),
    ],
)
def test_durations_have_two_units(seconds, text):
    assert duration(seconds) == text


def test_a_plain_table_is_aligned_and_has_no_trailing_blanks():
    assert plain_table(("A", "LONG"), [("1", ""), ("100", "x")]) == ["A    LONG", "1", "100  x"]


def test_the_console_runs_commands_on_its_own_cluster(tmp_path):
    ended: list[bool] = []
    console = Console(tmp_path, "127.0.0.1:1", lambda: ended.append(True))
    assert console.run("") == ""
    assert console.run("help") == HELP
    assert console.run("broker stop 1").startswith(f"zmqueue: no cluster in {tmp_path}")
    assert console.run("broker stop").startswith("zmqueue: Missing argument 'N'")
    assert console.run("up") == "unknown command 'up': try help"
    assert console.run("say 'unclosed").startswith("not understood")
    assert not ended
    assert console.run("quit") == "stopping"
    assert ended == [True]


def test_a_closed_pipe_is_no_error():
    root = Path(__file__).parents[3]
    reader, writer = os.pipe()
    os.close(reader)
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-m", "zmqueue", "config", "show"], stdout=writer, stderr=subprocess.PIPE, env=env, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
