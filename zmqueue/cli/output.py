"""How results look: a table on a terminal, plain columns in a pipe, one JSON document where asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from zmqueue.cli.options import Choices

if TYPE_CHECKING:
    from zmqueue.status import BrokerStatus, ClusterStatus

STATE_STYLES = {
    "ready": "green",
    "fenced": "yellow",
    "starting": "yellow",
    "silent": "red",
    "dead": "red",
    "stopped": "dim",
}


def print_json(value: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def say(message: str) -> None:
    """What is not the result."""
    click.echo(message, err=True)


def result(choices: Choices, value: Any, text: str) -> None:
    """The result of a command that does something: the value as JSON, or a line of text."""
    choices.printed = True
    if choices.json:
        print_json(value)
    else:
        click.echo(text)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, state_column: int | None = None) -> None:
    if not sys.stdout.isatty():
        for line in plain_table(headers, rows):
            click.echo(line)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in headers:
        table.add_column(header, no_wrap=True)
    for row in rows:
        cells = [Text(cell) for cell in row]
        if state_column is not None:
            cells[state_column].stylize(STATE_STYLES.get(row[state_column], ""))
        table.add_row(*cells)
    console = Console()
    # Cells are never cut: on a narrow terminal the lines wrap.
    width = max(len(line) for line in plain_table(headers, rows))
    console.print(table, width=max(console.width, width), crop=False, no_wrap=True, soft_wrap=True)


def plain_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [list(headers), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def print_status(choices: Choices, status: ClusterStatus) -> None:
    choices.printed = True
    if choices.json:
        print_json(status)
        return
    print_brokers(status.brokers)
    supervisor = f"supervisor pid {status.supervisor_pid}" if status.supervisor_pid else "no supervisor"
    state = "ready" if status.ready else f"not ready: {status.unready()}"
    click.echo(f"cluster {status.cluster_id} in {status.data_dir}: {state} ({status.storage}, {supervisor})")
    for broker in status.brokers:
        if broker.failure is not None:
            click.echo(f"broker {broker.id} was given up: {broker.failure}")


def print_brokers(brokers: Sequence[BrokerStatus]) -> None:
    headers = ("BROKER", "STATE", "PID", "PORTS", "UPTIME", "LEADING", "REPLICAS", "RAFT")
    print_table(headers, [_broker_row(broker) for broker in brokers], state_column=1)


def _broker_row(broker: BrokerStatus) -> tuple[str, ...]:
    return (
        str(broker.id),
        broker.state,
        _or_dash(broker.pid),
        "/".join(str(port) for port in broker.ports.values()),
        "-" if broker.uptime_s is None else duration(broker.uptime_s),
        _or_dash(broker.leading),
        _or_dash(broker.partitions),
        "leader" if broker.controller else "",
    )


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def duration(seconds: float) -> str:
    """`4.2s`, `3m07s`, `5h02m`, `2d03h`: two units are enough."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, whole = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{whole:02}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02}m"
    return f"{hours // 24}d{hours % 24:02}h"
