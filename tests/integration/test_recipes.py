"""The programs of docs/recipes.md, just as they stand there, in processes that are killed at random moments.

A worker prints into a pipe that holds four lines, so it is never far ahead of this test, and a kill after so many lines
hits it in the middle of a batch. What it printed before it died stays in the pipe and counts.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import selectors
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL))

WAIT_S = 120.0
PIPE_BYTES = 4096
LINE_BYTES = 1000
PARTITIONS = 4
PAYMENTS = 400
BATCH = 10  # max_records of the programs
KILLS = 5


class Worker:
    def __init__(self, arguments: list[str], folder: Path, env: dict[str, str]) -> None:
        self._errors = open(folder / "errors", "ab")  # noqa: SIM115 - the process has it as long as it lives
        self._process = subprocess.Popen(
            [sys.executable, *arguments], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=self._errors
        )
        assert self._process.stdout is not None
        self.out = self._process.stdout
        fcntl.fcntl(self.out, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._rest = b""

    def lines(self) -> list[str] | None:
        """What it has printed since; None at its end."""
        data = os.read(self.out.fileno(), PIPE_BYTES)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line.decode().rstrip("x") for line in whole] if data else None

    def signal(self, number: signal.Signals) -> None:
        assert self._process.poll() is None, "a worker ended by itself"
        self._process.send_signal(number)

    def end(self) -> list[str]:
        """Kill it; what it had printed and nobody has read."""
        self._process.kill()
        found = []
        while (lines := self.lines()) is not None:
            found += lines
        self._process.wait(WAIT_S)
        self.out.close()
        self._errors.close()
        return found


class Crew:
    """Processes of one program, and what they have printed."""

    def __init__(self, folder: Path, bootstrap: str, program: str, *arguments: str) -> None:
        self._folder = folder
        self._arguments = [f"{program}.py", *arguments]
        (folder / f"{program}.py").write_text(PROGRAMS[program])
        self._env = {**os.environ, "ZMQUEUE_BOOTSTRAP": bootstrap, "STORE": str(folder / "ledger.db")}
        self._selector = selectors.DefaultSelector()
        self.workers: list[Worker] = []
        self.printed: list[str] = []

    def hire(self) -> Worker:
        worker = Worker(self._arguments, self._folder, self._env)
        self.workers.append(worker)
        self._selector.register(worker.out, selectors.EVENT_READ, worker)
        return worker

    def dismiss(self, worker: Worker) -> None:
        """SIGKILL."""
        self._selector.unregister(worker.out)
        self.workers.remove(worker)
        self.printed += worker.end()

    def read_until(self, enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not enough():
            assert time.monotonic() < deadline, f"{len(self.printed)} lines, {self.errors()}"
            self.read_some()

    def read_some(self) -> None:
        for key, _ in self._selector.select(0.05):
            lines = key.data.lines()
            assert lines is not None, f"a worker ended by itself: {self.errors()}"
            self.printed += lines

    def errors(self) -> str:
        return (self._folder / "errors").read_text()[-2000:]

    def close(self) -> None:
        for worker in list(self.workers):
            self.dismiss(worker)


def write_payments(cluster: Any, count: int, width: int = 0) -> list[str]:
    """To the topic of the page, padded to a width."""
    names = [f"payment-{number}" for number in range(count)]
    with cluster.admin() as admin:
        admin.create_topic("payments", PARTITIONS)
    producer = cluster.producer()
    producer.send_many("payments", [name.ljust(width, "x").encode() for name in names]).get(30)
    return names


@pytest.fixture
def payments(zmqueue_cluster: Any) -> list[str]:
    """So long that a pipe holds few of them."""
    return write_payments(zmqueue_cluster, PAYMENTS, LINE_BYTES - 1)


@pytest.fixture
def many_payments(zmqueue_cluster: Any) -> list[str]:
    """So many that a store is busy with them for a while."""
    return write_payments(zmqueue_cluster, 80 * PAYMENTS)


@pytest.fixture
def crew(zmqueue_cluster: Any, tmp_path: Path) -> Iterator[Callable[..., Crew]]:
    crews: list[Crew] = []

    def crew(program: str, *arguments: str) -> Crew:
        crews.append(Crew(tmp_path, zmqueue_cluster.bootstrap_servers, program, *arguments))
        return crews[-1]

    yield crew
    for each in crews:
        each.close()


def with_kills(crew: Crew, seed: int, done: Callable[[], bool]) -> None:
    """Two workers until `done`; some are killed in between, each after a random number of lines, and replaced."""
    choice = random.Random(seed)
    workers = [crew.hire(), crew.hire()]
    for _ in range(KILLS):
        enough = len(crew.printed) + choice.randrange(1, PAYMENTS // (2 * KILLS))
        crew.read_until(lambda enough=enough: len(crew.printed) >= enough)
        crew.dismiss(workers.pop(choice.randrange(2)))
        workers.append(crew.hire())
    crew.read_until(done)


@pytest.mark.parametrize("seed", [1, 2])
def test_at_most_once_never_acts_twice(crew: Any, payments: list[str], zmqueue_cluster: Any, seed: int) -> None:
    workers = crew("at_most_once")
    with zmqueue_cluster.admin() as admin:

        def all_committed() -> bool:
            lags = [row.lag for row in admin.group_lag("at-most-once")]
            return len(lags) == PARTITIONS and not any(lag is None or lag for lag in lags)

        with_kills(workers, seed, all_committed)
        # The last batches were committed, and are acted on now: a worker has at most one of them.
        workers.read_until(lambda: len(workers.printed) >= len(payments) - KILLS * BATCH)
        workers.close()
    repeated = {name: count for name, count in Counter(workers.printed).items() if count > 1}
    assert not repeated
    assert set(workers.printed) <= set(payments)


@pytest.mark.parametrize("seed", [1, 2])
def test_at_least_once_leaves_nothing_out(crew: Any, payments: list[str], zmqueue_cluster: Any, seed: int) -> None:
    workers = crew("at_least_once")
    with_kills(workers, seed, lambda: set(workers.printed) >= set(payments))
    assert set(workers.printed) == set(payments)


# -- exactly once --------------------------------------------------------------------------------------------------


class Store:
    """The ledger, as another reader sees it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=60, isolation_level=None)) as connection:
            yield connection

    def booked(self) -> Counter[str]:
        return Counter(row[0] for row in self._rows("SELECT payment FROM ledger"))

    def count(self) -> int:
        return sum(row[0] for row in self._rows("SELECT count(*) FROM ledger"))

    def _rows(self, query: str) -> list[Any]:
        if not self._path.exists():
            return []
        with self._opened() as store:
            made = store.execute("SELECT 1 FROM sqlite_master WHERE name = 'ledger'").fetchone()
            return store.execute(query).fetchall() if made else []

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody can write: whoever has records in hand waits with them."""
        with self._opened() as store:
            store.execute("BEGIN IMMEDIATE")
            yield
            store.execute("ROLLBACK")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "ledger.db")


@pytest.mark.parametrize("seed", [1, 2])
def test_exactly_once_books_each_payment_once(crew: Any, many_payments: list[str], store: Store, seed: int) -> None:
    choice = random.Random(seed)
    workers = crew("exactly_once")
    workers.hire()
    workers.hire()
    for _ in range(KILLS):
        enough = store.count() + choice.randrange(1, PAYMENTS)
        workers.read_until(lambda enough=enough: store.count() >= enough)
        with store.locked():  # nobody gets ahead meanwhile, and who has records in hand is caught with them
            assert store.count() < len(many_payments)
            workers.dismiss(choice.choice(workers.workers))
            workers.hire()
    workers.read_until(lambda: store.count() >= len(many_payments))
    workers.close()
    assert store.booked() == Counter(many_payments)


def test_a_worker_that_was_taken_for_dead_books_nothing_of_what_others_have_booked(
    crew: Any, many_payments: list[str], store: Store, zmqueue_cluster: Any
) -> None:
    workers = crew("exactly_once")
    first = workers.hire()
    workers.read_until(lambda: store.count() > 0)
    with zmqueue_cluster.admin() as admin:
        with store.locked():
            # Nobody can see from outside when it has records in hand and waits to book them: it has had the time.
            time.sleep(1)
            first.signal(signal.SIGSTOP)
            before = store.count()
        workers.hire()
        workers.read_until(lambda: store.count() >= len(many_payments))
        assert before < len(many_payments)
        first.signal(signal.SIGCONT)
        # It tries to book what it had, is refused, and joins again.
        workers.read_until(lambda: len(admin.describe_group("exactly-once").members) == 2)
    workers.close()
    assert store.booked() == Counter(many_payments)


# -- the others ----------------------------------------------------------------------------------------------------


class Shell:
    """Runs what the page shows: blocks of commands, and programs that end by themselves."""

    def __init__(self, folder: Path, bootstrap: str) -> None:
        self._folder = folder
        zmqueue = folder / "zmqueue"
        zmqueue.write_text(f'#!/bin/sh\nexec {sys.executable} -m zmqueue "$@"\n')
        zmqueue.chmod(0o755)
        self._env = {**os.environ, "ZMQUEUE_BOOTSTRAP": bootstrap, "PATH": f"{folder}:{os.environ['PATH']}"}

    def block(self, first_words: str) -> list[str]:
        """The block of shell commands that begins with these words."""
        (found,) = [block for block in BLOCKS if block.startswith(first_words)]
        return self._run("bash", "-euc", found)

    def program(self, name: str, *arguments: object) -> list[str]:
        file = self._folder / f"{name}.py"
        file.write_text(PROGRAMS[name])
        return self._run(sys.executable, str(file), *map(str, arguments))

    def _run(self, *command: str) -> list[str]:
        done = subprocess.run(
            command, cwd=self._folder, env=self._env, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


@pytest.fixture
def shell(tmp_path: Path, zmqueue_cluster: Any) -> Shell:
    return Shell(tmp_path, zmqueue_cluster.bootstrap_servers)


def test_records_since_a_moment_and_the_last_ones(shell: Shell, zmqueue_cluster: Any) -> None:
    shell.block("zmqueue topic create payments")
    producer = zmqueue_cluster.producer()
    later = [producer.send("payments", b"late-%d" % n, partition=n % 4, timestamp_ms=9 * 10**12 + n) for n in range(8)]
    producer.flush(30)
    written = [(future.get(10).partition, future.get(10).offset) for future in later]
    lines = [f"{partition} {offset} late-{n}" for n, (partition, offset) in enumerate(written)]
    assert sorted(shell.program("since", 9 * 10**12 + 2)) == sorted(lines[2:])
    assert shell.program("since", 10**13) == []
    newest_first = [lines[n] for partition in range(4) for n in (partition + 4, partition)]
    assert shell.program("tail", 2) == newest_first


def test_records_by_a_header(shell: Shell) -> None:
    shell.block("zmqueue topic create orders")
    assert [line.split(" ", 2)[2] for line in shell.program("find", "17")] == ["a book"]
    assert shell.program("find", "99") == []


def test_workers_share_a_topic_and_the_group_reads_it_again_when_it_is_told_to(
    shell: Shell, crew: Any, payments: list[str], zmqueue_cluster: Any
) -> None:
    anna, bert = crew("worker", "anna"), crew("worker", "bert")
    anna.hire()
    bert.hire()

    def done() -> set[str]:
        return {line.split()[3] for line in anna.printed + bert.printed}

    with zmqueue_cluster.admin() as admin:
        deadline = time.monotonic() + WAIT_S
        while done() < set(payments):
            assert time.monotonic() < deadline, anna.errors()
            anna.read_some()
            bert.read_some()
        described = admin.describe_group("workers")
        assert [member.client_id for member in described.members] == ["anna", "bert"]
        anna.close()
        bert.close()
        while admin.describe_group("workers").members:
            assert time.monotonic() < deadline, "sessions of dead workers do not end"
            time.sleep(0.1)
        shown = shell.block("zmqueue group seek workers")
        assert [line.split()[3] for line in shown if line.startswith("payments")] == ["0"] * 2 * PARTITIONS
        lags = shell.program("replay")
        assert sum(int(line.split()[1]) for line in lags) == len(payments)
        again = crew("worker", "carl")
        again.hire()
        again.read_until(lambda: {line.split()[3] for line in again.printed} >= set(payments))
