"""`group ls|describe|seek|rm`: consumer groups, how far they are behind, and where they go on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from zmqueue.cli.cluster import EXIT_NOT_FOUND
from zmqueue.cli.consume import Where, offsets_at, parse_where
from zmqueue.cli.names import administering, complete_groups, complete_topics, no_topic
from zmqueue.cli.options import Choices, Failed, bootstrap_option, output_option
from zmqueue.errors import GroupNotFound, NonEmptyGroup, UnknownTopicOrPartition

if TYPE_CHECKING:
    from zmqueue import Admin, TopicPartition
    from zmqueue.client.descriptions import GroupDescription, MemberDescription, PartitionLag

EXIT_TIMEOUT = 4
# So much of a member's id tells it from the others of its group.
ID_CHARACTERS = 8


@click.group()
@bootstrap_option
def group() -> None:
    """List, describe, move and remove consumer groups."""


@group.command("ls")
@bootstrap_option
@output_option
@click.pass_obj
def list_groups(choices: Choices) -> None:
    """List the groups.

    States: stable; moving (partitions change hands); empty (no members: only what was committed is left).
    """
    from zmqueue.cli.output import print_json, print_table

    with administering(choices) as admin:
        listing = admin.list_groups()
    choices.printed = True
    if choices.json:
        print_json(listing)
    else:
        rows = [(g.group, g.state, str(g.members), str(g.generation), g.assignor or "-") for g in listing]
        print_table(("GROUP", "STATE", "MEMBERS", "GENERATION", "ASSIGNOR"), rows)
    if listing.unanswered:
        brokers = ", ".join(map(str, listing.unanswered))
        raise Failed(EXIT_TIMEOUT, f"groups may be missing: no answer from broker {brokers}")


# -- describe ------------------------------------------------------------------------------------------------------


@group.command()
@click.argument("name", metavar="GROUP", shell_complete=complete_groups)
@bootstrap_option
@output_option
@click.pass_obj
def describe(choices: Choices, name: str) -> None:
    """Show GROUP: its members, and how far it is behind in each partition.

    LAG: records between what is committed and what may be read (an upper bound, where a topic is compacted). BEHIND:
    how old the first of them is. A dash: not known, or nothing committed yet.
    """
    from zmqueue.cli.output import print_json, print_table

    with administering(choices, group=name) as admin:
        found = admin.describe_group(name)
        lags = admin.group_lag(name)
    choices.printed = True
    if choices.json:
        print_json(group_json(found, lags))
        return
    members = f"{len(found.members)} member{'' if len(found.members) == 1 else 's'}"
    assignor = f", assignor {found.assignor}" if found.assignor else ""
    total = _total(lags)
    click.echo(f"{name}: {found.state}, {members}, generation {found.generation}{assignor}, lag {_or_dash(total)}")
    if found.members:
        click.echo("")
        print_table(("MEMBER", "CLIENT", "INSTANCE", "HOLDS", "WILL HOLD"), list(map(_member_row, found.members)))
    if lags:
        click.echo("")
        headers = ("TOPIC", "PARTITION", "COMMITTED", "END", "LAG", "BEHIND", "OWNER")
        print_table(headers, list(map(_lag_row, lags)))


def group_json(found: GroupDescription, lags: list[PartitionLag]) -> dict[str, Any]:
    import msgspec

    return {**msgspec.to_builtins(found), "lag": _total(lags), "partitions": msgspec.to_builtins(lags)}


def _total(lags: Iterable[PartitionLag]) -> int | None:
    """None where not one partition's is known."""
    known = [row.lag for row in lags if row.lag is not None]
    return sum(known) if known else None


def _member_row(member: MemberDescription) -> tuple[str, ...]:
    return (
        member.member_id,
        member.client_id,
        member.instance_id or "-",
        str(len(member.assignment)),
        str(len(member.target)),
    )


def _lag_row(row: PartitionLag) -> tuple[str, ...]:
    from zmqueue.cli.output import duration

    return (
        row.topic,
        str(row.partition),
        _or_dash(row.committed),
        _or_dash(row.log_end),
        _or_dash(row.lag),
        "-" if row.lag_seconds is None else duration(row.lag_seconds),
        "-" if row.member_id is None else f"{row.client_id} {row.member_id[:ID_CHARACTERS]}",
    )


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)


# -- seek ----------------------------------------------------------------------------------------------------------


