"""Short chaos runs against real brokers: no anomaly, nothing left running."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zmqueue.testing import Cluster

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.integration


def processes_in(folder: Path) -> list[str]:
    """Command lines that name the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace") if entry.name.isdigit() else ""
        except OSError:
            continue  # it ended while we looked
        if str(folder) in command:
            found.append(command.replace("\0", " "))
    return found


def chaos(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "chaos/run.py", *arguments, "--check", "--folder", str(folder), "-o", "json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert processes_in(folder) == []
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_swarm_of_faults_shows_no_anomaly(tmp_path: Path) -> None:
    code, report, said = chaos(tmp_path, "swarm", "--seconds", "60", "--seed", "7")
    assert report["anomalies"] == {}, said
    assert code == 0
    assert report["faults"] >= 6
    assert report["verdict"]["acked"] > 1_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_leaders_show_no_anomaly(tmp_path: Path) -> None:
    code, report, said = chaos(tmp_path, "kill-leader", "--seconds", "15", "--seed", "7")
    assert report["anomalies"] == {}, said
    assert code == 0
    assert report["faults"] >= 2
    assert report["verdict"]["gaps"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_clients_cut_off_from_a_leader_get_typed_errors_and_no_duplicates(tmp_path: Path) -> None:
    code, report, said = chaos(tmp_path, "client-cut-off", "--faults", "2", "--seed", "7")
    assert report["anomalies"] == {}, said
    assert code == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_strangers_neither_end_a_broker_nor_fill_it(tmp_path: Path) -> None:
    code, report, said = chaos(tmp_path, "garbage", "--seconds", "25", "--seed", "7")
    assert report["anomalies"] == {}, said
    assert code == 0
    assert report["repetitions"] > 1_000
    assert report["measures"]["rss_growth_mib"] <= 64


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_group_whose_members_come_go_die_and_sleep_shows_no_anomaly(tmp_path: Path) -> None:
    code, report, said = chaos(tmp_path, "groups", "--seconds", "20", "--seed", "3")
    assert report["anomalies"] == {}, said
    assert code == 0
    assert report["faults"] >= 2
    measured = report["measures"]
    assert measured["rebalances"] >= 20 + report["faults"]
    assert measured["zombies_refused"] == measured["zombies"]
    assert measured["delivered"] >= report["verdict"]["acked"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_loss_that_no_broker_can_know_of_is_found(tmp_path: Path) -> None:
    code, report, _ = chaos(tmp_path, "lying-disks", "--seconds", "3", "--seed", "7")
    assert "LOST-WRITE" in report["anomalies"]
    assert code == 1


def test_the_plain_script_kills_and_starts_brokers_of_a_running_cluster(cluster: Cluster) -> None:
    before = {broker["id"]: broker["pid"] for broker in cluster.json("status")["brokers"]}
    command = [sys.executable, "chaos/kill.py", "--data-dir", str(cluster.data_dir)]
    command += ["--every", "0.5", "--down", "0.2", "--rounds", "1", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    killed = int(done.stdout.split()[2])
    cluster.wait_healthy()
    after = {broker["id"]: broker["pid"] for broker in cluster.json("status")["brokers"]}
    assert [broker for broker in after if after[broker] != before[broker]] == [killed]
