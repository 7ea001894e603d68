from __future__ import annotations

from pathlib import Path

import pytest
from unit.log.bit_flips import flip_bits


@pytest.mark.parametrize("seed", range(2))
def test_a_flipped_bit_is_found_in_whatever_file_and_never_served(tmp_path: Path, seed: int):
    """tools/flip-bits does the same thousands of times."""
    results = flip_bits(tmp_path, 200, seed)
    assert sum(found["flips"] for found in results.values()) == 200
    # Every kind of file proves itself whole, so a look at all of them misses none.
    assert all(found["verify"] == found["flips"] for found in results.values())
    assert {"log", "active log", "index", "keys", "start", "compacted", "meta", "session"} <= set(results)
    assert {f"raft/{name}" for name in ("journal", "vote", "snapshot", "meta")} <= set(results)
