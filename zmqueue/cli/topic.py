"""`topic create|ls|describe|alter|add-partitions|delete-records|rm|recover`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from zmqueue.cli.cluster import EXIT_UNHEALTHY
from zmqueue.cli.names import administering, complete_topics
from zmqueue.cli.options import Choices, Failed, bootstrap_option, output_option


@click.group()
@bootstrap_option
def topic() -> None:
    """Create, list, describe, alter, extend, empty, remove and recover topics."""


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
    with administering(choices, topic=name) as admin:
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

    with administering(choices) as admin:
        names = sorted(admin.list_topics())
    choices.printed = True
    if choices.json:
        print_json(names)
    else:
        for name in names:
            click.echo(name)


@topic.command()
@click.argument("name", shell_complete=complete_topics)
@bootstrap_option
@output_option
@click.pass_obj
def describe(choices: Choices, name: str) -> None:
    """Show topic NAME: its settings, and each partition's leader, replicas and offsets.

    ISR: replicas in sync. START and END: the first offset that is there, and the one after the last that consumers may
    read.
    """
    from zmqueue.cli.output import print_json, print_table

    with administering(choices, topic=name) as admin:
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


@topic.command()
@click.argument("name", shell_complete=complete_topics)
@click.option("-c", "--config", "pairs", multiple=True, metavar="KEY=VALUE", help="Set this; repeatable.")
@click.option("--unset", multiple=True, metavar="KEY", help="Back to the default; repeatable.")
@bootstrap_option
@output_option
@click.pass_obj
def alter(choices: Choices, name: str, pairs: tuple[str, ...], unset: tuple[str, ...]) -> None:
    """Change settings of topic NAME. They hold at once; those about segments, from the next segment on."""
    from zmqueue.cli.output import result

    changes: dict[str, str | None] = dict(parse_settings(pairs))
    for key in unset:
        if key in changes:
            raise click.UsageError(f"{key} is both set and unset")
        changes[key] = None
    if not changes:
        raise click.UsageError("nothing to change: give -c KEY=VALUE or --unset KEY")
    with administering(choices, topic=name) as admin:
        config = admin.alter_topic_config(name, changes)
    given = ", ".join(f"{key}={value}" for key, value in sorted(config.items())) or "all settings at their defaults"
    result(choices, {"name": name, "action": "alter", "config": dict(config)}, f"{name}: {given}")


@topic.command("add-partitions")
@click.argument("name", shell_complete=complete_topics)
@click.argument("total", type=click.IntRange(min=1), metavar="N")
@bootstrap_option
@output_option
@click.pass_obj
def add_partitions(choices: Choices, name: str, total: int) -> None:
    """Let topic NAME have N partitions; there is no way back.

    Records stay where they are, but most keys belong to another partition from then on: whoever needs the records of a
    key in order must have read what was written before.
    """
    from zmqueue.cli.output import result, say

    with administering(choices, topic=name) as admin:
        before = len(admin.describe_topic(name).partitions)
        made = admin.create_partitions(name, total)
    say(f"keys map to other partitions from now on: a key's older records may lie in one of the first {before}")
    found = {"name": name, "action": "add-partitions", "before": before, "partitions": len(made.partitions)}
    result(choices, found, f"{name} has {len(made.partitions)} partitions")


@topic.command("delete-records")
@click.argument("name", shell_complete=complete_topics)
@click.option("-p", "--partition", type=click.IntRange(min=0), required=True)
@click.option(
    "--before",
    type=click.IntRange(min=-1),
    required=True,
    metavar="OFFSET",
    help="The first record to keep; -1 deletes all that consumers may read.",
)
@click.option("--yes", is_flag=True, help="Required: the records are gone for good.")
@bootstrap_option
@output_option
@click.pass_obj
def delete_records(choices: Choices, name: str, partition: int, before: int, yes: bool) -> None:
    """Delete the records of one partition of topic NAME that lie before an offset."""
    from zmqueue.cli.output import result
    from zmqueue.model import TopicPartition

    if not yes:
        what = "all records" if before == -1 else f"the records before offset {before}"
        raise click.UsageError(f"this deletes {what} of {name}-{partition}: confirm with --yes")
    with administering(choices, topic=name) as admin:
        (log_start,) = admin.delete_records({TopicPartition(name, partition): before}).values()
    found = {"name": name, "action": "delete-records", "partition": partition, "log_start": log_start}
    result(choices, found, f"{name}-{partition} begins at offset {log_start}")


@topic.command("rm")
@click.argument("name", shell_complete=complete_topics)
@click.option("--yes", is_flag=True, help="Required: the records are gone for good.")
@bootstrap_option
@output_option
@click.pass_obj
def remove(choices: Choices, name: str, yes: bool) -> None:
    """Delete topic NAME with all its records."""
    from zmqueue.cli.output import result

    if not yes:
        raise click.UsageError(f"this deletes topic {name!r} and all its records: confirm with --yes")
    with administering(choices, topic=name) as admin:
        admin.delete_topic(name)
    result(choices, {"name": name, "action": "rm"}, f"deleted topic {name}")


@topic.command()
@click.argument("name", shell_complete=complete_topics)
@click.option("--accept-data-loss", is_flag=True, help="Required: what the chosen copies lack is gone for good.")
@bootstrap_option
@output_option
@click.pass_obj
def recover(choices: Choices, name: str, accept_data_loss: bool) -> None:
    """Give partitions of topic NAME that wait in vain a leader, with what is left of their records.

    A partition waits when every broker that surely has all acknowledged records is away or has lost its disk. As long
    as one of those may come back, start it instead: nothing is lost then. Otherwise the fullest copy there is may lead.
    """
    from zmqueue.cli.output import print_json, print_table, result

    with administering(choices, topic=name) as admin:
        plan = recovery_plan(admin.describe_topic(name).partitions, admin.describe_replicas(name))
        if accept_data_loss:
            for row in plan:
                if row["chosen"] is not None:
                    admin.elect_unclean(name, row["partition"], row["chosen"])
    if not plan:
        result(choices, [], f"every partition of {name} has a leader")
        return
    choices.printed = True
    if choices.json:
        print_json(plan)
    else:
        headers = (
            "PARTITION",
            "WAITS FOR",
            "COPIES: BROKER (END, EPOCH)",
            "LEADER" if accept_data_loss else "WOULD LEAD",
        )
        print_table(headers, [_recovery_row(row) for row in plan])
    if not accept_data_loss:
        raise Failed(EXIT_UNHEALTHY, "nothing was changed: --accept-data-loss lets these copies lead")
    if lacking := sum(row["chosen"] is None for row in plan):
        raise Failed(EXIT_UNHEALTHY, f"{lacking} partitions have no copy on a broker that serves")


def recovery_plan(partitions: Iterable[Any], replicas: Iterable[Any]) -> list[dict[str, Any]]:
    """For each partition without a leader: whom it waits for, and the copy with most of its history."""
    copies: dict[int, list[Any]] = {}
    for replica in replicas:
        copies.setdefault(replica.partition, []).append(replica)
    plan = []
    for partition in partitions:
        if partition.leader >= 0:
            continue
        found = copies.get(partition.partition, [])
        best = max(found, key=lambda replica: (replica.last_epoch, replica.log_end), default=None)
        plan.append(
            {
                "partition": partition.partition,
                "waits_for": sorted({*partition.isr, *partition.elr}),
                "copies": [{"broker": r.broker, "log_end": r.log_end, "last_epoch": r.last_epoch} for r in found],
                "chosen": None if best is None else best.broker,
            }
        )
    return plan


def _recovery_row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(row["partition"]),
        ",".join(map(str, row["waits_for"])) or "nobody",
        "  ".join(f"{copy['broker']} ({copy['log_end']}, {copy['last_epoch']})" for copy in row["copies"]) or "none",
        "none" if row["chosen"] is None else str(row["chosen"]),
    )
