"""Which broker to ask: metadata kept fresh, brokers that fail left alone for a while.

Everything a producer or a consumer does is "look at the world and do what can be done" (their `pump`). The router says
what the world looks like (`leader`, `ready`) and calls the listeners whenever it has changed: news of the cluster, a
connection made, a backoff over. Whoever cannot go on for want of a leader calls `refresh`; since that ends in a call of
the listeners, it is asked again for as long as it takes, at most once per `REFRESH_PAUSE_S`.

A refresh asks one broker, and one more each `HEDGE_S` without an answer, so that a dead or a stopped broker costs a
fraction of a second. News older than what is known is merged (see metadata.py), and the next broker asked.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from zmqueue.client.metadata import Metadata
from zmqueue.client.network import Address, Answer, Callback, Network, Request, log
from zmqueue.errors import (
    ClientClosed,
    ConfigError,
    NetworkError,
    NoBrokersAvailable,
    RequestTimedOut,
    WrongCluster,
    ZmqueueError,
)
from zmqueue.model import NO_BROKER
from zmqueue.wire import messages
from zmqueue.wire.frames import Operation

HEDGE_S = 0.25
REFRESH_PAUSE_S = 0.1
METADATA_TIMEOUT_S = 2.0
BACKOFF_S = 0.05
BACKOFF_S_MAX = 1.0
# A produce or fetch that is so late (beyond its own wait) makes the client ask another broker who leads now.
STUCK_S = 1.0
BOOTSTRAP_MAX = 64

T = TypeVar("T")


def parse_bootstrap(servers: str | Iterable[str]) -> list[Address]:
    """`"host:port,host:port"`, or a list of such. Raises ConfigError."""
    texts = servers.split(",") if isinstance(servers, str) else list(servers)
    addresses = []
    for text in filter(None, (text.strip() for text in texts)):
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ConfigError(f"bootstrap_servers: {text!r} is not HOST:PORT")
        addresses.append(Address(host, int(port)))
    if not 0 < len(addresses) <= BOOTSTRAP_MAX:
        raise ConfigError(f"bootstrap_servers: 1 to {BOOTSTRAP_MAX} addresses are needed, not {len(addresses)}")
    return addresses


def jittered(base_s: float, failures: int, max_s: float) -> float:
    """Doubling, and spread over its upper half, so that clients which failed together do not return together."""
    return min(max_s, base_s * 2 ** min(failures, 16)) * (0.5 + random.random() / 2)


class Call:
    """A request on its way, and the thread that will wait for it."""

    def __init__(self, network: Network, operation: Operation, timeout_s: float) -> None:
        self._network = network
        self._operation = operation
        self._timeout_s = timeout_s
        self._results: list[Answer | ZmqueueError] = []
        self._done = threading.Event()

    def finish(self, result: Answer | ZmqueueError) -> None:
        self._results.append(result)
        self._done.set()

    def result(self) -> Answer | ZmqueueError:
        # The request ends by itself in time; the bound is for a client closed meanwhile.
        if not self._done.wait(self._timeout_s + 1.0):
            self._network.check()
            return RequestTimedOut(f"{self._operation.name} was not answered in time")
        return self._results[0]


class Router:
    def __init__(self, network: Network, bootstrap: list[Address], *, metadata_max_age_ms: int = 300_000) -> None:
        self.network = network
        self.metadata = Metadata()
        self.listeners: list[Callable[[], None]] = []
        self._bootstrap = bootstrap
        self._max_age_s = metadata_max_age_ms / 1000
        self._topics: frozenset[str] = frozenset()
        self._all_topics = False
        self._failures: dict[Address, int] = {}
        self._usable_at: dict[Address, float] = {}
        self._asked: dict[Address, int] = {}
        self._asks = itertools.count(1)
        self._refresh: _Refresh | None = None
        self._refresh_waits = False
        self._refreshed_at = -1e9
        self._rounds = 0
        self.answers = 0
        self._changed = threading.Condition()
        network.on_link = self._on_link
        network.post(self._age)

    # -- any thread --------------------------------------------------------------------------------------------

    def watch(self, topics: Iterable[str]) -> None:
        """Include these topics in what is asked for from now on."""
        with self._changed:
            self._topics = self._topics | frozenset(topics)

    def watch_all(self) -> None:
        self._all_topics = True

    def wait_for(self, look: Callable[[], T | None], timeout_s: float) -> T | None:
        """What `look` finds in the metadata, refreshed until it finds something. None when the time is over.

        Raises NoBrokersAvailable when the time is over and not one broker has answered in it.
        """
        deadline = time.monotonic() + timeout_s
        answered = self.answers
        while (found := look()) is None:
            self.network.check()
            with self._changed:
                rounds = self._rounds
            self.network.post(self.refresh)
            with self._changed:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                # The bound lets a closed client be noticed.
                if self._rounds == rounds:
                    self._changed.wait(min(remaining, 1.0))
        if found is None and self.answers == answered:
            servers = ",".join(map(str, self._bootstrap))
            raise NoBrokersAvailable(f"no broker answered within {timeout_s:.1f} s (bootstrap servers: {servers})")
        return found

    def connected(self) -> bool:
        """Whether there is a connection to any broker at the moment."""
        brokers = [Address(broker.host, broker.port) for broker in list(self.metadata.brokers.values())]
        return any(map(self.network.linked, [*self._bootstrap, *brokers]))

    def call(
        self, target: int | Address | None, operation: Operation, message: Struct, timeout_s: float
    ) -> Answer | ZmqueueError:
        """One request, waited for. `target` None: any broker that seems to be well."""
        return self.begin(target, operation, message, timeout_s).result()

    def begin(self, target: int | Address | None, operation: Operation, message: Struct, timeout_s: float) -> Call:
        """As `call`, for whoever has several questions out at once."""
        self.network.check()
        call = Call(self.network, operation, timeout_s)

        def start() -> None:
            address = self.any_address() if target is None else self._resolve(target)
            if address is None:
                call.finish(NetworkError(f"broker {target} is not known"))
            else:
                self.network.request(address, operation, message, None, timeout_s, call.finish)

        self.network.post(start)
        return call

    # -- IO thread ---------------------------------------------------------------------------------------------

    def refresh(self, avoid: int = NO_BROKER) -> None:
        """Ask for news, soon: calls that come together become one request."""
        if self._refresh is not None or self._refresh_waits:
            return
        pause = self._refreshed_at + REFRESH_PAUSE_S - time.monotonic()
        if pause > 0:
            self._refresh_waits = True
            self.network.call_later(pause, partial(self._start_refresh, avoid))
        else:
            self._start_refresh(avoid)

    def ready(self, broker: int) -> bool:
        """Whether a request to this broker would leave at once. If not, listeners hear when it would."""
        address = self._resolve(broker)
        if address is None:
            return False
        if not self.network.linked(address):
            self.network.connect(address)
            return False
        return self._usable_at.get(address, 0.0) <= time.monotonic()

    def send(
        self,
        broker: int,
        operation: Operation,
        message: Struct,
        raw: list[bytes] | None,
        timeout_s: float,
        callback: Callback,
        *,
        answered: bool = True,
    ) -> Request:
        """To a broker that is `ready`."""
        address = self._resolve(broker)
        assert address is not None
        return self.network.request(address, operation, message, raw, timeout_s, callback, answered=answered)

    def any_address(self, avoid: int = NO_BROKER) -> Address:
        address = self._candidates(avoid)[0]
        self.note_asked(address)
        return address

    def note_asked(self, address: Address) -> None:
        self._asked[address] = next(self._asks)

    def _resolve(self, target: int | Address) -> Address | None:
        if isinstance(target, Address):
            return target
        broker = self.metadata.brokers.get(target)
        return Address(broker.host, broker.port) if broker is not None else None

    def _candidates(self, avoid: int) -> list[Address]:
        """Every address we know, the most promising first.

        They take turns: a broker that is cut off, yet answers, must not be the only one that is ever asked.
        """
        now = time.monotonic()
        avoided = self._resolve(avoid)
        fenced = {Address(b.host, b.port): b.fenced for b in self.metadata.brokers.values()}
        addresses = list({*fenced, *self._bootstrap})
        random.shuffle(addresses)
        addresses.sort(
            key=lambda a: (
                a == avoided,
                self._usable_at.get(a, 0.0) > now,
                fenced.get(a, bool(fenced)),
                self._asked.get(a, 0),
            )
        )
        return addresses

    def _start_refresh(self, avoid: int) -> None:
        self._refresh_waits = False
        self._refresh = _Refresh(self, self._candidates(avoid), self.wanted_topics())
        self._refresh.ask_next()

    def wanted_topics(self) -> list[str] | None:
        return None if self._all_topics else sorted(self._topics)

    def end_refresh(self) -> None:
        self._refresh = None
        self._refreshed_at = time.monotonic()
        with self._changed:
            self._rounds += 1
            self._changed.notify_all()
        self.notify()

    def take_news(self, news: messages.MetadataResponse, asked: list[str] | None) -> bool:
        """True if it is as new as anything we know."""
        fresh = news.index >= self.metadata.index
        before = {Address(b.host, b.port) for b in self.metadata.brokers.values()}
        self.metadata.update(news, asked)
        now_there = {Address(b.host, b.port) for b in self.metadata.brokers.values()}
        for address in before - now_there - set(self._bootstrap):
            self.network.forget(address)
        self.answers += 1
        return fresh

    def absorb(self, news: messages.MetadataResponse, asked: list[str] | None) -> None:
        """News that came by another way than a refresh."""
        try:
            self.take_news(news, asked)
        except WrongCluster as error:
            log.warning("%s", error)

    def notify(self) -> None:
        for listener in self.listeners:
            listener()

    def _age(self) -> None:
        self.network.call_later(self._max_age_s, self._age)
        if self._topics or self._all_topics:
            self.refresh()

    def _on_link(self, address: Address, up: bool) -> None:
        if up:
            pause = self._usable_at.get(address, 0.0) - time.monotonic()
            self.network.call_later(pause, self.notify) if pause > 0 else self.notify()
            return
        self.note_failure(address)
        if self.listeners:
            lost = [b.id for b in self.metadata.brokers.values() if (b.host, b.port) == address]
            self.refresh(avoid=lost[0] if lost else NO_BROKER)

    def note_failure(self, address: Address) -> None:
        """Leave this address alone for a while, longer each time."""
        now = time.monotonic()
        # A connection that held for a while starts from the shortest pause again.
        if now - self._usable_at.get(address, -1e9) > 10 * BACKOFF_S_MAX:
            self._failures[address] = 0
        failures = self._failures.get(address, 0)
        self._failures[address] = failures + 1
        self._usable_at[address] = now + jittered(BACKOFF_S, failures, BACKOFF_S_MAX)


class _Refresh:
    """One round of asking, until somebody has fresh news or everybody has failed."""

    def __init__(self, router: Router, candidates: list[Address], topics: list[str] | None) -> None:
        self._router = router
        self._left = candidates
        self._topics = topics
        self._open: list[Request] = []
        self._hedge: Any = None
        self._over = False

    def ask_next(self) -> None:
        if self._hedge is not None:
            self._hedge.cancel()
            self._hedge = None
        if self._over:
            return
        if not self._left:
            if not self._open:
                self._end()
            return
        network = self._router.network
        address = self._left.pop(0)
        self._router.note_asked(address)
        message = messages.MetadataRequest(self._topics)
        holder: list[Request] = []
        request = network.request(
            address, Operation.METADATA, message, None, METADATA_TIMEOUT_S, partial(self._on_answer, holder)
        )
        holder.append(request)
        self._open.append(request)
        self._hedge = network.call_later(HEDGE_S, self.ask_next)

    def _on_answer(self, holder: list[Request], result: Answer | ZmqueueError) -> None:
        self._open.remove(holder[0])
        if isinstance(result, ClientClosed):
            self._over = True
            return
        fresh = False
        if not holder[0].on_wire:
            self._router.note_failure(holder[0].connection.address)
        if isinstance(result, Answer):
            try:
                fresh = self._router.take_news(result.message, self._topics)
            except WrongCluster as error:
                log.warning("%s: %s", holder[0].connection.address, error)
        if fresh:
            self._end()
        else:
            self.ask_next()

    def _end(self) -> None:
        self._over = True
        if self._hedge is not None:
            self._hedge.cancel()
        for request in self._open:
            self._router.network.cancel(request)
        self._open.clear()
        self._router.end_refresh()