@group.command()
@click.argument("name", metavar="GROUP", shell_complete=complete_groups)
@click.option(
    "--to",
    "where",
    required=True,
    metavar="start|end|N|-N|@TIME",
    help="An end, an offset, N before the end (per partition), or a time (ISO or ms).",
)
@click.option(
    "--topic",
    "topics",
    multiple=True,
    shell_complete=complete_topics,
    help="Only this topic; repeatable.  [default: those that the group has committed offsets of]",
)
@click.option(
    "-p",
    "--partition",
    "partitions",
    type=click.IntRange(min=0),
    multiple=True,
    help="Only this partition of the one --topic; repeatable.  [default: all]",
)
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@bootstrap_option
@output_option
@click.pass_obj
def seek(
    choices: Choices,
    name: str,
    where: str,
    topics: tuple[str, ...],
    partitions: tuple[int, ...],
    dry_run: bool,
) -> None:
    """Let GROUP go on elsewhere: back, to read records again, or ahead, to skip them.

    The group must have no members: stop its consumers, seek, and start them again. An offset that a partition does not
    have becomes its nearest end. A group that nobody has heard of is made by it; name its topics then.
    """
    from zmqueue.cli.output import print_json, print_table, say

    begin = parse_where(where, "--to")
    if partitions and len(set(topics)) != 1:
        raise click.UsageError("-p needs one --topic, whose partitions are meant")
    with administering(choices, group=name) as admin:
        members = _members_of(admin, name, new=bool(topics))
        if members and not dry_run:
            raise _has_members(name, members)
        committed = {p: at.offset for p, at in admin.group_offsets(name).items()} if members is not None else {}
        chosen = _chosen(admin, name, topics or sorted({p.topic for p in committed}), set(partitions))
        to = offsets_to(choices.bootstrap, chosen, begin)
        if not dry_run:
            try:
                admin.set_group_offsets(name, to)
            except NonEmptyGroup:  # somebody joined meanwhile
                raise _has_members(name, _members_of(admin, name, new=True) or []) from None
    choices.printed = True
    if choices.json:
        moved = [
            {"topic": each.topic, "partition": each.partition, "from": committed.get(each), "to": offset}
            for each, offset in to.items()
        ]
        print_json({"group": name, "action": "seek", "dry_run": dry_run, "partitions": moved})
    else:
        rows = [(p.topic, str(p.partition), _or_dash(committed.get(p)), str(offset)) for p, offset in to.items()]
        print_table(("TOPIC", "PARTITION", "FROM", "WOULD GO TO" if dry_run else "TO"), rows)
    if dry_run:
        clients = f"; {_named(members)} would have to stop first" if members else ""
        say(f"nothing was changed{clients}")


def _members_of(admin: Admin, name: str, *, new: bool) -> list[MemberDescription] | None:
    """None: there is no such group, and there may be a `new` one."""
    try:
        return admin.describe_group(name).members
    except GroupNotFound:
        if not new:
            raise
        return None


def _has_members(name: str, members: list[MemberDescription]) -> Failed:
    text = (
        f"group {name!r} has {_named(members)}, who would go on where they are: stop them, seek, and start them again"
    )
    return Failed(1, text)


def _named(members: list[MemberDescription]) -> str:
    clients = sorted({member.client_id for member in members})
    names = ", ".join(clients[:3]) + (", …" if len(clients) > 3 else "")
    return f"{len(members)} member{'' if len(members) == 1 else 's'} ({names})"


def _chosen(admin: Admin, group_name: str, topics: Iterable[str], numbers: set[int]) -> list[TopicPartition]:
    from zmqueue import TopicPartition

    chosen = []
    for topic in topics:
        try:
            known = {partition.partition for partition in admin.describe_topic(topic).partitions}
        except UnknownTopicOrPartition as error:
            raise no_topic(admin, topic, error) from None
        if missing := sorted(numbers - known):
            raise Failed(EXIT_NOT_FOUND, f"topic {topic!r} has no partition {missing[0]}: there are 0 to {max(known)}")
        chosen += [TopicPartition(topic, number) for number in sorted(numbers or known)]
    if not chosen:
        raise Failed(EXIT_NOT_FOUND, f"group {group_name!r} has committed nothing: say which --topic it is to read")
    return chosen


def offsets_to(bootstrap: str, partitions: list[TopicPartition], where: Where) -> dict[TopicPartition, int]:
    """The offset of that place in each partition, and never one that the partition does not have."""
    from zmqueue import Consumer

    with Consumer(bootstrap_servers=bootstrap, enable_auto_commit=False) as consumer:
        found = offsets_at(consumer, partitions, where)
        first, ends = consumer.beginning_offsets(partitions), consumer.end_offsets(partitions)
    return {
        each: ends[each] if (at := found[each]) is None else min(max(at, first[each]), ends[each])
        for each in partitions
    }


# -- rm --------------------------------------------------------------------------------------------------------------


@group.command("rm")
@click.argument("name", metavar="GROUP", shell_complete=complete_groups)
@bootstrap_option
@output_option
@click.pass_obj
def remove(choices: Choices, name: str) -> None:
    """Delete GROUP and what it has committed. It must have no members."""
    from zmqueue.cli.output import result

    with administering(choices, group=name) as admin:
        try:
            admin.delete_group(name)
        except NonEmptyGroup:
            members = _members_of(admin, name, new=True) or []
            raise Failed(1, f"group {name!r} has {_named(members)}: stop them first") from None
    result(choices, {"group": name, "action": "rm"}, f"deleted group {name}")
