"""What can be wrong at the start: one clear line, a documented exit code, and nothing damaged."""

from __future__ import annotations

import socket
from pathlib import Path

from zmqueue.testing import Cluster, running_cluster
from zmqueue.testing.ports import BASE_PORTS, reserved_offset


def refused(cluster: Cluster, exit_code: int, *arguments: str) -> str:
    """`up` fails with this code and one line on stderr, which is returned."""
    done = cluster.command(
        "up", "--detach", "--port-offset", str(cluster.port_offset), *arguments, check=False, timeout_s=60
    )
    assert done.returncode == exit_code, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("zmqueue: ")
    return lines[0]


def test_a_second_up_on_one_folder_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "data", brokers=3) as cluster:
        cluster.command("topic", "create", "kept", "-p", "1")
        before = [broker["pid"] for broker in cluster.json("status")["brokers"]]
        line = refused(cluster, 1, "--brokers", "3")
        assert "already up" in line
        assert [broker["pid"] for broker in cluster.json("status")["brokers"]] == before
        assert cluster.command("topic", "ls").stdout.split() == ["kept"]


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with reserved_offset(3) as offset, socket.socket() as holder:
        port = BASE_PORTS[0] + offset + 1
        holder.bind(("127.0.0.1", port))
        holder.listen()
        cluster = Cluster(tmp_path / "data", offset, brokers=3)
        assert str(port) in refused(cluster, 1, "--brokers", "3")


def test_an_unknown_setting_names_the_nearest_one(tmp_path: Path) -> None:
    config = tmp_path / "zmqueue.toml"
    config.write_text('[log]\nfsink = "always"\n')
    with reserved_offset(3) as offset:
        cluster = Cluster(tmp_path / "data", offset, brokers=3)
        line = refused(cluster, 78, "--config", str(config))
        assert "log.fsink" in line
        assert "log.fsync" in line
        assert not cluster.data_dir.exists()


def test_a_corrupt_configuration_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "zmqueue.toml"
    config.write_bytes(b"[log\n\xff\x00")
    with reserved_offset(3) as offset:
        cluster = Cluster(tmp_path / "data", offset, brokers=3)
        assert str(config) in refused(cluster, 78, "--config", str(config))
        assert not cluster.data_dir.exists()


def test_other_members_than_before_are_refused(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "data", brokers=3) as cluster:
        cluster.down()
        refused(cluster, 78, "--brokers", "5")
        cluster.up()
        assert len(cluster.json("status")["brokers"]) == 3
