"""The messages and batches whose bytes are kept in this folder, and the tool that writes those files.

    python -m tests.golden.samples           says which entries differ from what the code writes today
    python -m tests.golden.samples --write   writes them anew

The bytes are a promise to other builds: a file may only change together with a version number, or by new entries. The
tests compare and never write.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from zmqueue import errors
from zmqueue.model import PartitionKey
from zmqueue.wire import batch, frames
from zmqueue.wire import group_messages as g
from zmqueue.wire import group_records as r
from zmqueue.wire import messages as m

FOLDER = Path(__file__).parent
TOPIC = bytes(range(16))
OTHER = bytes(range(240, 256))
CORRELATION = 0x0102030405060708

_PARTITION = m.PartitionInfo(partition=3, leader=2, leader_epoch=7, replicas=[2, 4], isr=[2, 4], elr=[])
_TOPIC_INFO = m.TopicInfo(
    name="events",
    topic_id=TOPIC,
    replication_factor=2,
    min_insync_replicas=1,
    storage="disk",
    config={"retention.ms": "1000"},
    partitions=[_PARTITION],
)
_BROKER = m.BrokerInfo(id=1, host="127.0.0.1", port=9092, epoch=4, fenced=False)

_MEMBER = g.MemberInfo("m-1", None, "c", ["events"], [m.PartitionEntry(TOPIC, 3)], [m.PartitionEntry(TOPIC, 4)], 10_000)

# By type; "Type, what is special" for a second sample of one.
MESSAGES: dict[str, Struct] = {
    "Failure": m.Failure(6, "broker 2 leads events-3"),
    "Done": m.Done(),
    "MetadataRequest": m.MetadataRequest(["events", "größe"]),
    "MetadataRequest, all topics": m.MetadataRequest(),
    "BrokerInfo": _BROKER,
    "PartitionInfo": _PARTITION,
    "TopicInfo": _TOPIC_INFO,
    "MetadataResponse": m.MetadataResponse("c1", 1, 300, [_BROKER], [_TOPIC_INFO]),
    "CreateTopicRequest": m.CreateTopicRequest("events", 10, 2, {"storage": "memory"}, bytes(range(16))),
    "CreateTopicRequest, defaults": m.CreateTopicRequest("events"),
    "CreateTopicResponse": m.CreateTopicResponse(TOPIC, 10, 2),
    "DeleteTopicRequest": m.DeleteTopicRequest("events"),
    "CreatePartitionsRequest": m.CreatePartitionsRequest("events", TOPIC, 20),
    "AlterTopicRequest": m.AlterTopicRequest("events", TOPIC, 3, {"retention.ms": "1000", "quota.bytes": None}),
    "ElectUncleanRequest": m.ElectUncleanRequest(TOPIC, 3, 2),
    "StatusRequest": m.StatusRequest(),
    "StatusResponse": m.StatusResponse(
        broker=1,
        epoch=4,
        fenced=False,
        pid=12345,
        uptime_ms=2**40,
        controller=3,
        term=9,
        index=300,
        voting=True,
        partitions=20,
        leading=10,
        under_replicated=1,
        offline=0,
        bad_frames=2,
    ),
    "ProducerIdRequest": m.ProducerIdRequest(),
    "ProducerIdResponse": m.ProducerIdResponse(1001, 0),
    "ProduceEntry": m.ProduceEntry(TOPIC, 3),
    "ProduceRequest": m.ProduceRequest(-1, 30_000, [m.ProduceEntry(TOPIC, 3), m.ProduceEntry(OTHER, 99_999)]),
    "ProduceResult": m.ProduceResult(0, 2**40, 7, 2, 2, True, 1_700_000_000_000),
    "ProduceResult, failed": m.ProduceResult(19),
    "ProduceResponse": m.ProduceResponse([m.ProduceResult(0, 500, 7, 2, 2), m.ProduceResult(6, leader=4)]),
    "FetchEntry": m.FetchEntry(TOPIC, 3, 500, 2**20),
    "FetchEntry, with what was read before": m.FetchEntry(TOPIC, 3, 500, 2**20, 6),
    "FetchRequest": m.FetchRequest(500, 1, 2**23, 1000, [m.FetchEntry(TOPIC, 3, 500, 2**20)]),
    "FetchResult": m.FetchResult(0, 600, 10, 7, 2),
    "FetchResult, truncated": m.FetchResult(1031, 600, 10, 7, 2, 450),
    "FetchResponse": m.FetchResponse([m.FetchResult(0, 600, 10, 7, 2), m.FetchResult(1, 600, 10)]),
    "OffsetEntry": m.OffsetEntry(TOPIC, 3, -2),
    "ListOffsetsRequest": m.ListOffsetsRequest(
        [m.OffsetEntry(TOPIC, 3, -1), m.OffsetEntry(OTHER, 0, 1_700_000_000_000)]
    ),
    "OffsetResult": m.OffsetResult(0, 500, 1_700_000_000_000, 7),
    "ListOffsetsResponse": m.ListOffsetsResponse([m.OffsetResult(0, 600), m.OffsetResult(100)]),
    "DeleteRecordsRequest": m.DeleteRecordsRequest(TOPIC, 3, 500),
    "DeleteRecordsResponse": m.DeleteRecordsResponse(500),
    "FindRequest": m.FindRequest(TOPIC, 3, b"customer-7", 500, 100),
    "FindResponse": m.FindResponse([510, 2**40], 2**41, 2**41, 10, 7),
    "FetchBackwardRequest": m.FetchBackwardRequest(TOPIC, 3, -1, 2**20),
    "FetchBackwardResponse": m.FetchBackwardResponse(600, 600, 10, 7),
    "PartitionEntry": m.PartitionEntry(TOPIC, 3),
    "IndexHealth": m.IndexHealth("header:customer", 3, 600, 9_900, 590, 20, 1_600),
    "DescribePartitionsRequest": m.DescribePartitionsRequest([m.PartitionEntry(TOPIC, 3)]),
    "PartitionHealth": m.PartitionHealth(0, 10, 600, 610, 2, 2**33),
    "DescribePartitionsResponse": m.DescribePartitionsResponse([m.PartitionHealth(0, 10, 600, 610, 2, 4096)]),
    "Heartbeat": m.Heartbeat("c1", 2, 4, 300, sent_ms=2**40),
    "HeartbeatReply": m.HeartbeatReply(True, 3, sent_ms=2**40),
    "AckRow": m.AckRow(TOPIC, 3, 7, 610),
    "Acks": m.Acks("c1", 4, 4, [m.AckRow(TOPIC, 3, 7, 610)]),
    "ReplicaFetchRequest": m.ReplicaFetchRequest(
        cluster_id="c1",
        broker=4,
        broker_epoch=4,
        topic_id=TOPIC,
        partition=3,
        leader_epoch=7,
        fetch_id=55,
        log_end=610,
        last_epoch=6,
        durable_end=600,
        bytes_max=2**22,
    ),
    "ReplicaFetchResponse": m.ReplicaFetchResponse(TOPIC, 3, 55, 7, 0, 600, 10, 650),
    "ReplicaFetchResponse, diverged": m.ReplicaFetchResponse(TOPIC, 3, 55, 7, 0, 600, 10, 650, 6, 605),
    "ReplicaFetchResponse, to one that has nothing": m.ReplicaFetchResponse(
        TOPIC, 3, 55, 7, 0, 600, 10, 650, first_offset=8, start_epoch=6, producers=b"\x90"
    ),
    "Push": m.Push("c1", 2, 4, 7, 610, 6, 600, 650),
    "BeaconRow": m.BeaconRow(TOPIC, 3, 7, 650, 600, 10),
    "Beacon": m.Beacon("c1", 2, 4, [m.BeaconRow(TOPIC, 3, 7, 650, 600, 10)]),
    "FindCoordinatorRequest": g.FindCoordinatorRequest("readers"),
    "FindCoordinatorResponse": g.FindCoordinatorResponse(6, 2, 7),
    "GroupHeartbeatRequest": g.GroupHeartbeatRequest("readers", "m-1", 4, 3_000, [m.PartitionEntry(TOPIC, 3)]),
    "GroupHeartbeatRequest, to join": g.GroupHeartbeatRequest(
        group="readers",
        member_id="m-1",
        revision=0,
        wait_ms=3_000,
        instance_id="rack-1",
        client_id="c",
        topics=["events", "größe"],
        assignor="sticky",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=300_000,
    ),
    "GroupHeartbeatRequest, to leave": g.GroupHeartbeatRequest("readers", "m-1", 4, 0, leaving=True),
    "AssignedRow": g.AssignedRow(3, 500, 7),
    "AssignedRow, of a new partition": g.AssignedRow(10, fresh=True),
    "AssignedTopic": g.AssignedTopic(TOPIC, "events", [g.AssignedRow(3, 500, 7), g.AssignedRow(4)]),
    "GroupHeartbeatResponse": g.GroupHeartbeatResponse(
        9, 5, [g.AssignedTopic(TOPIC, "events", [g.AssignedRow(3, 500, 7)])]
    ),
    "GroupHeartbeatResponse, nothing new": g.GroupHeartbeatResponse(9, 5),
    "CommitRow": g.CommitRow(TOPIC, 3, 510, 7, "by hand"),
    "CommitOffsetsRequest": g.CommitOffsetsRequest("readers", [g.CommitRow(TOPIC, 3, 510, 7)], "m-1", 9, 12),
    "CommitOffsetsRequest, of nobody": g.CommitOffsetsRequest("readers", [g.CommitRow(TOPIC, 3, 0)]),
    "CommitOffsetsResponse": g.CommitOffsetsResponse([0, 22]),
    "FetchOffsetsRequest": g.FetchOffsetsRequest("readers", [m.PartitionEntry(TOPIC, 3)]),
    "FetchOffsetsRequest, everything": g.FetchOffsetsRequest("readers"),
    "CommittedRow": g.CommittedRow(TOPIC, 3, 510, 7, "by hand", 1_700_000_000_000),
    "FetchOffsetsResponse": g.FetchOffsetsResponse([g.CommittedRow(TOPIC, 3, 510, 7, "", 1_700_000_000_000)]),
    "ListGroupsRequest": g.ListGroupsRequest(),
    "GroupRow": g.GroupRow("readers", "stable", 9, 2, "sticky"),
    "ListGroupsResponse": g.ListGroupsResponse([g.GroupRow("readers", "stable", 9, 2, "sticky")]),
    "DescribeGroupRequest": g.DescribeGroupRequest("readers"),
    "MemberInfo": _MEMBER,
    "DescribeGroupResponse": g.DescribeGroupResponse("readers", "moving", 9, "sticky", [_MEMBER]),
    "DeleteGroupRequest": g.DeleteGroupRequest("readers"),
}

# What `__consumer_offsets` holds, keys and values.
RECORDS: dict[str, Struct] = {
    "OffsetKey": r.OffsetKey("größe", TOPIC, 3),
    "GroupKey": r.GroupKey("readers"),
    "CommittedOffset": r.CommittedOffset(510, 7, "by hand", 1_700_000_000_000, "m-1", 12),
    "CommittedOffset, of nobody": r.CommittedOffset(0, -1, "", 1_700_000_000_000, "", 0),
    "GroupState": r.GroupState(
        generation=9,
        assignor="sticky",
        emptied_ms=-1,
        topics=[r.KnownTopic("events", TOPIC, 4, 2), r.KnownTopic("later", None, 0, 0)],
        members=[
            r.MemberState(
                member_id="m-2",
                instance_id="rack-1",
                replaced=["m-0"],
                client_id="c",
                topics=[0, 1],
                assignor="sticky",
                session_timeout_ms=10_000,
                rebalance_timeout_ms=300_000,
                revision=5,
                held=[r.Run(0, 3, 1, -1, [0, 1]), r.Run(0, 3, 1, 5, [3])],
            ),
            r.MemberState(
                "m-3", None, [], "", [0], "", 10_000, 10_000, 2, [r.Run(0, 9, 2, -1, [2])], [r.Waiting(0, [3])]
            ),
        ],
    ),
    "GroupState, without members": r.GroupState(4, "range", 1_700_000_000_000, [], []),
}


def message_types() -> dict[str, type[Struct]]:
    """Every type that travels, by name."""
    bases = (m.Message, m.Row)
    found = [*vars(m).values(), *vars(g).values()]
    return {c.__name__: c for c in found if isinstance(c, type) and issubclass(c, bases) and c not in bases}


def sample(cls: type[Struct]) -> Struct:
    return MESSAGES[cls.__name__]


def head(operation: frames.Operation) -> frames.Head:
    return frames.Head(frames.Kind.REQUEST, operation, CORRELATION)


def multiparts() -> dict[str, list[bytes]]:
    """Whole multipart messages: each operation's request, response and failure, and what brokers publish."""
    small = batch.encode([b"hello"])
    pair = [small.header.pack(), small.body]
    raw = {
        "PRODUCE request": pair * 2,
        "FETCH response": [b"".join(pair) * 2, b""],
        "REPLICA_FETCH response": [b"".join(pair)],
        "FIND response": [b"".join(pair)],
        "FETCH_BACKWARD response": [b"".join(pair) * 2],
    }
    found: dict[str, list[bytes]] = {}
    for operation, cls in frames.REQUESTS.items():
        name = f"{operation.name} request"
        found[name] = frames.request(operation, CORRELATION, sample(cls), raw.get(name))
    for operation, cls in frames.RESPONSES.items():
        name = f"{operation.name} response"
        found[name] = frames.response(head(operation), sample(cls), raw.get(name))
    found["PRODUCE failure"] = frames.failure(head(frames.Operation.PRODUCE), 42, "malformed")
    found["push"] = [frames.route(PartitionKey(TOPIC, 3)), frames.pack(MESSAGES["Push"]), *pair]
    found["beacon"] = [frames.BEACON_ROUTE, frames.pack(MESSAGES["Beacon"])]
    return found


