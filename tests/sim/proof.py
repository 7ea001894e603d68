"""That a directed test protects its rule: it passes as the product is, and fails without the rule.

`prove` runs pytest in a process of its own, with this module as a plugin. Each test that `DIRECTED` names then runs
several times: as it is, and once without each rule that it is said to protect. A test with parameters protects a rule
if any of its cases fails.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from tests.sim.mutations import DIRECTED, mutated

ROOT = Path(__file__).parents[2]


class Proof(NamedTuple):
    passes: bool  # with the rule
    fails: bool  # without it

    @property
    def holds(self) -> bool:
        return self.passes and self.fails


class Outcome(NamedTuple):
    """Of one run of one test; `without` is empty where nothing is taken out."""

    test: str
    without: str
    passed: bool


def prove(names: Iterable[str]) -> dict[str, Proof]:
    """For each of these mutations, whether its directed test does what it is there for."""
    names = list(names)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        tests = sorted({f"tests/unit/{DIRECTED[name]}" for name in names})
        plugins = ["-p", "tests.sim.proof", "-p", "no:cacheprovider", "--outcomes", file.name]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *plugins, *tests], cwd=ROOT, capture_output=True, text=True
        )
        data = Path(file.name).read_bytes()
    if not data:
        raise RuntimeError(f"pytest did not get to the tests:\n{done.stdout}{done.stderr}")
    outcomes = msgspec.json.decode(data, type=list[Outcome])
    return {name: _judge(DIRECTED[name], name, outcomes) for name in names}


def _judge(test: str, name: str, outcomes: list[Outcome]) -> Proof:
    kept = [o.passed for o in outcomes if o.test == test and not o.without]
    removed = [o.passed for o in outcomes if o.test == test and o.without == name]
    return Proof(bool(kept) and all(kept), not all(removed))


# -- the plugin --------------------------------------------------------------------------------------------------

_OUTCOMES = pytest.StashKey[list[Outcome]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", help="where to write what came of the directed tests, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_OUTCOMES] = []


def _directed(nodeid: str) -> str:
    """The name in `DIRECTED` of a test or of one of its cases."""
    return nodeid.partition("[")[0].removeprefix("tests/unit/")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = [name for name, test in DIRECTED.items() if test == _directed(metafunc.definition.nodeid)]
    if names:
        metafunc.fixturenames.append("without")
        metafunc.parametrize("without", ["", *names], indirect=True)


@pytest.fixture
def without() -> None:
    """Only a parameter: what is taken out has to be back before anything else is set up or torn down."""


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    name = pyfuncitem.callspec.params.get("without") if hasattr(pyfuncitem, "callspec") else None
    with mutated(name or None):
        result = yield
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and hasattr(item, "callspec") and "without" in item.callspec.params:
        outcome = Outcome(_directed(item.nodeid), item.callspec.params["without"], report.passed)
        item.config.stash[_OUTCOMES].append(outcome)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--outcomes")
    if path:
        Path(path).write_bytes(msgspec.json.encode(session.config.stash[_OUTCOMES]))
