"""`topic create|ls|describe|rm`."""

from __future__ import annotations

from typing import Any

import click

from zmqueue.cli.options import Choices, bootstrap_option, output_option


@click.group()
@bootstrap_option
def topic() -> None:
    """Create, list, describe and remove topics."""


def _admin(choices: Choices) -> Any:
    bootstrap = choices.reachable_bootstrap()  # before the import, so that nobody waits for nothing

    from zmqueue import Admin

    return Admin(bootstrap_servers=bootstrap)


def parse_settings(pairs: tuple[str, ...]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise click.UsageError(f"-c {pair!r} is not KEY=VALUE")
        if key in settings:
            raise click.UsageError(f"-c {key} is given twice")
        settings[key] = value
    return settings


@topic.command()
@click.argument("name")
@click.option("-p", "--partitions", type=click.IntRange(min=1), help="[default: topics.default_partitions]")
@click.option("-r", "--replicas", type=click.IntRange(min=1), help="[default: topics.replication_factor]")
@click.option("-c", "--config", "pairs", multiple=True, metavar="KEY=VALUE", help="A setting of the topic; repeatable.")
@bootstrap_option
@output_option
@click.pass_obj
def create(choices: Choices, name: str, partitions: int | None, replicas: int | None, pairs: tuple[str, ...]) -> None:
    """Create topic NAME."""
    from zmqueue.cli.output import result
    from zmqueue.model import check_topic_name

    check_topic_name(name)
    settings = parse_settings(pairs)
    with _admin(choices) as admin:
        admin.create_topic(name, num_partitions=partitions, replication_factor=replicas, config=settings)
        made = admin.describe_topic(name) if choices.json else None
    result(choices, None if made is None else topic_json(made), f"created topic {name}")


@topic.command("ls")
@bootstrap_option
@output_option
@click.pass_obj
def list_topics(choices: Choices) -> None:
    """List the topics, one name a line."""
    from zmqueue.cli.output import print_json

    with _admin(choices) as admin:
        names = sorted(admin.list_topics())
    choices.printed = True
    if choices.json:
        print_json(names)
    else:
        for name in names:
            click.echo(name)


@topic.command()
@click.argument("name")
@bootstrap_option
@output_option
@click.pass_obj
def describe(choices: Choices, name: str) -> None:
    """Show topic NAME: its settings, and each partition's leader, replicas and offsets.

    ISR: replicas in sync. START and END: the first offset that is there, and the one after the last that consumers may
    read.
    """
    from zmqueue.cli.output import print_json, print_table

    with _admin(choices) as admin:
        found = topic_json(admin.describe_topic(name))
    choices.printed = True
    if choices.json:
        print_json(found)
        return
    settings = "".join(f", {key}={value}" for key, value in sorted(found["config"].items()))
    count = len(found["partitions"])
    click.echo(f"{name}: {count} partitions, replication factor {found['replication_factor']}{settings}")
    headers = ("PARTITION", "LEADER", "EPOCH", "REPLICAS", "ISR", "START", "END")
    print_table(headers, [_partition_row(partition) for partition in found["partitions"]])


def topic_json(found: Any) -> dict[str, Any]:
    topic_id = found.topic_id
    return {
        "name": found.name,
        "topic_id": topic_id.hex() if isinstance(topic_id, bytes) else str(topic_id),
        "replication_factor": found.replication_factor,
        "config": dict(found.config),
        "partitions": [_partition_json(partition) for partition in found.partitions],
    }


def _partition_json(partition: Any) -> dict[str, Any]:
    lists = {name: list(getattr(partition, name)) for name in ("replicas", "isr", "elr")}
    # Offsets are known only to a leader that answers.
    offsets = {name: _offset(partition, name) for name in ("log_start", "high_watermark", "log_end")}
    own = {name: getattr(partition, name) for name in ("partition", "leader", "leader_epoch")}
    return own | lists | offsets


def _offset(partition: Any, name: str) -> int | None:
    value = getattr(partition, name, None)
    return None if value is None or value < 0 else int(value)


def _partition_row(partition: dict[str, Any]) -> tuple[str, ...]:
    start, end = partition["log_start"], partition["high_watermark"]
    return (
        str(partition["partition"]),
        str(partition["leader"]) if partition["leader"] >= 0 else "none",
        str(partition["leader_epoch"]),
        ",".join(map(str, partition["replicas"])),
        ",".join(map(str, partition["isr"])),
        "-" if start is None else str(start),
        "-" if end is None else str(end),
    )


@topic.command("rm")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Required: the records are gone for good.")
@bootstrap_option
@output_option
@click.pass_obj
def remove(choices: Choices, name: str, yes: bool) -> None:
    """Delete topic NAME with all its records."""
    from zmqueue.cli.output import result

    if not yes:
        raise click.UsageError(f"this deletes topic {name!r} and all its records: confirm with --yes")
    with _admin(choices) as admin:
        admin.delete_topic(name)
    result(choices, {"name": name, "action": "rm"}, f"deleted topic {name}")
