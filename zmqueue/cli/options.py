"""Options that many commands share. Each may stand before or after the command's name and arguments."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_BOOTSTRAP = "127.0.0.1:9092"


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
        text = self.given_bootstrap or os.environ.get("ZMQUEUE_BOOTSTRAP") or DEFAULT_BOOTSTRAP
        for part in text.split(","):
            host, _, port = part.strip().rpartition(":")
            if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65_536:
                raise click.UsageError(f"--bootstrap: {part!r} is not HOST:PORT")
        return text


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
