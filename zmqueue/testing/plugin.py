"""The pytest side of `zmqueue.testing`: fixtures, options, and the ends of brokers' logs under a failed test.

One cluster per test session, or per worker under pytest-xdist, started when a test first asks for it: a broker that one
worker's test kills must not be missing in another's. A cluster that a test left in a state from which it does not come
back is thrown away, and the next test gets a new one.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from zmqueue.config import BROKERS_MAX, Storage
from zmqueue.testing.cluster import Cluster, log_ends, running_cluster, started_cluster, watched

ClusterFactory = Callable[..., Cluster]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("zmqueue", "clusters of zmqueue")
    group.addoption(
        "--zmqueue-brokers", type=int, metavar="N", help="brokers of zmqueue_cluster (ini: zmqueue_brokers)"
    )
    group.addoption("--zmqueue-storage", choices=get_args(Storage), help="where records live (ini: zmqueue_storage)")
    parser.addini("zmqueue_brokers", "brokers of zmqueue_cluster, 1 to 9", default="3")
    parser.addini("zmqueue_storage", "where records of zmqueue_cluster live: disk or memory", default="disk")
    parser.addini(
        "zmqueue_config", "settings of zmqueue_cluster, a line each: log.fsync = os", type="linelist", default=[]
    )


class _Shared:
    """The session's cluster: started when it is first lent, and anew after a use that broke it."""

    def __init__(self, session: pytest.Session, folders: pytest.TempPathFactory) -> None:
        self._session = session
        self._folders = folders
        self._stack = contextlib.ExitStack()
        self._cluster: Cluster | None = None
        self._uses = itertools.count(1)

    @contextlib.contextmanager
    def lent(self, name: str) -> Iterator[Cluster]:
        if self._cluster is None:
            settings = _asked(self._session.config)
            folder = self._stack.enter_context(_folder(self._session, self._folders))
            self._cluster = self._stack.enter_context(started_cluster(folder, **settings))
        cluster = self._cluster
        try:
            with watched(cluster), cluster.use(f"{name}-{next(self._uses)}-"):
                yield cluster
        except BaseException:
            # Only what comes after the test gets here: the cluster did not become what it was.
            self.close()
            raise

    def close(self) -> None:
        self._cluster = None
        self._stack.close()


@contextlib.contextmanager
def _folder(session: pytest.Session, folders: pytest.TempPathFactory) -> Iterator[Path]:
    """For a cluster's data, which stays to be looked at if a test failed."""
    folder = folders.mktemp("zmqueue")
    yield folder / "data"
    if not session.testsfailed:
        shutil.rmtree(folder, ignore_errors=True)


def _asked(config: pytest.Config) -> dict[str, Any]:
    brokers = config.getoption("--zmqueue-brokers") or config.getini("zmqueue_brokers")
    storage = config.getoption("--zmqueue-storage") or config.getini("zmqueue_storage")
    settings = {}
    for line in config.getini("zmqueue_config"):
        key, separator, value = line.partition("=")
        if not separator:
            raise pytest.UsageError(f"zmqueue_config: {line!r} is not SECTION.NAME = VALUE")
        settings[key.strip()] = value.strip()
    if not str(brokers).isdigit() or not 1 <= int(brokers) <= BROKERS_MAX:
        raise pytest.UsageError(f"zmqueue_brokers: {brokers!r} is not a number in 1..{BROKERS_MAX}")
    if storage not in get_args(Storage):
        raise pytest.UsageError(f"zmqueue_storage: {storage!r} is neither disk nor memory")
    return {"brokers": int(brokers), "storage": storage, "config": settings}


@pytest.fixture(scope="session")
def _zmqueue_shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Shared]:
    shared = _Shared(request.session, tmp_path_factory)
    yield shared
    shared.close()


@pytest.fixture
def zmqueue_cluster(request: pytest.FixtureRequest, _zmqueue_shared: _Shared) -> Iterator[Cluster]:
    """A healthy cluster, shared by the tests of this session one after the other."""
    with _zmqueue_shared.lent(request.node.name) as cluster:
        yield cluster


@pytest.fixture
def zmqueue_cluster_factory(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterFactory]:
    """Makes clusters of one's own: `zmqueue_cluster_factory(brokers=3, storage="disk", config={})`."""
    with contextlib.ExitStack() as stack:

        def make(**settings: Any) -> Cluster:
            folder = stack.enter_context(_folder(request.session, tmp_path_factory))
            return stack.enter_context(running_cluster(folder, **settings))

        yield make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections += [(f"log of {name}", "\n".join(lines)) for name, lines in log_ends()]
    return report
