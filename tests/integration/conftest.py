"""What the integration tests share."""

from __future__ import annotations

import pytest

from zmqueue.testing import Cluster


@pytest.fixture
def cluster(zmqueue_cluster: Cluster) -> Cluster:
    """Five brokers that the whole session shares; modules that need others make their own under this name."""
    return zmqueue_cluster