# What `batch.encode` is given, by name of the golden batch.
_ATTRIBUTES = {"append time": batch.TIMESTAMP_TYPE, "transactional": batch.TRANSACTIONAL, "control": batch.CONTROL}
_FULL: dict[str, Any] = {
    "values": [b"hello", b"", None, bytes(range(32))],
    "keys": [b"k", None, b"", b"\xff"],
    "headers": [None, [], [["a", b"1"], ["ä", None]], None],
    "timestamp_deltas": [0, 5, -3, 1],
    "base_timestamp": 1_700_000_000_000,
    "producer_id": 1001,
    "producer_epoch": 2,
    "base_sequence": 2**33,
}


def batches() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {
        "values only": {"values": [b"hello", b"world"]},
        "one null value": {"values": [None]},
        "gaps": {"values": [b"a", b"b", b"c"], "offset_deltas": [0, 4, 70_000]},
        "keys": {"values": [b"a"], "keys": [b"k"]},
        "largest header fields": {
            "values": [b"x"],
            "base_timestamp": 2**62 - 1,
            "producer_id": 2**63 - 1,
            "producer_epoch": 2**15 - 1,
            "base_sequence": 2**63 - 1,
        },
    }
    for codec, chosen in itertools.product(batch.CODECS, _subsets(list(_ATTRIBUTES))):
        attributes = sum(_ATTRIBUTES[name] for name in chosen)
        name = ", ".join([codec, *chosen])
        found[name] = {**_FULL, "codec": batch.CODECS[codec], "attributes": attributes}
    return found


