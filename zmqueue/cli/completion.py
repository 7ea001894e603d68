"""`completion bash|zsh|fish`: a script that lets the shell ask `zmqueue` itself what may come next.

The script calls `zmqueue` with `_ZMQUEUE_COMPLETE` set, and what has been typed in the environment. For zsh and fish
the conversation is click's own. Bash cuts words also at `:` and `=`, which stand in addresses and may stand in names of
groups: there the line travels whole, and of what is found only the part behind the last cut goes back.
"""

from __future__ import annotations

import os
import shlex
from typing import Any

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete, split_arg_string

from zmqueue.cli.options import Choices

VARIABLE = "_ZMQUEUE_COMPLETE"
PROGRAM = "zmqueue"

_BASH = """\
%(complete_func)s() {
    local type value
    COMPREPLY=()
    while IFS=',' read -r type value; do
        case $type in
            dir) compopt -o dirnames 2>/dev/null ;;
            file) compopt -o default 2>/dev/null ;;
            plain) COMPREPLY+=("$value") ;;
        esac
    done < <(COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS" \\
        %(complete_var)s=bash_complete "$1" 2>/dev/null)
}

complete -o nosort -F %(complete_func)s %(prog_name)s 2>/dev/null || complete -F %(complete_func)s %(prog_name)s
"""


class Bash(BashComplete):
    source_template = _BASH

    def source(self) -> str:
        return ShellComplete.source(self)  # BashComplete would start a shell to ask for its version

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_LINE"]
        words = split_arg_string(line)[1:]
        # A line that ends in a space, and not within a word, asks for the next one.
        if not words or split_arg_string(line + "x")[1:] != [*words[:-1], words[-1] + "x"]:
            return words, ""
        return words[:-1], words[-1]

    def complete(self) -> str:
        args, incomplete = self.get_completion_args()
        breaks = os.environ.get("COMP_WORDBREAKS", "")
        kept = 1 + max(incomplete.rfind(cut) for cut in ":=") if {":", "="} & set(breaks) else 0
        lines = []
        for item in self.get_completions(args, incomplete):
            text = item.value[kept:] if item.value.startswith(incomplete) else item.value
            lines.append(f"{item.type},{shlex.quote(text) if item.type == 'plain' and text else text}")
        return "\n".join(lines)


SHELLS: dict[str, type[ShellComplete]] = {"bash": Bash, "zsh": ZshComplete, "fish": FishComplete}


def answer(root: click.Command, instruction: str) -> int:
    """What a script asks by `_ZMQUEUE_COMPLETE`; returns the exit code."""
    shell, _, verb = instruction.partition("_")
    if shell not in SHELLS or verb != "complete":
        return 1
    arguments: dict[str, Any] = {"obj": Choices()}
    click.echo(SHELLS[shell](root, arguments, PROGRAM, VARIABLE).complete())
    return 0


@click.command()
@click.argument("shell", type=click.Choice(list(SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that completes commands, options, and the names of topics and groups.

    \b
    bash, in ~/.bashrc:
        eval "$(zmqueue completion bash)"
    zsh, in ~/.zshrc, after compinit:
        eval "$(zmqueue completion zsh)"
    fish, once:
        zmqueue completion fish > ~/.config/fish/completions/zmqueue.fish

    Names are asked of the cluster that the line names (--bootstrap, ZMQUEUE_BOOTSTRAP or the default), for a second at
    most; where none answers there are no names to choose from.
    """
    root = context.find_root().command
    click.echo(SHELLS[shell](root, {}, PROGRAM, VARIABLE).source(), nl=False)
