"""A real cluster for tests: processes on free ports in a temporary folder, driven through the command line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chaos.cluster import BASE_PORTS, reserved_offset


class Cluster:
    def __init__(self, data_dir: Path, port_offset: int, brokers: int, env: dict[str, str]) -> None:
        self.data_dir = data_dir
        self.port_offset = port_offset
        self.brokers = brokers
        self._env = env

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"127.0.0.1:{BASE_PORTS[0] + self.port_offset + i}" for i in range(self.brokers))

    def command(
        self, *arguments: str, check: bool = True, timeout_s: float = 60, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """`zmqueue ARGUMENTS`, with this cluster's folder and brokers in its environment."""
        env = {
            **os.environ,
            **self._env,
            "ZMQUEUE_DATA_DIR": str(self.data_dir),
            "ZMQUEUE_BOOTSTRAP": self.bootstrap_servers,
        }
        done = subprocess.run(
            [sys.executable, "-m", "zmqueue", *arguments],
            env=env,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"zmqueue {' '.join(arguments)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def json(self, *arguments: str) -> Any:
        return json.loads(self.command(*arguments, "-o", "json").stdout)

    def up(self, *arguments: str) -> None:
        offset = str(self.port_offset)
        self.command("up", "--detach", "--port-offset", offset, "--brokers", str(self.brokers), *arguments)

    def down(self) -> None:
        self.command("down", timeout_s=90)

    def kill(self, broker: int) -> None:
        self.command("broker", "kill", str(broker))

    def start(self, broker: int) -> None:
        self.command("broker", "start", str(broker))

    def wait_healthy(self, seconds: int = 30) -> None:
        self.command("health", "--wait", str(seconds), timeout_s=seconds + 30)

    def logs(self) -> str:
        """The end of every broker's log, for a failed test."""
        parts = []
        for path in sorted(self.data_dir.glob("broker-*/broker.log")):
            lines = path.read_text(errors="replace").splitlines()[-25:]
            parts.append(f"--- {path.parent.name}\n" + "\n".join(lines))
        return "\n".join(parts)


@contextlib.contextmanager
def running_cluster(
    data_dir: Path, *arguments: str, brokers: int = 5, env: dict[str, str] | None = None
) -> Iterator[Cluster]:
    with reserved_offset(brokers) as offset:
        cluster = Cluster(data_dir, offset, brokers, env or {})
        try:
            cluster.up(*arguments)
            yield cluster
        except BaseException:
            print(cluster.logs())
            raise
        finally:
            cluster.down()
