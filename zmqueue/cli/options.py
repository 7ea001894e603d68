"""Options that many commands share. Each may stand before or after the command's name and arguments."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from zmqueue.errors import NoBrokersAvailable, ZmqueueError

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_BOOTSTRAP = "127.0.0.1:9092"
# A broker that is just being restarted is worth a moment.
REACHABLE_S_MAX = 2.0
REACHABLE_PAUSE_S = 0.1


class Failed(Exception):
    """A command that ends with this exit code, having said why (or saying it in `message`)."""

    def __init__(self, exit_code: int, message: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Choices:
    """What the shared options were set to, wherever on the line they stood; the last one wins."""

    def __init__(self) -> None:
        self.given_data_dir: str | None = None
        self.given_bootstrap: str | None = None
        self.json = False
        self.printed = False

    @property
    def data_dir(self) -> Path:
        return Path(self.given_data_dir or os.environ.get("ZMQUEUE_DATA_DIR") or "./data").absolute()

    @property
    def bootstrap(self) -> str:
        text = self.given_bootstrap or os.environ.get("ZMQUEUE_BOOTSTRAP")
        if not text:
            return self._default_bootstrap()
        parse_addresses(text)
        return text

    def _default_bootstrap(self) -> str:
        """The default address, with its fellows where the data folder knows them: any one of them may be down."""
        from zmqueue.config import read_cluster_file

        try:
            cluster = read_cluster_file(self.data_dir)
        except ZmqueueError:
            return DEFAULT_BOOTSTRAP  # not this command's business
        known = [f"{member.host}:{member.client}" for member in cluster.members] if cluster is not None else []
        return ",".join(known) if DEFAULT_BOOTSTRAP in known else DEFAULT_BOOTSTRAP

    def reachable_bootstrap(self) -> str:
        """The bootstrap servers, if anybody is there at all: clients are patient, somebody at a terminal is not."""
        text = self.bootstrap
        addresses = parse_addresses(text)
        deadline_s = time.monotonic() + REACHABLE_S_MAX
        while not any(listens(host, port) for host, port in addresses):
            if time.monotonic() >= deadline_s:
                raise NoBrokersAvailable(f"no broker listens at {text}: is the cluster up? (see zmqueue status)")
            time.sleep(REACHABLE_PAUSE_S)
        return text


def parse_addresses(text: str) -> list[tuple[str, int]]:
    addresses = []
    for part in text.split(","):
        host, _, port = part.strip().rpartition(":")
        if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65_536:
            raise click.UsageError(f"--bootstrap: {part!r} is not HOST:PORT")
        addresses.append((host, int(port)))
    return addresses


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=0.5).close()
    except OSError:
        return False
    return True


def _keep(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def keep(context: click.Context, _parameter: click.Parameter, value: Any) -> None:
        if value is not None:
            setattr(context.find_object(Choices), name, value)

    return keep


data_dir_option = click.option(
    "--data-dir",
    metavar="DIR",
    expose_value=False,
    callback=_keep("given_data_dir"),
    help="The cluster's folder.  [env: ZMQUEUE_DATA_DIR; default: ./data]",
)
bootstrap_option = click.option(
    "--bootstrap",
    metavar="HOST:PORT,…",
    expose_value=False,
    callback=_keep("given_bootstrap"),
    help=f"Brokers to ask first.  [env: ZMQUEUE_BOOTSTRAP; default: {DEFAULT_BOOTSTRAP}]",
)


def _keep_output(context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        choices = context.find_object(Choices)
        assert choices is not None
        choices.json = value == "json"


output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    expose_value=False,
    callback=_keep_output,
    help="How to print the result: text, or one JSON document.  [default: text]",
)
