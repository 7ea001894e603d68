"""Names of topics, groups and brokers: completed while they are typed, and told the nearest where one is wrong.

A completion must never be in the way: it asks once, for a moment, and without a cluster there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import click

from zmqueue.cli.options import Choices, listens, parse_addresses
from zmqueue.errors import GroupNotFound, UnknownTopicOrPartition, ZmqueueError

if TYPE_CHECKING:
    from zmqueue import Admin

COMPLETION_MS_MAX = 1_000
TOPIC_WAIT_S = 3.0


def nearest(name: str, known: Iterable[str]) -> str:
    matches = get_close_matches(name, list(known), n=1)
    return f", the nearest is {matches[0]}" if matches else ""


@contextmanager
def administering(choices: Choices, *, topic: str | None = None, group: str | None = None) -> Iterator[Admin]:
    """An administrator. Where the topic or group turns out not to be there, the error tells the nearest one's name."""
    bootstrap = choices.reachable_bootstrap()  # before the import, so that nobody waits for nothing

    from zmqueue import Admin

    with Admin(bootstrap_servers=bootstrap) as admin:
        try:
            yield admin
        except UnknownTopicOrPartition as error:
            if topic is None:
                raise
            raise no_topic(admin, topic, error) from None
        except GroupNotFound:
            if group is None:
                raise
            raise no_group(admin, group) from None


def no_topic(admin: Admin, name: str, error: UnknownTopicOrPartition) -> UnknownTopicOrPartition:
    """The error with the nearest name, if it is the topic that is missing and not a partition of it."""
    known = _listed(lambda: admin.list_topics(internal=True))
    found = nearest(name, known) if name not in known else ""
    return UnknownTopicOrPartition(f"no topic {name!r}{found}") if found else error


def partitions_for(producer: Any, choices: Choices, topic: str) -> set[int]:
    """A mistyped name is told at once; a topic just made by another command has a moment to be known everywhere."""
    try:
        known: set[int] = producer.partitions_for(topic, timeout=TOPIC_WAIT_S)
        return known
    except UnknownTopicOrPartition as error:
        with administering(choices) as admin:
            raise no_topic(admin, topic, error) from None


def no_group(admin: Admin, name: str) -> GroupNotFound:
    known = _listed(lambda: [found.group for found in admin.list_groups()])
    return GroupNotFound(f"no group {name!r}{nearest(name, known)}")


def _listed(question: Callable[[], list[str]]) -> list[str]:
    """Nothing where it cannot be asked: what was to be told is worth more than a suggestion."""
    try:
        return question()
    except ZmqueueError:
        return []


# -- completion --------------------------------------------------------------------------------------------------


def complete_topics(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    internal = incomplete.startswith("_")
    return _beginning(incomplete, _asked(context, lambda admin: admin.list_topics(internal=internal)))


def complete_groups(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    return _beginning(incomplete, _asked(context, lambda admin: [found.group for found in admin.list_groups()]))


def complete_brokers(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    from zmqueue.config import read_cluster_file

    try:
        cluster = read_cluster_file(_choices(context).data_dir)
    except (ZmqueueError, OSError):
        cluster = None
    return _beginning(incomplete, [str(member.id) for member in cluster.members] if cluster is not None else [])


def _asked(context: click.Context, question: Callable[[Any], list[str]]) -> list[str]:
    try:
        bootstrap = _choices(context).bootstrap
        # A port where nobody listens is known at once; an administrator would look for somebody until its time is over.
        if not any(listens(host, port) for host, port in parse_addresses(bootstrap)):
            return []

        from zmqueue import Admin

        with Admin(bootstrap_servers=bootstrap, request_timeout_ms=COMPLETION_MS_MAX) as admin:
            return question(admin)
    except (ZmqueueError, click.UsageError, OSError):
        return []


def _choices(context: click.Context) -> Choices:
    return context.find_object(Choices) or Choices()


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
