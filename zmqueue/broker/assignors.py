"""Custom assignors, loaded from the configuration: `[groups] assignors = {mine = "package.module:name"}`."""

from __future__ import annotations

import importlib

from zmqueue.config import GroupsConfig, SettingError
from zmqueue.core.assignors import BUILT_IN, Assignor


def load(config: GroupsConfig) -> dict[str, Assignor]:
    """Every assignor by its name. One that cannot be loaded is a SettingError: better now than in a rebalance."""
    found = dict(BUILT_IN)
    for name, target in config.assignors.items():
        if name in BUILT_IN:
            raise SettingError("groups.assignors", f"{name!r} is the name of a built-in assignor")
        module, _, attribute = target.partition(":")
        try:
            assignor = getattr(importlib.import_module(module), attribute)
        except Exception as error:
            raise SettingError("groups.assignors", f"{name} = {target!r} cannot be loaded: {error}") from error
        if not callable(assignor):
            raise SettingError("groups.assignors", f"{name} = {target!r} cannot be called")
        found[name] = assignor
    if config.assignor not in found:
        raise SettingError("groups.assignor", f"{config.assignor!r} is none of {', '.join(sorted(found))}")
    return found
