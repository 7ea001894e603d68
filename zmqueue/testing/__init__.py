"""Real clusters for tests: a pytest plugin, and the same without pytest.

    def test_a_record_comes_back(zmqueue_cluster):
        topic = zmqueue_cluster.topic("orders")
        zmqueue_cluster.producer().send(topic, b"one").get(10)
        ...

Installed with zmqueue the fixtures are there by themselves (entry point `pytest11`); `pytest_plugins =
["zmqueue.testing"]` asks for them by name. `running_cluster` is what they are made of, for other runners and for
fixtures of one's own. pytest is imported by the plugin only, the rest when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zmqueue.testing.cluster import Cluster, NotHealthy, running_cluster

__all__ = ["Cluster", "NotHealthy", "running_cluster"]

pytest_plugins = ["zmqueue.testing.plugin"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'zmqueue.testing' has no attribute {name!r}")
    from zmqueue.testing import cluster

    return getattr(cluster, name)
