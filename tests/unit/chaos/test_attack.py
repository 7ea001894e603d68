"""What strangers do to brokers, tried on plain sockets: it must get as far as it claims."""

from __future__ import annotations

import itertools
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from chaos import attack

ROOT = Path(__file__).parents[3]


@pytest.fixture
def router() -> zmq.Socket[bytes]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        yield sock


def test_the_handshake_is_one_that_zeromq_takes(router: zmq.Socket[bytes]) -> None:
    port = router.bind_to_random_port("tcp://127.0.0.1")
    with socket.create_connection(("127.0.0.1", port)) as sock:
        assert attack._greet(sock, b"DEALER")
        sock.sendall(b"\x00\x02hi")
        assert router.poll(5_000)
        assert router.recv_multipart()[1:] == [b"hi"]


def test_a_seed_gives_the_same_inputs_and_they_vary() -> None:
    def some(seed: int) -> list[object]:
        rng = random.Random(seed)
        sources = (attack.mutants(rng, "request"), attack.raw_inputs(rng), attack.subscriptions(rng))
        return [list(itertools.islice(source, 200)) for source in sources]

    assert some(1) == some(1) != some(2)
    for inputs in some(1):
        assert len({repr(one) for one in inputs}) > 100  # type: ignore[attr-defined]


def test_nothing_that_would_be_obeyed_is_sent() -> None:
    names = {name.split()[0] for name in attack.samples("request")}
    assert len(names) > 5
    assert names.isdisjoint(attack.SPARED)


def test_a_flood_opens_all_its_connections_and_ends_with_its_stdin() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=200) as server:
        port = server.getsockname()[1]
        command = [sys.executable, "-m", "chaos.attack", "flood", "127.0.0.1", str(port), "silent", "40"]
        child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        told, _ = child.communicate(timeout=30)
        assert told == '{"opened": 40}\n'
        assert child.returncode == 0
