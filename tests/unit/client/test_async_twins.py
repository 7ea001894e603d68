"""The clients for asyncio have the names and the arguments of those that block."""

from __future__ import annotations

import inspect

import pytest

from zmqueue import AsyncConsumer, AsyncProducer, Consumer, Producer

# A task is cancelled instead.
ABSENT = {"wakeup"}


def names(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


@pytest.mark.parametrize(("blocking", "twin"), [(Producer, AsyncProducer), (Consumer, AsyncConsumer)])
def test_every_call_has_its_twin_with_the_same_arguments(blocking: type, twin: type) -> None:
    assert names(blocking) - names(twin) == ABSENT & names(blocking)
    for name in names(blocking) & names(twin):
        ours, theirs = (inspect.signature(getattr(cls, name)).parameters for cls in (twin, blocking))
        assert [(p.name, p.kind, p.default) for p in ours.values()] == [
            (p.name, p.kind, p.default) for p in theirs.values()
        ], name


@pytest.mark.parametrize("twin", [AsyncProducer, AsyncConsumer])
def test_every_call_but_metrics_is_awaited(twin: type) -> None:
    calls = {name for name in names(twin) if not inspect.iscoroutinefunction(getattr(twin, name))}
    assert calls == {"metrics"}
