"""`broker list|stop|start|restart|kill|admit` and `restart all`: single broker processes, from any shell."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from zmqueue.cli.cluster import EXIT_NOT_FOUND, EXIT_UNHEALTHY, cluster_of
from zmqueue.cli.names import complete_brokers
from zmqueue.cli.options import Choices, Failed, data_dir_option, output_option

if TYPE_CHECKING:
    from zmqueue.processes import BrokerFolder

BACK_S_MAX = 30.0
ADMISSIBLE_S_MAX = 3.0


@click.group()
@data_dir_option
def broker() -> None:
    """List, stop, start, restart, kill or admit single brokers."""


def folder_of(choices: Choices, broker_id: int) -> BrokerFolder:
    from zmqueue.processes import BrokerFolder

    known = [member.id for member in cluster_of(choices).members]
    if broker_id not in known:
        raise Failed(EXIT_NOT_FOUND, f"no broker {broker_id} in this cluster: there are {known[0]} to {known[-1]}")
    return BrokerFolder(choices.data_dir, broker_id)


def start_broker(choices: Choices, broker_id: int) -> tuple[int, bool]:
    """Starts it unless it runs; its pid, and whether it ran already."""
    from zmqueue.processes import port_in_use

    folder = folder_of(choices, broker_id)
    ran = folder.running()
    taken = port_in_use(cluster_of(choices).members[broker_id]) if ran is None else None
    if taken is not None:
        raise Failed(1, f"port {taken[0]} of broker {broker_id} is in use by {taken[1]}")
    return folder.start().pid, ran is not None


def stop_broker(choices: Choices, broker_id: int) -> bool:
    from zmqueue.cli.output import say

    return folder_of(choices, broker_id).stop(say)


@broker.command("list")
@data_dir_option
@output_option
@click.pass_obj
def list_brokers(choices: Choices) -> None:
    """Show every broker."""
    from zmqueue.cli.output import print_brokers, print_json
    from zmqueue.status import Asker

    with Asker(choices.data_dir, cluster_of(choices)) as asker:
        brokers = asker.status().brokers
    choices.printed = True
    if choices.json:
        print_json(brokers)
    else:
        print_brokers(brokers)


@broker.command()
@click.argument("broker_id", type=int, metavar="N", shell_complete=complete_brokers)
@data_dir_option
@output_option
@click.pass_obj
def stop(choices: Choices, broker_id: int) -> None:
    """Stop broker N cleanly. It stays stopped until it is started."""
    from zmqueue.cli.output import result

    ran = stop_broker(choices, broker_id)
    text = f"broker {broker_id} stopped" if ran else f"broker {broker_id} was not running"
    result(choices, {"broker": broker_id, "action": "stop", "was_running": ran}, text)


@broker.command()
@click.argument("broker_id", type=int, metavar="N", shell_complete=complete_brokers)
@data_dir_option
@output_option
@click.pass_obj
def kill(choices: Choices, broker_id: int) -> None:
    """Kill broker N (SIGKILL), as a crash would. It stays dead until it is started."""
    from zmqueue.cli.output import result

    ran = folder_of(choices, broker_id).kill()
    text = f"broker {broker_id} killed" if ran else f"broker {broker_id} was not running"
    result(choices, {"broker": broker_id, "action": "kill", "was_running": ran}, text)


@broker.command()
@click.argument("broker_id", type=int, metavar="N", shell_complete=complete_brokers)
@data_dir_option
@output_option
@click.pass_obj
def start(choices: Choices, broker_id: int) -> None:
    """Start broker N. Returns when the process runs; see `health --wait` for when it serves."""
    from zmqueue.cli.output import result

    pid, ran = start_broker(choices, broker_id)
    text = f"broker {broker_id} runs already, pid {pid}" if ran else f"broker {broker_id} started, pid {pid}"
    result(choices, {"broker": broker_id, "action": "start", "was_running": ran, "pid": pid}, text)


@broker.command()
@click.argument("broker_id", type=int, metavar="N", shell_complete=complete_brokers)
@data_dir_option
@output_option
@click.pass_obj
def restart(choices: Choices, broker_id: int) -> None:
    """Stop broker N cleanly and start it again."""
    from zmqueue.cli.output import result

    ran = stop_broker(choices, broker_id)
    pid, _ = start_broker(choices, broker_id)
    value = {"broker": broker_id, "action": "restart", "was_running": ran, "pid": pid}
    result(choices, value, f"broker {broker_id} restarted, pid {pid}")


@broker.command()
@click.argument("broker_id", type=int, metavar="N", shell_complete=complete_brokers)
@data_dir_option
@output_option
@click.pass_obj
def admit(choices: Choices, broker_id: int) -> None:
    """Let broker N vote again after its Raft folder was lost or damaged.

    All other brokers must be up, and N must have caught up with them; it is restarted. What was damaged is kept beside
    the new files.
    """
    from zmqueue.broker.raft_folder import format_folder
    from zmqueue.cli.output import result, say

    folder = folder_of(choices, broker_id)
    cluster = cluster_of(choices)
    _await_admissible(choices, broker_id)
    folder.stop(say)
    format_folder(folder.path / "raft", cluster.cluster_id, broker_id, admit=True)
    pid, _ = start_broker(choices, broker_id)
    result(choices, {"broker": broker_id, "action": "admit", "pid": pid}, f"broker {broker_id} votes again, pid {pid}")


def _await_admissible(choices: Choices, broker_id: int) -> None:
    """Terms and commands spread in moments: what is refused now may be in order then."""
    from zmqueue.core.admission import refusal
    from zmqueue.status import Asker

    cluster = cluster_of(choices)
    deadline_s = time.monotonic() + ADMISSIBLE_S_MAX
    with Asker(choices.data_dir, cluster) as asker:
        while (why := refusal(broker_id, asker.answers())) is not None:
            if time.monotonic() > deadline_s:
                raise Failed(1, why)
            time.sleep(0.1)


@click.command("restart")
@click.argument("what", type=click.Choice(["all"]))
@data_dir_option
@output_option
@click.pass_obj
def restart_everything(choices: Choices, what: str) -> None:
    """Restart every broker, one after the other, each when the one before is ready again."""
    from zmqueue.cli.output import result

    pids = restart_all(choices)
    result(choices, {"action": "restart", "pids": pids}, f"restarted {len(pids)} brokers")


def restart_all(choices: Choices) -> dict[int, int]:
    from zmqueue.cli.output import say
    from zmqueue.status import Asker

    cluster = cluster_of(choices)
    pids = {}
    with Asker(choices.data_dir, cluster) as asker:
        for member in cluster.members:
            stop_broker(choices, member.id)
            pids[member.id], _ = start_broker(choices, member.id)
            say(f"broker {member.id} restarted, pid {pids[member.id]}")
            deadline_s = time.monotonic() + BACK_S_MAX
            # One at a time: two down at once could leave a partition without a leader.
            while asker.status().brokers[member.id].state != "ready":
                if time.monotonic() > deadline_s:
                    raise Failed(
                        EXIT_UNHEALTHY, f"broker {member.id} is not back after {BACK_S_MAX:g} s: stopping here"
                    )
                time.sleep(0.1)
    return pids
