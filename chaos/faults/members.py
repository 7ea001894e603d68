"""What happens to the members of a group: they come, go, die, and stand still."""

from __future__ import annotations

from chaos.faults.base import FaultBase, Hit
from chaos.members import GROUP, Members
from zmqueue import Admin


class MemberFaults(FaultBase):
    members: Members | None = None

    def _group(self) -> Members:
        assert self.members is not None, "the scenario has no members"
        return self.members

    def member_joins(self) -> Hit:
        group = self._group()
        number = group.join()
        text = f"member {number} joins"
        self._begin(text, [])
        return Hit(text, [], lambda: group.leave(number))

    def member_leaves(self) -> Hit:
        group = self._group()
        number = self.rng.choice(sorted(group.running))
        text = f"member {number} leaves"
        self._begin(text, [])
        group.leave(number)
        return Hit(text, [], lambda: self._replace(group))

    def member_killed(self) -> Hit:
        group = self._group()
        number = self.rng.choice(sorted(group.running))
        text = f"kill member {number}"
        self._begin(text, [])
        group.kill(number)
        return Hit(text, [], lambda: self._replace(group))

    def member_suspended(self) -> Hit:
        """For longer than its session: it wakes as a zombie."""
        group = self._group()
        number = self.rng.choice(sorted(group.running))
        text = f"suspend member {number}"
        self._begin(text, [])
        group.suspend(number)
        return Hit(text, [], lambda: group.resume(number))

    def _replace(self, group: Members) -> None:
        group.join()

    def kill_coordinator(self) -> Hit:
        with Admin(bootstrap_servers=self.cluster.bootstrap) as admin:
            coordinator = self.cluster.ask(lambda: admin.describe_group(GROUP)).coordinator
        keys = self._led_by(coordinator)
        text = f"kill coordinator {coordinator}"
        self._begin(text, keys or self._all_keys())
        self.cluster.kill(coordinator)
        return Hit(text, keys, lambda: self.cluster.start(coordinator))
