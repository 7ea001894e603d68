"""The rules of the protocol, each with a way to take it out: the simulator must then find a violation, or a test fail.

Names of rules are those of the protocol's description (A controller, B leader, C follower, D disk, E producer).
"""

from __future__ import annotations

from tests.sim.mutations import controller, disk, fixed, follower, leader, producers, registry
from tests.sim.mutations.directed import DIRECTED
from tests.sim.mutations.registry import mutated

__all__ = ["DIRECTED", "MUTATIONS", "mutated"]

assert all((controller, leader, follower, disk, producers, fixed)), "importing them registers them"
# In the order of the table: by the rules' letters; mistakes that were found and corrected come last.
MUTATIONS = dict(sorted(registry.MUTATIONS.items(), key=lambda item: item[1].rule[0]))
