"""Completion as a shell has it: the printed script in a real bash, asking a scripted cluster."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from unit.cli.test_commands import run
from unit.client.fake_broker import FakeCluster
from unit.client.fake_groups import FakeGroups

from zmqueue import config
from zmqueue.cli import names

Complete = Callable[..., list[str]]
PATIENCE_MS = 30_000


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where a shell finds `zmqueue`, which here has all the time that a busy machine needs."""
    program = tmp_path / "bin" / "zmqueue"
    program.parent.mkdir()
    patient = f"from zmqueue.cli import main, names; names.COMPLETION_MS_MAX = {PATIENCE_MS}; main.main()"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{patient}" "$@"\n')
    program.chmod(0o755)
    return f"{program.parent}:/usr/bin:/bin"


@pytest.fixture
def complete(path: str, tmp_path: Path) -> Complete:
    """What bash would offer at the end of a line."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")

    def complete(line: str, **env: str) -> list[str]:
        script = (
            'eval "$(zmqueue completion bash)"; '
            'COMP_LINE="$1"; COMP_POINT=${#COMP_LINE}; _zmqueue_completion zmqueue; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            [bash, "--norc", "-c", script, "bash", line],
            env={"PATH": path, **env},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split("\n")[:-1] if done.stdout.strip() else []

    return complete


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(1, {"orders": 1, "orders.late": 1, "users": 1, "__own": 1}) as cluster:
        groups = FakeGroups(cluster)
        for name in ("billing", "team:audit", "team:search", "two words"):
            groups.add(name)
        yield cluster


def test_bash_completes_commands_options_and_choices(complete: Complete) -> None:
    assert complete("zmqueue top") == ["topic"]
    assert {"create", "ls", "add-partitions"} <= set(complete("zmqueue topic "))
    assert complete("zmqueue topic create t --part") == ["--partitions"]
    assert complete("zmqueue produce t --acks ") == ["0", "1", "all"]
    assert complete("zmqueue produce t --acks=a") == ["all"]
    assert complete("zmqueue completion ") == ["bash", "zsh", "fish"]


def test_bash_completes_names_of_the_cluster_that_the_line_names(complete: Complete, cluster: FakeCluster) -> None:
    where = f"--bootstrap {cluster.bootstrap}"
    assert complete(f"zmqueue {where} topic describe ") == ["orders", "orders.late", "users"]
    assert complete(f"zmqueue topic describe {where} or") == ["orders", "orders.late"]
    assert complete(f"zmqueue topic describe --bootstrap={cluster.bootstrap} _") == ["__own"]
    assert complete("zmqueue consume u", ZMQUEUE_BOOTSTRAP=cluster.bootstrap) == ["users"]


def test_bash_gets_what_stands_behind_a_colon_where_it_cuts_words(complete: Complete, cluster: FakeCluster) -> None:
    env = {"ZMQUEUE_BOOTSTRAP": cluster.bootstrap}
    assert complete("zmqueue group describe te", **env) == ["team:audit", "team:search"]
    assert complete("zmqueue group describe team:a", **env) == ["audit"]
    assert complete("zmqueue group describe team:", **env) == ["audit", "search"]
    assert complete("zmqueue consume t -g tw", **env) == ["'two words'"]
    assert complete("zmqueue group seek billing --to end --topic us", **env) == ["users"]


def test_without_a_cluster_there_is_nothing_to_complete_and_nothing_is_said(complete: Complete) -> None:
    assert complete("zmqueue topic describe --bootstrap 127.0.0.1:1 ") == []
    assert complete("zmqueue topic describe --bootstrap nonsense ") == []
    assert complete("zmqueue broker stop ") == []


def test_bash_completes_the_brokers_of_the_data_folder(complete: Complete, tmp_path: Path) -> None:
    made = config.new_cluster_file(config.load(None, {}, {"cluster.brokers": 3}).config, "c1")
    (tmp_path / "cluster.json").write_bytes(msgspec.json.encode(made))
    assert complete(f"zmqueue broker --data-dir {tmp_path} stop ") == ["0", "1", "2"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_that_its_shell_understands(shell: str, tmp_path: Path) -> None:
    script = run("completion", shell).stdout
    assert "_ZMQUEUE_COMPLETE=" + shell + "_complete" in script
    program = shutil.which(shell)
    if program is not None:
        file = tmp_path / "script"
        file.write_text(script)
        subprocess.run([program, "-n", str(file)], check=True, timeout=60)


@pytest.mark.parametrize(
    ("shell", "words", "cword", "found"),
    [("zsh", "zmqueue consume us", "2", "plain\nusers\n_"), ("fish", "zmqueue consume us", "us", "plain,users")],
)
def test_zsh_and_fish_ask_with_the_words_of_the_line(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, shell: str, words: str, cword: str, found: str
) -> None:
    monkeypatch.setattr(names, "COMPLETION_MS_MAX", PATIENCE_MS)
    env = {"COMP_WORDS": words, "COMP_CWORD": cword, "_ZMQUEUE_COMPLETE": f"{shell}_complete"}
    assert run(env=env | {"ZMQUEUE_BOOTSTRAP": cluster.bootstrap}).stdout.strip() == found


def test_an_instruction_that_no_script_gives_is_refused() -> None:
    assert run(env={"_ZMQUEUE_COMPLETE": "bash_source"}).exit_code == 1
