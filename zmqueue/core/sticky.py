"""The cooperative assignor: as even as possible, and of all such assignments one that moves the fewest partitions.

*Even* means that the sum of the squares of all loads is least. Among members that subscribe to the same topics loads
then differ by one at most; where subscriptions differ, no load can be lowered without raising one as high. *Moved* is a
partition whose owner has to give it to another; partitions that nobody owns cost nothing.

Topics and members fall apart into islands that share nothing. On an island where all members subscribe to the same
topics the answer follows from counting. Otherwise it is a flow of partitions from topics to members, of least cost:
starting from what is owned, each step finds a cycle of changes that lowers the cost (less uneven first, then fewer
moves) and goes along it; when there is none, nothing better exists. `WORK_MAX` bounds the steps, and with them the time
that a broker's loop stands still: beyond it the best found so far is taken, which is complete, if not the evenest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from zmqueue.model import TopicPartition

Members = Mapping[str, AbstractSet[str]]
Partitions = Mapping[str, int]
Owned = Mapping[str, AbstractSet[TopicPartition]]
Assignment = Mapping[str, AbstractSet[TopicPartition]]

WORK_MAX = 1_000_000  # edges looked at, on all islands together: about a quarter of a second

_UNEVEN = 1 << 32  # what unevenness weighs against moves, of which there are fewer


def sticky(
    members: Members, partitions: Partitions, owned: Owned, work_max: int = WORK_MAX
) -> dict[str, set[TopicPartition]]:
    holds = _valid(members, partitions, owned)
    found: dict[str, set[TopicPartition]] = {member: set() for member in members}
    work = work_max
    for island, topics in _islands(members, partitions):
        mine = {member: holds[member] for member in island}
        counts = {topic: partitions[topic] for topic in topics}
        if all(members[member] >= counts.keys() for member in island):
            shared = _shared_evenly(counts, mine)
        else:
            flow = _Flow({member: [t for t in topics if t in members[member]] for member in island}, counts, mine)
            work = flow.improve(work)
            shared = flow.result()
        found.update(shared)
    return found


def _valid(members: Members, partitions: Partitions, owned: Owned) -> dict[str, set[TopicPartition]]:
    """What is owned, exists, and is still subscribed to: each partition by its first owner."""
    taken: set[TopicPartition] = set()
    holds: dict[str, set[TopicPartition]] = {}
    for member, topics in members.items():
        mine = {
            TopicPartition(topic, partition)
            for topic, partition in owned.get(member, ())
            if topic in topics and partition < partitions.get(topic, 0)
        }
        holds[member] = mine - taken
        taken |= mine
    return holds


def _islands(members: Members, partitions: Partitions) -> list[tuple[list[str], list[str]]]:
    """Members and topics that have to do with each other, in order."""
    subscribers: dict[str, list[str]] = {topic: [] for topic in sorted(partitions) if partitions[topic]}
    for member, topics in members.items():
        for topic in topics:
            if topic in subscribers:
                subscribers[topic].append(member)
    left = dict.fromkeys(members)
    islands = []
    while left:
        first = next(iter(left))
        del left[first]
        island, topics, queue = {first}, set(), [first]
        while queue:
            for topic in members[queue.pop()]:
                if topic in topics or topic not in subscribers:
                    continue
                topics.add(topic)
                fresh = [member for member in subscribers[topic] if member not in island]
                island.update(fresh)
                queue += fresh
                for member in fresh:
                    del left[member]
        if topics:
            islands.append(([member for member in members if member in island], sorted(topics)))
    return islands


def _shared_evenly(
    counts: Mapping[str, int], holds: Mapping[str, set[TopicPartition]]
) -> dict[str, set[TopicPartition]]:
    """All may have everything. Whoever has more than the share keeps one beyond it, as long as there are any."""
    share, more = divmod(sum(counts.values()), len(holds))
    room = dict.fromkeys(holds, share)
    # First those who hold more than the share: each keeps one more that way. Then whoever comes first.
    for member in sorted(holds, key=lambda member: len(holds[member]) <= share)[:more]:
        room[member] += 1
    kept = {member: set(sorted(held)[: room[member]]) for member, held in holds.items()}
    free = _free(counts, kept)
    # Dealt out in a circle rather than one member after the other, so that each gets of every topic.
    needy = [member for member in kept if len(kept[member]) < room[member]]
    while needy:
        for member in needy:
            kept[member].add(free.pop())
        needy = [member for member in needy if len(kept[member]) < room[member]]
    return kept


def _free(counts: Mapping[str, int], kept: Mapping[str, set[TopicPartition]]) -> list[TopicPartition]:
    """What nobody has, the first last."""
    taken = {key for held in kept.values() for key in held}
    every = (TopicPartition(topic, number) for topic, count in counts.items() for number in range(count))
    return sorted((key for key in every if key not in taken), reverse=True)


class _Flow:
    """How many partitions of each topic each member gets. Partitions of one topic differ only in their owner.

    The graph of changes has a node for each member and topic, and one for loads. Its edges: a member gives one of a
    topic back (to lose an owned one costs a move), a member takes one of a topic (to get an owned one back saves one);
    from the node of loads to a member, which then has one less, and from a member that has one more back to it. A
    cycle is a change that leaves every partition with somebody.
    """

    def __init__(
        self, topics: Mapping[str, list[str]], counts: Mapping[str, int], holds: Mapping[str, set[TopicPartition]]
    ) -> None:
        self._names, self._topics = list(topics), list(counts)
        self._counts, self._holds = counts, holds
        number_of = {topic: number for number, topic in enumerate(self._topics, len(self._names))}
        self._mine = [[number_of[topic] for topic in mine] for mine in topics.values()]
        self._loads_node = len(self._names) + len(self._topics)
        self._owned = [dict.fromkeys(mine, 0) for mine in self._mine]
        for member, name in enumerate(self._names):
            for topic, _ in holds[name]:
                self._owned[member][number_of[topic]] += 1
        self._gets = [dict(mine) for mine in self._owned]
        self._loads = [len(holds[name]) for name in self._names]
        self._place_unowned()

    def _place_unowned(self) -> None:
        for topic, name in enumerate(self._topics, len(self._names)):
            subscribers = [member for member, mine in enumerate(self._gets) if topic in mine]
            for _ in range(self._counts[name] - sum(self._gets[member][topic] for member in subscribers)):
                least = min(subscribers, key=self._loads.__getitem__)
                self._gets[least][topic] += 1
                self._loads[least] += 1

    def improve(self, work_max: int) -> int:
        """Until nothing better exists, or the work is used up. Returns how much of it is left."""
        while work_max > 0:
            cycle, work = self._better()
            work_max -= work
            if cycle is None:
                break
            self._change(cycle)
        return work_max

    def _edges(self) -> list[tuple[int, int, int]]:
        edges = []
        for member, gets in enumerate(self._gets):
            owned, load = self._owned[member], self._loads[member]
            for topic in self._mine[member]:
                has = gets[topic]
                if has:
                    edges.append((member, topic, int(has <= owned[topic])))
                edges.append((topic, member, -int(has < owned[topic])))
            if load:
                edges.append((self._loads_node, member, -_UNEVEN * (2 * load - 1)))
            edges.append((member, self._loads_node, _UNEVEN * (2 * load + 1)))
        return edges

    def _better(self) -> tuple[list[int] | None, int]:
        """A cycle of negative cost (Bellman and Ford, from everywhere at once), and how many edges were looked at."""
        edges = self._edges()
        nodes = self._loads_node + 1
        cost, before = [0] * nodes, [-1] * nodes
        for turn in range(1, nodes + 1):
            changed = False
            for start, end, weight in edges:
                if cost[start] + weight < cost[end]:
                    cost[end] = cost[start] + weight
                    before[end] = start
                    changed = True
            if not changed:
                return None, turn * len(edges)
            cycle = _cycle(before)
            if cycle is not None:
                return cycle, turn * len(edges)
        raise AssertionError("costs that fall for ever without a cycle")

    def _change(self, cycle: list[int]) -> None:
        """Go along it, as often as it pays."""
        steps = list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
        times = min(self._room(start, end) for start, end in steps)
        if self._loads_node in cycle:
            at = cycle.index(self._loads_node)
            more, less = self._loads[cycle[(at + 1) % len(cycle)]], self._loads[cycle[at - 1]]
            times = min(times, max(1, (more - less) // 2))
        for start, end in steps:
            if start == self._loads_node:
                self._loads[end] -= times
            elif end == self._loads_node:
                self._loads[start] += times
            elif start < len(self._names):
                self._gets[start][end] -= times
            else:
                self._gets[end][start] += times

    def _room(self, start: int, end: int) -> int:
        """How often an edge can be gone along at the same cost."""
        if self._loads_node in (start, end):
            return _UNEVEN
        if start < len(self._names):
            has, owned = self._gets[start][end], self._owned[start][end]
            return has if has <= owned else has - owned
        has, owned = self._gets[end][start], self._owned[end][start]
        return owned - has if has < owned else _UNEVEN

    def result(self) -> dict[str, set[TopicPartition]]:
        kept: dict[str, set[TopicPartition]] = {name: set() for name in self._names}
        for member, name in enumerate(self._names):
            for topic, gets in self._gets[member].items():
                topic_name = self._topics[topic - len(self._names)]
                kept[name].update(sorted(key for key in self._holds[name] if key.topic == topic_name)[:gets])
        free = _by_topic(_free(self._counts, kept))
        for topic, topic_name in enumerate(self._topics, len(self._names)):
            for member, name in enumerate(self._names):
                lacks = self._gets[member].get(topic, 0) - sum(key.topic == topic_name for key in kept[name])
                kept[name].update(free[topic_name].pop() for _ in range(lacks))
        return kept


def _by_topic(keys: Iterable[TopicPartition]) -> dict[str, list[TopicPartition]]:
    found: dict[str, list[TopicPartition]] = defaultdict(list)
    for key in keys:
        found[key.topic].append(key)
    return found


def _cycle(before: list[int]) -> list[int] | None:
    """A cycle among the nodes' predecessors, in the direction of its edges."""
    seen = [0] * len(before)
    for start in range(len(before)):
        node = start
        while node >= 0 and not seen[node]:
            seen[node] = start + 1
            node = before[node]
        if node >= 0 and seen[node] == start + 1:
            cycle = [node]
            while before[cycle[-1]] != node:
                cycle.append(before[cycle[-1]])
            return cycle[::-1]
    return None
