"""A mutation replaces a few functions of the code under test for a while, and puts them back afterwards.

Nothing in the product knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

Put = Callable[[Any, str, Any], None]
TakeOut = Callable[[Put], None]

_INHERITED = object()


class Mutation(NamedTuple):
    rule: str
    take_out: TakeOut
    among: str | None  # the profile of the schedules in which the rule matters most; None: all of them


MUTATIONS: dict[str, Mutation] = {}


def mutation(rule: str, among: str | None = None) -> Callable[[TakeOut], TakeOut]:
    def register(take_out: TakeOut) -> TakeOut:
        MUTATIONS[take_out.__name__.replace("_", "-")] = Mutation(rule, take_out, among)
        return take_out

    return register


@contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """The product without one of its rules."""
    undo: list[tuple[Any, str, Any]] = []

    def put(owner: Any, attribute: str, value: Any) -> None:
        undo.append((owner, attribute, owner.__dict__.get(attribute, _INHERITED)))
        setattr(owner, attribute, value)

    try:
        if name is not None:
            MUTATIONS[name].take_out(put)
        yield
    finally:
        for owner, attribute, value in reversed(undo):
            if value is _INHERITED:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, value)
