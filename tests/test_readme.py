"""The README's commands and its Python, run as they stand there against a real cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zmqueue.testing import Cluster

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def block(heading: str, language: str) -> str:
    section = README.split(f"## {heading}\n", 1)[1]
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert found, f"no {language} block under {heading!r}"
    return found[1]


@pytest.mark.integration
def test_the_readme_works_as_written(tmp_path: Path, zmqueue_cluster: Cluster) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "zmqueue").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m zmqueue "$@"\n')
    (commands / "zmqueue").chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "ZMQUEUE_DATA_DIR": str(zmqueue_cluster.data_dir),
        "ZMQUEUE_BOOTSTRAP": zmqueue_cluster.bootstrap_servers,
    }

    def run(*command: str) -> str:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    printed = {line: run("bash", "-c", line) for line in block("Try it", "sh").splitlines()}
    assert printed["zmqueue consume events -o start -n 1"] == "hello\n"
    program = block("From Python", "python").replace("127.0.0.1:9092", zmqueue_cluster.bootstrap_servers.split(",")[0])
    assert "one record" in run(sys.executable, "-c", program)


def test_the_readme_opens_with_the_two_commands() -> None:
    opening = README.split("## ")[0]
    assert opening.index("tools/up") < opening.index("tools/test")
    for tool in ("up", "test", "check"):
        assert os.access(ROOT / "tools" / tool, os.X_OK)


def test_every_link_of_the_readme_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
