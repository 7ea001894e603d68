"""Members as clients have them, and the coordinator as brokers have it, joined without a socket.

Messages are lost, late and out of order, coordinators and members die, topics grow: no partition is held by two.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from unit.core.groups_rig import Rig

from zmqueue import errors
from zmqueue.client.member import Lose, Member, MemberSettings, Owned, Send, State, Stop, Take

SETTINGS = MemberSettings(group="g", session_s=10.0, wait_s=3.0, rebalance_s=60.0)


class Peer:
    """A member, and what its application still has to let go of."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.lives = world, name, 0
        self.member = Member(SETTINGS, self._new_id, lambda failures: min(1.0, 0.05 * 2**failures))
        self.reading: set[Owned] = set()
        self.stopped: set[Owned] = set()
        self.run(self.member.want(["t"], world.now))
        self.run(self.member.reach(True, world.now))

    def _new_id(self) -> str:
        self.lives += 1
        return f"{self.name}-{self.lives}"

    def run(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.world.requests.append((self, effect, self.world.now + effect.timeout_s))
                case Take(partitions):
                    self.reading |= partitions.keys()
                case Stop(partitions):
                    self.reading -= set(partitions)
                    self.stopped |= set(partitions)
                case Lose(partitions):
                    self.reading -= set(partitions)
                    self.stopped -= set(partitions)
        assert self.reading >= self.member.owned.keys() - self.stopped

    @property
    def holds(self) -> set[Owned]:
        """What its application may hand out or commit at this moment."""
        return self.reading | self.stopped if self.world.now < self.member.session_ends else set()

    def let_go(self) -> None:
        free = sorted(self.stopped)
        self.stopped.clear()
        self.reading |= self.member.owned.keys()
        self.run(self.member.let_go(free, self.world.now))


class World:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rig = Rig()
        self.requests: list[tuple[Peer, Send, float]] = []
        self.waiting: dict[Any, tuple[Peer, Send, float]] = {}
        self.answers: list[tuple[Peer, int, Any]] = []
        self.peers = [Peer(self, f"peer{number}") for number in range(2)]
        self.names = iter(range(2, 1000))

    @property
    def now(self) -> float:
        return self.rig.now_ms / 1000

    @property
    def partitions(self) -> int:
        return len(self.rig.topics.topics[self.rig.topics.names["t"]].partitions)

    def pass_time(self, seconds: float) -> None:
        self.rig.tick(int(seconds * 1000))
        self.collect()
        for token, (peer, send, deadline) in list(self.waiting.items()):
            if self.now >= deadline:
                del self.waiting[token]
                peer.run(peer.member.failed(send.number, errors.RequestTimedOut(), self.now))
        for peer in self.peers:
            if self.now >= peer.member.due():
                peer.run(peer.member.tick(self.now))

    def collect(self) -> None:
        for token in list(self.waiting):
            if token in self.rig.said:
                peer, send, _ = self.waiting.pop(token)
                self.answers.append((peer, send.number, self.rig.said[token]))

    def arrive(self, at: int = 0) -> None:
        peer, send, deadline = self.requests.pop(at)
        self.rig.ask("on_heartbeat", send.request)
        self.waiting[self.rig.token] = peer, send, deadline
        self.collect()

    def hear(self, at: int = 0) -> None:
        peer, number, said = self.answers.pop(at)
        if isinstance(said, int):
            peer.run(peer.member.failed(number, errors.from_code(said), self.now))
        else:
            peer.run(peer.member.answered(number, said, self.now))

    def lose(self) -> None:
        if self.requests and self.chance.random() < 0.5:
            peer, send, _ = self.requests.pop(self.chance.randrange(len(self.requests)))
        elif self.answers:
            peer, number, _ = self.answers.pop(self.chance.randrange(len(self.answers)))
            peer.run(peer.member.failed(number, errors.NetworkError(), self.now))
            return
        else:
            return
        peer.run(peer.member.failed(send.number, errors.NetworkError(), self.now))

    def fail_over(self) -> None:
        """Another coordinator; what waited at the former one is lost."""
        waiting, self.waiting = list(self.waiting.values()), {}
        self.rig.take_over()
        for peer, send, _ in waiting:
            peer.run(peer.member.failed(send.number, errors.NotCoordinator(), self.now))

    def kill(self, dead: Peer) -> None:
        self.peers.remove(dead)
        self.requests = [each for each in self.requests if each[0] is not dead]
        self.answers = [each for each in self.answers if each[0] is not dead]
        self.waiting = {token: each for token, each in self.waiting.items() if each[0] is not dead}

    def step(self) -> None:
        chance = self.chance
        match chance.randrange(20):
            case 0 | 1 | 2 | 3 | 4 if self.requests:
                self.arrive(chance.randrange(len(self.requests)))
            case 5 | 6 | 7 | 8 | 9 if self.answers:
                self.hear(chance.randrange(len(self.answers)))
            case 10:
                self.lose()
            case 11 if chance.random() < 0.2:
                self.fail_over()
            case 12 if chance.random() < 0.2 and len(self.peers) < 6:
                self.peers.append(Peer(self, f"peer{next(self.names)}"))
            case 13 if chance.random() < 0.2 and len(self.peers) > 1:
                self.kill(chance.choice(self.peers))
            case 14 if chance.random() < 0.1 and self.partitions < 10:
                self.rig.topics.set("t", self.partitions + 1)
                self.rig.perform(self.rig.coordinator.on_topics(self.rig.now_ms))
            case 15 | 16:
                chance.choice(self.peers).let_go()
            case 17 if chance.random() < 0.1:
                self.pass_time(chance.uniform(1.0, 12.0))
            case _:
                self.pass_time(chance.uniform(0.0, 0.2))
        self.collect()

    def check(self) -> None:
        held: dict[Owned, str] = {}
        for peer in self.peers:
            for owned in peer.holds:
                assert owned not in held, f"{owned.partition} is held by {held[owned]} and by {peer.name}"
                held[owned] = peer.name

    def calm_down(self) -> None:
        """Nothing goes wrong any more: everybody comes to hold a share, and together they hold everything."""
        for _ in range(2_000):
            while self.requests:
                self.arrive()
            while self.answers:
                self.hear()
            for peer in self.peers:
                peer.let_go()
            self.check()
            if self.is_settled():
                return
            self.pass_time(0.1)
        raise AssertionError(f"they do not settle: {[(peer.name, peer.member.state) for peer in self.peers]}")

    def is_settled(self) -> bool:
        held = [len(peer.holds) for peer in self.peers]
        stable = all(peer.member.state == State.STABLE for peer in self.peers)
        return stable and sum(held) == self.partitions and max(held) - min(held) <= 1


@pytest.mark.parametrize("seed", range(60))
def test_no_partition_is_ever_held_by_two_and_all_are_held_in_the_end(seed: int) -> None:
    world = World(seed)
    for _ in range(400):
        world.step()
        world.check()
    world.calm_down()
