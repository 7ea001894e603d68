"""`config show`: the settings that hold, and where each came from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zmqueue.cli.options import Choices, data_dir_option, output_option

if TYPE_CHECKING:
    from zmqueue.config import Loaded


@click.group()
@data_dir_option
def config() -> None:
    """Show the settings."""


@config.command()
@data_dir_option
@click.option("--config", "config_file", type=click.Path(path_type=Path), metavar="FILE", help="Settings, as TOML.")
@click.option("--origin", is_flag=True, help="Tell where each value comes from.")
@output_option
@click.pass_obj
def show(choices: Choices, config_file: Path | None, origin: bool) -> None:
    """Show every setting as it holds for the data folder: defaults, file, environment, and what the cluster keeps."""
    from zmqueue.cli.output import print_json
    from zmqueue.config import load, read_cluster_file, with_cluster

    loaded = load(config_file, os.environ, {"cluster.data_dir": choices.given_data_dir})
    data_dir = Path(loaded.config.cluster.data_dir).absolute()
    cluster = read_cluster_file(data_dir)
    if cluster is not None:
        loaded = with_cluster(loaded, cluster, data_dir)
    choices.printed = True
    if choices.json:
        print_json(as_json(loaded, origin))
    else:
        click.echo("\n".join(as_toml(loaded, origin)))


def as_json(loaded: Loaded, origin: bool) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    for key, from_ in loaded.origin.items():
        section, name = key.split(".")
        value = getattr(getattr(loaded.config, section), name)
        tables.setdefault(section, {})[name] = {"value": value, "origin": from_} if origin else value
    return tables


def as_toml(loaded: Loaded, origin: bool) -> list[str]:
    """Lines that are valid TOML again."""
    import json

    lines: list[str] = []
    for section, values in as_json(loaded, origin=True).items():
        lines += [f"[{section}]"] if not lines else ["", f"[{section}]"]
        for name, item in values.items():
            setting = f"{name} = {json.dumps(item['value'])}"
            lines.append(f"{setting:<40}# {item['origin']}" if origin else setting)
    return lines
