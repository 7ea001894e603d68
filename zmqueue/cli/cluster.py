"""`up`, `down`, `status`, `health`: the cluster of one data folder as a whole."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zmqueue.cli.options import Choices, Failed, data_dir_option, output_option

if TYPE_CHECKING:
    from zmqueue.config import ClusterFile
    from zmqueue.status import ClusterStatus

EXIT_NOT_FOUND = 3
EXIT_UNHEALTHY = 5
LOOK_AGAIN_S = 0.1


def cluster_of(choices: Choices) -> ClusterFile:
    """The cluster in the data folder; without one there is nothing that a command could work on."""
    from zmqueue.config import read_cluster_file

    cluster = read_cluster_file(choices.data_dir)
    if cluster is None:
        raise Failed(EXIT_NOT_FOUND, f"no cluster in {choices.data_dir}: start one with zmqueue up, or see --data-dir")
    return cluster


@click.command()
@data_dir_option
@click.option("--brokers", type=int, metavar="N", help="Broker processes, 1 to 9.  [default: 5]")
@click.option("--storage", help="Where records live: disk or memory.  [default: disk]")
@click.option("--config", "config_file", type=click.Path(path_type=Path), metavar="FILE", help="Settings, as TOML.")
@click.option("--port-offset", type=int, metavar="N", help="Added to every port, for clusters side by side.")
@click.option("--detach", is_flag=True, help="Run in the background; return when the cluster is ready.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="With --detach: how long to wait for the cluster to be ready.",
)
@click.option("--with-pid", type=int, metavar="PID", help="Stop the cluster when this process ends, however it ends.")
@output_option
@click.pass_obj
def up(
    choices: Choices,
    brokers: int | None,
    storage: str | None,
    config_file: Path | None,
    port_offset: int | None,
    detach: bool,
    timeout: float,
    with_pid: int | None,
) -> None:
    """Start a cluster: its brokers, and a supervisor that restarts those that crash.

    The first start fixes the number of brokers, the ports and the storage of a data folder; later ones need no flags.
    In the foreground, Ctrl-C stops everything, and on a terminal commands can be typed (try `help`).

    Exit codes: 1 if the folder is up already, a port is in use, or the disk is full; 4 if not ready in time; 78 if a
    setting is wrong or differs from what the folder was made with.
    """
    from zmqueue import config, supervisor
    from zmqueue.cli.output import print_status, say
    from zmqueue.processes import process

    owner = None if with_pid is None else process(with_pid)
    if with_pid is not None and owner is None:
        raise click.UsageError(f"--with-pid: no process {with_pid}")

    flags: dict[str, Any] = {
        "cluster.brokers": brokers,
        "cluster.storage": storage,
        "cluster.port_offset": port_offset,
        "cluster.data_dir": choices.given_data_dir,
    }
    loaded = config.load(config_file, os.environ, flags)
    # A wrong folder in the file is as good as one on the line.
    data_dir = Path(loaded.config.cluster.data_dir).absolute()
    if detach:
        existing = config.read_cluster_file(data_dir)
        if existing is not None:
            config.with_cluster(loaded, existing, data_dir)
        arguments = ["--data-dir", str(data_dir)]
        for name, value in (
            ("--brokers", brokers),
            ("--storage", storage),
            ("--config", config_file.absolute() if config_file else None),
            ("--port-offset", port_offset),
            ("--with-pid", with_pid),
        ):
            arguments += [name, str(value)] if value is not None else []
        try:
            print_status(choices, supervisor.up_detached(data_dir, arguments, timeout, os.environ))
        except supervisor.StartFailed as error:
            for line in error.details:
                say(line)
            raise
        return

    from zmqueue.cli.console import start_console

    def on_ready(status: ClusterStatus) -> None:
        print_status(choices, status)
        sys.stdout.flush()

    code = supervisor.up(
        data_dir,
        loaded,
        config_file,
        _say_with_time,
        on_ready=on_ready,
        console=start_console if sys.stdin is not None and sys.stdin.isatty() else None,
        owner=owner,
    )
    raise Failed(code)


def _say_with_time(message: str) -> None:
    # The real stderr: while the console runs a command, sys.stderr is that command's.
    if sys.__stderr__ is not None:
        sys.__stderr__.write(f"{time.strftime('%H:%M:%S')} {message}\n")  # one write: other threads print too
        sys.__stderr__.flush()


@click.command()
@data_dir_option
@output_option
@click.pass_obj
def down(choices: Choices) -> None:
    """Stop the cluster: every broker and the supervisor."""
    from zmqueue import supervisor
    from zmqueue.cli.output import result, say

    count = supervisor.down(choices.data_dir, cluster_of(choices), say)
    text = f"stopped {count} processes" if count else "nothing was running"
    result(choices, {"stopped_processes": count}, text)


@click.command()
@data_dir_option
@output_option
@click.pass_obj
def status(choices: Choices) -> None:
    """Show every broker: its state, process, ports, and what it leads.

    States: ready; fenced (runs, but may not serve yet); starting; silent (runs, but does not answer); dead; stopped (on
    purpose). RAFT marks the broker that leads the metadata.
    """
    from zmqueue.cli.output import print_status
    from zmqueue.status import Asker

    with Asker(choices.data_dir, cluster_of(choices)) as asker:
        print_status(choices, asker.status())


@click.command()
@data_dir_option
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Wait this long for the cluster to become healthy.",
)
@output_option
@click.pass_obj
def health(choices: Choices, wait_s: float) -> None:
    """Exit 0 if the cluster is healthy, else 5.

    Healthy: every broker is ready, a controller is known, every partition has a leader and all its replicas in sync.
    """
    from zmqueue.cli.output import result, say
    from zmqueue.status import Asker

    deadline_s = time.monotonic() + wait_s
    with Asker(choices.data_dir, cluster_of(choices)) as asker:
        while (found := asker.status().problems()) and (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(LOOK_AGAIN_S, left_s))
    if choices.json or not found:
        result(choices, {"healthy": not found, "problems": found}, "healthy")
    if found:
        say(f"zmqueue: unhealthy: {', '.join(found)}")
        raise Failed(EXIT_UNHEALTHY)
