"""How a message becomes ZeroMQ frames and back.

    request or response:   head (12 bytes) · CBOR body · raw frames
    head, little-endian:   version u8 · kind u8 · operation u16 · correlation u64

The correlation id is the caller's; the answer carries it back. Publications among brokers have a routing prefix instead
of a head: topic id and partition number in fixed width, because SUB sockets match by prefix, and names would collide.
Every decoding function either returns or raises one typed error: `BadFrame` where not even the head can be read (there
is nobody to answer), `UnsupportedVersion`, `UnknownOperation` or `InvalidRequest` where it can.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from zmqueue.errors import BadFrame, InvalidRequest, UnknownOperation, UnsupportedVersion
from zmqueue.model import PartitionKey
from zmqueue.wire import cbor, group_messages, messages

VERSION = 1
_HEAD = struct.Struct("<BBHQ")
_ROUTE = struct.Struct(">16sI")
BEACON_ROUTE = _ROUTE.pack(bytes(16), 0xFFFFFFFF)
# Head and body, and then at most two frames for each of 1,024 produced batches, or one for each of 4,096 fetches.
FRAMES_MAX = 2 + 4096

M = TypeVar("M", bound=Struct)


class Kind(IntEnum):
    REQUEST = 0
    RESPONSE = 1
    FAILURE = 2


class Operation(IntEnum):
    """Numbers are wire format: never reused. Those from 100 up are for brokers among themselves."""

    METADATA = 1
    STATUS = 2
    CREATE_TOPIC = 3
    DELETE_TOPIC = 4
    PRODUCER_ID = 5
    PRODUCE = 6
    FETCH = 7
    LIST_OFFSETS = 8
    DESCRIBE_PARTITIONS = 9
    ELECT_UNCLEAN = 10
    DELETE_RECORDS = 11
    ALTER_TOPIC = 12
    CREATE_PARTITIONS = 13
    FIND = 14
    FETCH_BACKWARD = 15
    FIND_COORDINATOR = 20
    GROUP_HEARTBEAT = 21
    COMMIT_OFFSETS = 22
    FETCH_OFFSETS = 23
    LIST_GROUPS = 24
    DESCRIBE_GROUP = 25
    DELETE_GROUP = 26
    HEARTBEAT = 100
    ACKS = 101
    REPLICA_FETCH = 102


REQUESTS: dict[Operation, type[Struct]] = {
    Operation.METADATA: messages.MetadataRequest,
    Operation.STATUS: messages.StatusRequest,
    Operation.CREATE_TOPIC: messages.CreateTopicRequest,
    Operation.DELETE_TOPIC: messages.DeleteTopicRequest,
    Operation.PRODUCER_ID: messages.ProducerIdRequest,
    Operation.PRODUCE: messages.ProduceRequest,
    Operation.FETCH: messages.FetchRequest,
    Operation.LIST_OFFSETS: messages.ListOffsetsRequest,
    Operation.DESCRIBE_PARTITIONS: messages.DescribePartitionsRequest,
    Operation.ELECT_UNCLEAN: messages.ElectUncleanRequest,
    Operation.DELETE_RECORDS: messages.DeleteRecordsRequest,
    Operation.ALTER_TOPIC: messages.AlterTopicRequest,
    Operation.CREATE_PARTITIONS: messages.CreatePartitionsRequest,
    Operation.FIND: messages.FindRequest,
    Operation.FETCH_BACKWARD: messages.FetchBackwardRequest,
    Operation.FIND_COORDINATOR: group_messages.FindCoordinatorRequest,
    Operation.GROUP_HEARTBEAT: group_messages.GroupHeartbeatRequest,
    Operation.COMMIT_OFFSETS: group_messages.CommitOffsetsRequest,
    Operation.FETCH_OFFSETS: group_messages.FetchOffsetsRequest,
    Operation.LIST_GROUPS: group_messages.ListGroupsRequest,
    Operation.DESCRIBE_GROUP: group_messages.DescribeGroupRequest,
    Operation.DELETE_GROUP: group_messages.DeleteGroupRequest,
    Operation.HEARTBEAT: messages.Heartbeat,
    Operation.ACKS: messages.Acks,
    Operation.REPLICA_FETCH: messages.ReplicaFetchRequest,
}
RESPONSES: dict[Operation, type[Struct]] = {
    Operation.METADATA: messages.MetadataResponse,
    Operation.STATUS: messages.StatusResponse,
    Operation.CREATE_TOPIC: messages.CreateTopicResponse,
    Operation.DELETE_TOPIC: messages.Done,
    Operation.PRODUCER_ID: messages.ProducerIdResponse,
    Operation.PRODUCE: messages.ProduceResponse,
    Operation.FETCH: messages.FetchResponse,
    Operation.LIST_OFFSETS: messages.ListOffsetsResponse,
    Operation.DESCRIBE_PARTITIONS: messages.DescribePartitionsResponse,
    Operation.ELECT_UNCLEAN: messages.Done,
    Operation.DELETE_RECORDS: messages.DeleteRecordsResponse,
    Operation.ALTER_TOPIC: messages.Done,
    Operation.CREATE_PARTITIONS: messages.Done,
    Operation.FIND: messages.FindResponse,
    Operation.FETCH_BACKWARD: messages.FetchBackwardResponse,
    Operation.FIND_COORDINATOR: group_messages.FindCoordinatorResponse,
    Operation.GROUP_HEARTBEAT: group_messages.GroupHeartbeatResponse,
    Operation.COMMIT_OFFSETS: group_messages.CommitOffsetsResponse,
    Operation.FETCH_OFFSETS: group_messages.FetchOffsetsResponse,
    Operation.LIST_GROUPS: group_messages.ListGroupsResponse,
    Operation.DESCRIBE_GROUP: group_messages.DescribeGroupResponse,
    Operation.DELETE_GROUP: messages.Done,
    Operation.HEARTBEAT: messages.HeartbeatReply,
    Operation.REPLICA_FETCH: messages.ReplicaFetchResponse,
}


class Head(Struct, frozen=True, gc=False):
    kind: Kind
    operation: Operation
    correlation: int


def pack(message: Struct) -> bytes:
    return cbor.dumps(msgspec.to_builtins(message, builtin_types=(bytes,)))


def unpack(data: bytes, cls: type[M]) -> M:
    """Decode a body and hold it against its type. Raises InvalidRequest."""
    try:
        return msgspec.convert(cbor.loads(data), cls, builtin_types=(bytes,))
    except (BadFrame, msgspec.ValidationError) as error:
        raise InvalidRequest(f"{cls.__name__}: {error}") from error


def request(operation: Operation, correlation: int, message: Struct, raw: list[bytes] | None = None) -> list[bytes]:
    return [_HEAD.pack(VERSION, Kind.REQUEST, operation, correlation), pack(message), *(raw or ())]


def response(head: Head, message: Struct, raw: list[bytes] | None = None) -> list[bytes]:
    return [_HEAD.pack(VERSION, Kind.RESPONSE, head.operation, head.correlation), pack(message), *(raw or ())]


def failure(head: Head, code: int, message: str) -> list[bytes]:
    # Texts of errors may quote file names, which need not be Unicode.
    text = message[: messages.TEXT_MAX].encode(errors="replace").decode()
    body = pack(messages.Failure(code, text))
    return [_HEAD.pack(VERSION, Kind.FAILURE, head.operation, head.correlation), body]


def parse_head(frames: list[bytes]) -> Head:
    """Whose message this is. Bytes that are no head at all raise BadFrame."""
    if not 2 <= len(frames) <= FRAMES_MAX or len(frames[0]) != _HEAD.size:
        raise BadFrame(f"a message has a head of {_HEAD.size} bytes and a body")
    version, kind, operation, correlation = _HEAD.unpack(frames[0])
    if version != VERSION:
        raise UnsupportedVersion(f"protocol version {version}; this side speaks {VERSION}")
    try:
        return Head(_KINDS[kind], _OPERATIONS[operation], correlation)
    except KeyError:
        raise UnknownOperation(f"no operation {operation} of kind {kind}") from None


def parse_request(head: Head, frames: list[bytes]) -> Any:
    if head.kind != Kind.REQUEST:
        raise InvalidRequest("not a request")
    return unpack(frames[1], REQUESTS[head.operation])


def parse_response(head: Head, frames: list[bytes]) -> Any:
    """The response's message, or the `Failure`."""
    if head.kind == Kind.FAILURE:
        return unpack(frames[1], messages.Failure)
    cls = RESPONSES.get(head.operation)
    if head.kind != Kind.RESPONSE or cls is None:
        raise InvalidRequest("not a response")
    return unpack(frames[1], cls)


def echo(frames: list[bytes]) -> Head | None:
    """A head good enough to send a failure back for a request that `parse_head` refused."""
    if len(frames) < 1 or len(frames[0]) != _HEAD.size:
        return None
    _, _, operation, correlation = _HEAD.unpack(frames[0])
    return Head(Kind.REQUEST, operation, correlation)


def route(key: PartitionKey) -> bytes:
    """The prefix under which a partition's batches are published."""
    return _ROUTE.pack(key.topic_id, key.partition)


def parse_route(prefix: bytes) -> PartitionKey:
    if len(prefix) != _ROUTE.size:
        raise BadFrame(f"a routing prefix has {_ROUTE.size} bytes")
    return PartitionKey(*_ROUTE.unpack(prefix))


_KINDS = {int(kind): kind for kind in Kind}
_OPERATIONS = {int(operation): operation for operation in Operation}
