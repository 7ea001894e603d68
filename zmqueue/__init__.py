"""zmqueue: a message queue in Python, over ZeroMQ, with its metadata in Raft.

    from zmqueue import Admin, Consumer, Producer

A tour, from the bottom up; each layer knows only those before it.

- `errors`, `model`, `config`: names that everybody shares.
- `wire`: bytes that leave a process. The record batch (a fixed header and columns of CBOR) is the unit everywhere: in
  the producer's buffer, on the wire, on disk, in replication and in a consumer's hands.
- `core`: every decision, as pure state machines: who leads, what is in sync, what may be acknowledged.
- `log`: files. Segments of batches that prove themselves when they are opened and when they are read.
- `transport`: sockets, the only importer of zmq.
- `broker`: the process that ties these together, and keeps the cluster's metadata in Raft.
- `client`: producer, consumer and administrator. One IO thread per object; see `zmqueue.client`.
- `supervisor`, `cli`: starting five brokers with one command, and talking to them.

Importing this package is cheap: what it offers is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from zmqueue.client.admin import Admin
    from zmqueue.client.aio_consumer import AsyncConsumer
    from zmqueue.client.aio_producer import AsyncProducer
    from zmqueue.client.avro import AvroDeserializer, AvroSerializer
    from zmqueue.client.broker_client import BrokerClient
    from zmqueue.client.consumer import Consumer
    from zmqueue.client.group import ConsumerRebalanceListener
    from zmqueue.client.producer import Producer
    from zmqueue.client.serializers import Deserializer, Serializer
    from zmqueue.model import (
        ConsumerRecord,
        OffsetAndMetadata,
        OffsetAndTimestamp,
        ProducerRecord,
        RecordMetadata,
        TopicPartition,
    )

_HOMES = {
    "Admin": "zmqueue.client.admin",
    "AsyncConsumer": "zmqueue.client.aio_consumer",
    "AsyncProducer": "zmqueue.client.aio_producer",
    "AvroDeserializer": "zmqueue.client.avro",
    "AvroSerializer": "zmqueue.client.avro",
    "BrokerClient": "zmqueue.client.broker_client",
    "Consumer": "zmqueue.client.consumer",
    "ConsumerRebalanceListener": "zmqueue.client.group",
    "ConsumerRecord": "zmqueue.model",
    "Deserializer": "zmqueue.client.serializers",
    "OffsetAndMetadata": "zmqueue.model",
    "OffsetAndTimestamp": "zmqueue.model",
    "Producer": "zmqueue.client.producer",
    "ProducerRecord": "zmqueue.model",
    "RecordMetadata": "zmqueue.model",
    "Serializer": "zmqueue.client.serializers",
    "TopicPartition": "zmqueue.model",
}

__all__ = [
    "Admin",
    "AsyncConsumer",
    "AsyncProducer",
    "AvroDeserializer",
    "AvroSerializer",
    "BrokerClient",
    "Consumer",
    "ConsumerRebalanceListener",
    "ConsumerRecord",
    "Deserializer",
    "OffsetAndMetadata",
    "OffsetAndTimestamp",
    "Producer",
    "ProducerRecord",
    "RecordMetadata",
    "Serializer",
    "TopicPartition",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'zmqueue' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
