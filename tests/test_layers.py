"""The direction of imports, as docs/architecture.md draws it: each layer knows only those below it.

Imports are read from the source, so that those inside functions and under TYPE_CHECKING count as well.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "zmqueue"

# From the bottom up. Layers on one line do not know each other.
ORDER: list[set[str]] = [
    {"errors"},
    {"model"},
    {"config"},
    {"wire"},
    {"core"},
    {"log"},
    {"transport"},
    {"broker", "client"},
    {"gateway", "spark"},
    {"processes"},
    {"status"},
    {"supervisor"},
    {"cli"},
    {"testing"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}

# Foreign modules that have one owner.
OWNERS = {
    "zmq": lambda path: path == "transport.py",
    "pysyncobj": lambda path: path.startswith("broker/raft") and path.endswith(".py"),
}

# core decides from its arguments alone: no clock, no chance, no world.
IMPURE = {"os", "socket", "time", "random", "threading", "asyncio", "select", "subprocess", "datetime", "zmq"}


# `from zmqueue import Producer` reaches the client through the package's front, which is for those above it.
BELOW_THE_FRONT = {name for name, rank in RANK.items() if rank <= RANK["client"]}


class Import(NamedTuple):
    path: str  # of the importer, below zmqueue/
    line: int
    module: str

    def __str__(self) -> str:
        return f"zmqueue/{self.path}:{self.line} imports {self.module}"


def imports_of(path: str, source: str) -> Iterator[Import]:
    package = ["zmqueue", *Path(path).parts[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from zmqueue import wire` imports a layer, `from zmqueue.wire import batch` stays in one.
            if module == "zmqueue":
                names = [alias.name for alias in node.names if alias.name != "__version__"]
                yield from (Import(path, node.lineno, f"zmqueue.{name}") for name in names)
            else:
                yield Import(path, node.lineno, module)


def layer_of_path(path: str) -> str:
    return Path(path).parts[0].removesuffix(".py")


def layer_of_module(module: str) -> str | None:
    """The layer of one of our modules; names that `zmqueue` itself offers belong to whoever defines them."""
    if module == "zmqueue" or not module.startswith("zmqueue."):
        return None
    name = module.split(".")[1]
    return name if name in RANK else None


def faults(imports: Iterator[Import]) -> Iterator[str]:
    for found in imports:
        layer, top = layer_of_path(found.path), found.module.split(".")[0]
        owner = OWNERS.get(top)
        if owner is not None and not owner(found.path):
            yield f"{found}: not its owner"
        if layer == "core" and top in IMPURE:
            yield f"{found}: core is pure"
        if found.module.startswith("zmqueue.") and layer_of_module(found.module) is None and layer in BELOW_THE_FRONT:
            yield f"{found}: only what stands above the client may use the package's front"
        target = layer_of_module(found.module)
        # The package's front (names for users) and `python -m zmqueue` stand above everything.
        if target is None or layer in ("__init__", "__main__") or target == layer:
            continue
        if RANK[target] >= RANK[layer]:
            yield f"{found}: {target} is not below {layer}"


def all_imports() -> Iterator[Import]:
    for file in sorted(PACKAGE.rglob("*.py")):
        yield from imports_of(file.relative_to(PACKAGE).as_posix(), file.read_text())


def test_imports_point_down_only():
    assert list(faults(all_imports())) == []


def test_every_module_belongs_to_a_layer():
    tops = {layer_of_path(file.relative_to(PACKAGE).as_posix()) for file in PACKAGE.rglob("*.py")}
    assert tops - {"__init__", "__main__"} <= set(RANK)


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        ("log/segment.py", "from zmqueue.broker import server", "broker is not below log"),
        ("log/segment.py", "def f():\n    import zmqueue.client.admin", "client is not below log"),
        ("broker/server.py", "from zmqueue.client.admin import Admin", "client is not below broker"),
        ("client/admin.py", "from ..broker import server", "broker is not below client"),
        ("wire/batch.py", "from zmqueue import core", "core is not below wire"),
        ("broker/server.py", "from zmqueue import Admin", "may use the package's front"),
        ("broker/server.py", "import zmq", "not its owner"),
        ("transport.py", "import pysyncobj.node", "not its owner"),
        ("core/replica.py", "from time import monotonic", "core is pure"),
        ("core/replica.py", "import os.path", "core is pure"),
    ],
)
def test_a_breach_is_seen(path, source, fault):
    found = list(faults(imports_of(path, source)))
    assert len(found) == 1
    assert found[0].endswith(fault)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("transport.py", "import zmq.utils.monitor"),
        ("broker/raft.py", "from pysyncobj import SyncObj"),
        ("broker/raft_journal.py", "import pysyncobj"),
        ("supervisor.py", "from zmqueue.broker.raft_folder import format_folder"),
        ("core/replica.py", "from . import effects\nfrom zmqueue.wire import batch\nfrom zmqueue import errors"),
    ],
)
def test_what_is_allowed_is_not_reported(path, source):
    assert list(faults(imports_of(path, source))) == []


@pytest.mark.parametrize("module", ["zmqueue", "zmqueue.cli.main"])
def test_heavy_modules_are_imported_only_when_needed(module):
    heavy = ["zmq", "rich", "pysyncobj", "cryptography", "cbor2"]
    probe = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
