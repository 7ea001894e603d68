"""The other brokers: requests to them, requests from them, and what they publish.

Each broker has a ROUTER for the others and a PUB socket; to each of the others it holds a DEALER, and one SUB socket
connected to all of them. Acknowledgements gather during a turn of the loop and leave as one message per leader.

What arrives is checked here, batch by batch, before the core sees it: a broken message is counted and dropped, and the
protocol repairs what it carried (a push becomes a gap, a fetch times out).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from zmqueue.config import ClusterFile, Config, Member
from zmqueue.core.effects import Publish
from zmqueue.errors import BadFrame, UnknownOperation, ZmqueueError
from zmqueue.model import PartitionKey
from zmqueue.transport import Frames, Socket, Transport
from zmqueue.wire import frames as f
from zmqueue.wire.batch import Batch, check_body, parse_header, split
from zmqueue.wire.frames import Head, Kind, Operation
from zmqueue.wire.messages import (
    AckRow,
    Acks,
    Beacon,
    BeaconRow,
    Heartbeat,
    HeartbeatReply,
    Push,
    ReplicaFetchRequest,
    ReplicaFetchResponse,
)

_logger = logging.getLogger(__name__)
MESSAGES_PER_TURN = 200
FRAME_OVERHEAD_BYTES = 64 * 1024


class PeerEvents(Struct):
    """What the server does about messages of other brokers."""

    on_link: Callable[[int, bool], None]
    on_heartbeat: Callable[[Heartbeat], HeartbeatReply]
    on_heartbeat_reply: Callable[[HeartbeatReply], None]
    on_acks: Callable[[Acks], None]
    on_follower_fetch: Callable[[Any, ReplicaFetchRequest], None]
    on_fetched: Callable[[ReplicaFetchResponse, list[Batch]], None]
    on_push: Callable[[PartitionKey, Push, list[Batch]], None]
    on_beacon: Callable[[Beacon], None]


class Peers:
    def __init__(
        self, transport: Transport, cluster: ClusterFile, broker: int, config: Config, events: PeerEvents
    ) -> None:
        self.bad_frames = 0
        self._cluster_id = cluster.cluster_id
        self._broker = broker
        self._events = events
        self._correlation = 0
        self._acks: dict[int, dict[PartitionKey, AckRow]] = {}
        me = cluster.members[broker]
        frame_bytes_max = config.replication.fetch_bytes_max + config.log.batch_bytes_max + FRAME_OVERHEAD_BYTES
        self._router = transport.router(me.host, me.peer, self._on_request, frame_bytes_max=frame_bytes_max)
        self._publisher = transport.publisher(me.host, me.push)
        self._subscriber = transport.subscriber(self._on_publication)
        self._subscriber.subscribe(f.BEACON_ROUTE)
        self._links: dict[int, Socket] = {}
        for member in cluster.members:
            if member.id != broker:
                self._links[member.id] = self._connect(transport, member, frame_bytes_max)

    def _connect(self, transport: Transport, member: Member, frame_bytes_max: int) -> Socket:
        self._subscriber.connect(member.host, member.push)
        return transport.dealer(
            member.host,
            member.peer,
            lambda: self._on_response(member.id),
            on_link=lambda up: self._events.on_link(member.id, up),
            frame_bytes_max=frame_bytes_max,
        )

    # -- to others -----------------------------------------------------------------------------------------------

    def _send(self, broker: int, operation: Operation, message: Any) -> None:
        """What cannot be sent now is lost; whoever needs an answer asks again."""
        link = self._links.get(broker)
        if link is not None:
            self._correlation += 1
            link.send(f.request(operation, self._correlation, message))

    def send_heartbeat(self, broker: int, heartbeat: Heartbeat) -> None:
        self._send(broker, Operation.HEARTBEAT, heartbeat)

    def send_fetch(self, broker: int, fetch: ReplicaFetchRequest) -> None:
        self._send(broker, Operation.REPLICA_FETCH, fetch)

    def add_ack(self, leader: int, key: PartitionKey, leader_epoch: int, durable_end: int) -> None:
        """Leaves with `send_acks`; a newer one for the same partition replaces it."""
        self._acks.setdefault(leader, {})[key] = AckRow(key.topic_id, key.partition, leader_epoch, durable_end)

    def send_acks(self, broker_epoch: int) -> None:
        if not self._acks:
            return
        for leader, rows in self._acks.items():
            self._send(leader, Operation.ACKS, Acks(self._cluster_id, self._broker, broker_epoch, list(rows.values())))
        self._acks.clear()

    def answer(self, token: tuple[bytes, Head], response: ReplicaFetchResponse, data: bytes = b"") -> None:
        identity, head = token
        self._router.send([identity, *f.response(head, response, [data])])

    def publish(self, effect: Publish, broker_epoch: int) -> None:
        push = Push(
            self._cluster_id,
            self._broker,
            broker_epoch,
            effect.leader_epoch,
            effect.base_offset,
            effect.prev_epoch,
            effect.high_watermark,
            effect.log_end,
        )
        frames = [f.route(effect.key), f.pack(push)]
        for header, body in effect.batches:
            frames += (header.pack(), body)
        self._publisher.send(frames)

    def publish_beacon(self, rows: list[BeaconRow], broker_epoch: int) -> None:
        beacon = Beacon(self._cluster_id, self._broker, broker_epoch, rows)
        self._publisher.send([f.BEACON_ROUTE, f.pack(beacon)])

    def follow(self, key: PartitionKey, on: bool) -> None:
        (self._subscriber.subscribe if on else self._subscriber.unsubscribe)(f.route(key))

    # -- from others ---------------------------------------------------------------------------------------------

    def _drain(self, socket: Socket, handle: Callable[[Frames], None]) -> None:
        for _ in range(MESSAGES_PER_TURN):
            frames = socket.receive()
            if frames is None:
                return
            try:
                handle(frames)
            except ZmqueueError as error:
                self.bad_frames += 1
                _logger.warning("dropped a message of another broker: %s", error)

    def _on_request(self) -> None:
        self._drain(self._router, self._handle_request)

    def _handle_request(self, frames: Frames) -> None:
        identity, *message = frames
        head = f.parse_head(message)
        if head.operation < Operation.HEARTBEAT:
            self._router.send([identity, *f.failure(head, UnknownOperation.code, "this port is for brokers")])
            return
        request = f.parse_request(head, message)
        if head.operation == Operation.ACKS:
            self._events.on_acks(request)
        elif head.operation == Operation.REPLICA_FETCH:
            self._events.on_follower_fetch((identity, head), request)
        elif head.operation == Operation.HEARTBEAT:
            self._router.send([identity, *f.response(head, self._events.on_heartbeat(request))])

    def _on_response(self, broker: int) -> None:
        self._drain(self._links[broker], self._handle_response)

    def _handle_response(self, frames: Frames) -> None:
        head = f.parse_head(frames)
        response = f.parse_response(head, frames)
        if head.kind == Kind.FAILURE:
            _logger.warning("another broker refused a request: %s", response.message)
        elif head.operation == Operation.HEARTBEAT:
            self._events.on_heartbeat_reply(response)
        elif head.operation == Operation.REPLICA_FETCH:
            batches = list(split(frames[2])) if len(frames) > 2 else []
            self._events.on_fetched(response, batches)

    def _on_publication(self) -> None:
        self._drain(self._subscriber, self._handle_publication)

    def _handle_publication(self, frames: Frames) -> None:
        if len(frames) % 2:
            raise BadFrame(f"a publication has a route, a message and pairs of frames, not {len(frames)} frames")
        route, body, *raw = frames
        if route == f.BEACON_ROUTE:
            self._events.on_beacon(f.unpack(body, Beacon))
            return
        batches = []
        for header_bytes, batch_body in zip(raw[::2], raw[1::2], strict=True):
            header = parse_header(header_bytes)
            check_body(header, batch_body)
            batches.append(Batch(header, batch_body))
        self._events.on_push(f.parse_route(route), f.unpack(body, Push), batches)
