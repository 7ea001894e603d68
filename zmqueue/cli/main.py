"""The command line: finds the command, runs it, and turns whatever happens into one line and an exit code.

A command's module is imported when the command is, and what is heavy (sockets, tables) inside its function, so that
`zmqueue --help` is there at once. Results go to stdout, everything else to stderr.

Exit codes: 0 ok, 1 error, 2 usage, 3 not found, 4 timeout, 5 unhealthy, 78 bad configuration, 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from zmqueue.cli.names import nearest
from zmqueue.cli.options import Choices, Failed, bootstrap_option, data_dir_option, output_option
from zmqueue.errors import (
    ConfigError,
    DeliveryTimeout,
    FutureFormat,
    GroupNotFound,
    RequestTimedOut,
    UnknownTopicId,
    UnknownTopicOrPartition,
    ZmqueueError,
)

COMMANDS = {
    "up": "zmqueue.cli.cluster:up",
    "down": "zmqueue.cli.cluster:down",
    "status": "zmqueue.cli.cluster:status",
    "health": "zmqueue.cli.cluster:health",
    "restart": "zmqueue.cli.broker:restart_everything",
    "broker": "zmqueue.cli.broker:broker",
    "topic": "zmqueue.cli.topic:topic",
    "produce": "zmqueue.cli.produce:produce",
    "consume": "zmqueue.cli.consume:consume",
    "export": "zmqueue.cli.transfer:export",
    "import": "zmqueue.cli.transfer:import_",
    "group": "zmqueue.cli.group:group",
    "log": "zmqueue.cli.log:log",
    "config": "zmqueue.cli.settings:config",
    "completion": "zmqueue.cli.completion:completion",
    "version": "zmqueue.cli.main:version",
}

EXIT_CODES: dict[type[ZmqueueError], int] = {
    GroupNotFound: 3,
    UnknownTopicOrPartition: 3,
    UnknownTopicId: 3,
    RequestTimedOut: 4,
    DeliveryTimeout: 4,
    ConfigError: 78,
    FutureFormat: 78,
}


class Root(click.Group):
    """Commands by name, imported when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        target = COMMANDS.get(cmd_name)
        if target is None:
            return None
        module, _, name = target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"no command {args[0]!r}{nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> NoReturn:
        if instruction := os.environ.get("_ZMQUEUE_COMPLETE"):
            from zmqueue.cli.completion import answer

            sys.exit(answer(self, instruction))
        # click's own main answers a closed pipe with 1 and prints several lines for a usage error.
        sys.exit(run(self, list(sys.argv[1:] if args is None else args), extra.get("obj")))


@click.group(cls=Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="zmqueue", message="%(prog)s %(version)s")
@data_dir_option
@bootstrap_option
def cli() -> None:
    """zmqueue: a message queue over ZeroMQ.

    Exit codes: 0 ok, 1 error, 2 usage, 3 not found, 4 timeout, 5 unhealthy, 78 bad configuration, 130 interrupted.
    """


@click.command()
@output_option
@click.pass_obj
def version(choices: Choices) -> None:
    """Show the version of zmqueue and of what it stands on."""
    from importlib import metadata

    from zmqueue import __version__
    from zmqueue.cli.output import print_json

    if choices.json:
        names = ("pyzmq", "pysyncobj", "cbor2", "msgspec")
        print_json({"zmqueue": __version__, "python": sys.version.split()[0]} | {n: metadata.version(n) for n in names})
    else:
        click.echo(f"zmqueue {__version__}")


def run(root: click.Command, args: list[str], choices: Choices | None = None) -> int:
    """Runs one command line; returns its exit code."""
    choices = choices or Choices()
    try:
        try:
            with root.make_context("zmqueue", args, obj=choices) as context:
                root.invoke(context)
        finally:
            sys.stdout.flush()
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.UsageError as error:
        hint = f" (see {error.ctx.command_path} --help)" if error.ctx is not None else ""
        return report(choices, f"{error.format_message()}{hint}", error.exit_code)
    except click.ClickException as error:
        return report(choices, error.format_message(), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return report(choices, "interrupted", 130)
    except Failed as error:
        return report(choices, str(error), error.exit_code) if str(error) else error.exit_code
    except ZmqueueError as error:
        return report(choices, str(error), exit_code(error), error.name)
    except OSError as error:
        if error.errno == errno.EPIPE:
            return _closed_pipe()
        return report(choices, f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)
    return 0


def exit_code(error: ZmqueueError) -> int:
    own = getattr(error, "exit_code", None)
    if own is not None:
        return int(own)
    return next((code for cls, code in EXIT_CODES.items() if isinstance(error, cls)), 1)


def report(choices: Choices, message: str, code: int, name: str = "") -> int:
    """One line on stderr; where JSON was asked for and none came yet, a JSON document as well."""
    line = " ".join(message.split())
    print(f"zmqueue: {line}".encode(errors="backslashreplace").decode(), file=sys.stderr, flush=True)
    if choices.json and not choices.printed:
        from zmqueue.cli.output import print_json

        try:
            print_json({"error": {"name": name or "ERROR", "message": line, "exit_code": code}})
            sys.stdout.flush()
        except BrokenPipeError:
            _closed_pipe()
    return code


def _closed_pipe() -> int:
    """Whoever read our output has seen enough. Python must not complain about it once more at its end."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it lives as long as the process
    return 0


def main() -> NoReturn:
    cli.main()