def _subsets(names: list[str]) -> Iterator[tuple[str, ...]]:
    for size in range(len(names) + 1):
        yield from itertools.combinations(names, size)


def encode_batch(arguments: dict[str, Any]) -> batch.Batch:
    """The sample, with offset and epoch given as a leader does."""
    made = batch.encode(**arguments)
    made.header.base_offset, made.header.leader_epoch = 2**40 + 1, 7
    return made


def error_numbers() -> dict[str, dict[str, Any]]:
    return {
        errors.error_name(cls): {
            "code": cls.code,
            "retriable": cls.retriable,
            "refresh_metadata": cls.refresh_metadata,
            "indeterminate": cls.indeterminate,
        }
        for _, cls in sorted(errors.BY_CODE.items())
    }


def _pack_batch(arguments: dict[str, Any]) -> str:
    made = encode_batch(arguments)
    return (made.header.pack() + made.body).hex()


def current() -> dict[str, dict[str, Any]]:
    """What the files would hold if they were written now."""
    return {
        "messages.json": {name: frames.pack(message).hex() for name, message in MESSAGES.items()},
        "group_records.json": {name: r.encode(record).hex() for name, record in RECORDS.items()},
        "frames.json": {name: [frame.hex() for frame in parts] for name, parts in multiparts().items()},
        "operations.json": {operation.name: int(operation) for operation in frames.Operation},
        "batches.json": {name: _pack_batch(arguments) for name, arguments in batches().items()},
        "errors.json": error_numbers(),
    }


def stored(file: str) -> Any:
    path = FOLDER / file
    return json.loads(path.read_text()) if path.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the files anew")
    write = parser.parse_args().write
    differing = 0
    for file, entries in current().items():
        old = stored(file)
        for name in sorted(old.keys() | entries.keys()):
            if old.get(name) != entries.get(name):
                differing += 1
                print(f"{file}: {name}: {'new' if name not in old else 'gone' if name not in entries else 'differs'}")
        if write:
            (FOLDER / file).write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n")
    return 1 if differing and not write else 0


if __name__ == "__main__":
    sys.exit(main())
