"""A consumer's figures, in the groups and under the names that kafka-python has for them."""

from __future__ import annotations

import time
from typing import Any

from zmqueue.client.fetcher import Fetcher
from zmqueue.client.group import Group
from zmqueue.client.handout import HandOut

Figures = dict[str, dict[str, Any]]


def figures(client_id: str, fetcher: Fetcher, handout: HandOut, group: Group | None) -> Figures:
    lags = {
        slot.partition: max(0, slot.high_watermark - position)
        for slot, position, _ in handout.positions()
        if slot.high_watermark >= 0
    }
    found: Figures = {
        "consumer-metrics": {"client-id": client_id, "assigned-partitions": len(fetcher.slots)},
        "consumer-fetch-manager-metrics": {
            "fetch-total": fetcher.fetches,
            "bytes-consumed-total": fetcher.bytes,
            "records-consumed-total": handout.records,
            "records-lag-max": max(lags.values(), default=0),
        },
    }
    for (topic, partition), lag in lags.items():
        found[f"consumer-fetch-manager-metrics.{topic}-{partition}"] = {"records-lag": lag}
    if group is not None:
        membership, committer = group.membership, group.committer
        now = time.monotonic()
        found["consumer-coordinator-metrics"] = {
            "group-id": membership.member.settings.group,
            "state": membership.member.state.name.lower(),
            "generation": membership.member.generation,
            "heartbeat-total": membership.heartbeats,
            "last-heartbeat-seconds-ago": now - membership.member.heard_at if membership.heartbeats else -1,
            "last-poll-seconds-ago": 0.0 if membership.inside else now - membership.polled_at,
            "rebalance-total": membership.rebalances,
            "coordinator-moves-total": group.coordinator.moves,
            "commit-total": committer.commits,
            "failed-commit-total": committer.commits_failed,
        }
    return found
