"""Every error that zmqueue raises or sends, with its number.

`code` is wire format: Kafka's number where Kafka has the error, otherwise one of ours from 1001 up. A number is never
reused or changed. `retriable` says that the same call may succeed later; `refresh_metadata` says that the caller's idea
of who leads what is stale and should be refreshed first; `indeterminate` says that the call may have taken effect.
"""

from __future__ import annotations

from typing import Any, ClassVar


class ZmqueueError(Exception):
    """Base of everything zmqueue raises on purpose."""

    code: ClassVar[int] = -1
    retriable: ClassVar[bool] = False
    refresh_metadata: ClassVar[bool] = False
    indeterminate: ClassVar[bool] = False

    def __init__(self, message: str = "") -> None:
        super().__init__(message or (type(self).__doc__ or type(self).__name__).strip().splitlines()[0])

    @property
    def name(self) -> str:
        """The error's name as tools print it: `NotLeader` becomes `NOT_LEADER`."""
        return error_name(type(self))


# -- Kafka's numbers ---------------------------------------------------------------------------------------------


class UnknownServerError(ZmqueueError):
    """The broker failed in a way it did not foresee; its log has the details."""

    code = -1


class OffsetOutOfRange(ZmqueueError):
    """The offset is below the log start or above the log end."""

    code = 1


class CorruptBatch(ZmqueueError):
    """A record batch does not match its checksum, its header or its limits."""

    code = 2


class UnknownTopicOrPartition(ZmqueueError):
    """No such topic or partition."""

    code, retriable, refresh_metadata = 3, True, True


class LeaderNotAvailable(ZmqueueError):
    """The partition has no leader at the moment."""

    code, retriable, refresh_metadata = 5, True, True


class NotLeader(ZmqueueError):
    """Another broker leads this partition: refresh metadata, then retry."""

    code, retriable, refresh_metadata, indeterminate = 6, True, True, True


class RequestTimedOut(ZmqueueError):
    """The request did not finish in its time; it may still take effect."""

    code, retriable, refresh_metadata, indeterminate = 7, True, True, True


class MessageTooLarge(ZmqueueError):
    """The record or batch exceeds the size limit."""

    code = 10


class OffsetMetadataTooLarge(ZmqueueError):
    """The text that goes with a committed offset is too long."""

    code = 12


class NetworkError(ZmqueueError):
    """The connection to the broker was lost; the request may have taken effect."""

    code, retriable, refresh_metadata, indeterminate = 13, True, True, True


class CoordinatorLoading(ZmqueueError):
    """The group's coordinator has just taken over and reads what it has to know; soon it will answer."""

    code, retriable = 14, True


class CoordinatorNotAvailable(ZmqueueError):
    """The group has no coordinator at the moment, or it could not write down what was asked."""

    code, retriable, refresh_metadata, indeterminate = 15, True, True, True


class NotCoordinator(ZmqueueError):
    """Another broker coordinates this group."""

    code, retriable, refresh_metadata = 16, True, True


class InvalidTopic(ZmqueueError):
    """The topic name is not allowed."""

    code = 17


class NotEnoughReplicas(ZmqueueError):
    """Fewer in-sync replicas than min.insync.replicas; nothing was appended."""

    code, retriable = 19, True


class NotEnoughReplicasAfterAppend(ZmqueueError):
    """Appended, but the in-sync replicas fell below min.insync.replicas before it was committed."""

    code, retriable, indeterminate = 20, True, True


class InvalidRequiredAcks(ZmqueueError):
    """acks must be 0, 1 or all."""

    code = 21


class IllegalGeneration(ZmqueueError):
    """The member does not own this partition: it was given to another since, or never to this one."""

    code = 22


class InvalidGroup(ZmqueueError):
    """The name of the group is empty or too long."""

    code = 24


class UnknownMember(ZmqueueError):
    """The group has no such member: it was silent for longer than its session, or was removed."""

    code = 25


class InvalidSessionTimeout(ZmqueueError):
    """The session timeout is not within the limits that the brokers are configured with."""

    code = 26


class UnsupportedVersion(ZmqueueError):
    """The peer speaks a protocol version that this side does not know."""

    code = 35


class TopicExists(ZmqueueError):
    """A topic of this name exists already."""

    code = 36


class InvalidPartitions(ZmqueueError):
    """The number of partitions is not allowed."""

    code = 37


class InvalidReplicationFactor(ZmqueueError):
    """The replication factor is not allowed or larger than the number of live brokers."""

    code = 38


class InvalidConfig(ZmqueueError):
    """A topic setting is unknown or has a value out of range."""

    code = 40


class NotController(ZmqueueError):
    """This broker does not lead the Raft group."""

    code, retriable = 41, True


class InvalidRequest(ZmqueueError):
    """The request is malformed."""

    code = 42


class OutOfOrderSequence(ZmqueueError):
    """A batch of this producer is missing before this one."""

    code = 45


class DuplicateSequence(ZmqueueError):
    """The batch was appended before, too long ago for its offset to be remembered."""

    code = 46


class ProducerFenced(ZmqueueError):
    """A newer producer took over this producer id."""

    code = 47


class StorageFailed(ZmqueueError):
    """The disk of this broker failed."""

    code, retriable, refresh_metadata = 56, True, True


class UnknownProducer(ZmqueueError):
    """The broker has no state for this producer id and the batch is not its first."""

    code = 59


class NonEmptyGroup(ZmqueueError):
    """The group has members; this can be done to an empty group only."""

    code = 68


class GroupNotFound(ZmqueueError):
    """No such group."""

    code = 69


class FencedEpoch(ZmqueueError):
    """The sender's epoch is older than the receiver's."""

    code, retriable, refresh_metadata = 74, True, True


class UnknownEpoch(ZmqueueError):
    """The sender's epoch is newer than the receiver's: the receiver has yet to catch up."""

    code, retriable = 75, True


class GroupFull(ZmqueueError):
    """The group has as many members as the brokers allow."""

    code = 81


class FencedInstance(ZmqueueError):
    """Another member has joined under this static member's instance id."""

    code = 82


class InvalidRecord(ZmqueueError):
    """A record breaks a rule of the topic or of the wire format."""

    code = 87


class UnknownTopicId(ZmqueueError):
    """No topic has this id: it was deleted, or deleted and created again."""

    code, retriable, refresh_metadata = 100, True, True


class WrongCluster(ZmqueueError):
    """The peer belongs to another cluster."""

    code = 104


class UnsupportedAssignor(ZmqueueError):
    """The brokers have no assignor of this name."""

    code = 112


# -- ours --------------------------------------------------------------------------------------------------------


class UnknownOperation(ZmqueueError):
    """The request names an operation that does not exist."""

    code = 1001


class BadFrame(ZmqueueError):
    """Bytes from a peer do not form a message."""

    code = 1002


class StorageFull(ZmqueueError):
    """The disk of the leader is full; nothing was appended."""

    code, retriable = 1003, True


class BrokerFenced(ZmqueueError):
    """This broker is starting or cut off, and serves nothing at the moment."""

    code, retriable, refresh_metadata = 1004, True, True


class Busy(ZmqueueError):
    """A queue of the broker is full: slow down and retry."""

    code, retriable = 1005, True


class StaleCommand(ZmqueueError):
    """A metadata command arrived late: its sender, epoch or partition has moved on."""

    code = 1006


class MetadataUnavailable(ZmqueueError):
    """The Raft group has no leader, so nothing about the cluster can be changed at the moment."""

    code, retriable, indeterminate = 1007, True, True


class LeaseExpired(ZmqueueError):
    """The leader has lost touch with the cluster and may have been replaced."""

    code, retriable, refresh_metadata, indeterminate = 1008, True, True, True


class FutureFormat(ZmqueueError):
    """The file was written by a newer version of zmqueue; it is left untouched."""

    code = 1009


class CorruptLog(ZmqueueError):
    """A file of the log is damaged in more than its tail."""

    code = 1010


class CorruptIndex(ZmqueueError):
    """An index does not prove. It is a cache: the log is read without it, and it is made anew."""

    code = 1014


class DataFolderInUse(ZmqueueError):
    """Another process holds the lock of this data folder."""

    code = 1011


class ReservedName(ZmqueueError):
    """Names that begin with two underscores belong to zmqueue."""

    code = 1012


class PortInUse(ZmqueueError):
    """Another process listens on this port."""

    code = 1013


class QuotaExceeded(ZmqueueError):
    """The partition has as many bytes as its topic's quota.bytes allows; nothing was appended."""

    code = 1020


class NoSuchIndex(ZmqueueError):
    """The topic has no secondary index: set index.secondary first."""

    code = 1030


class LogTruncated(ZmqueueError):
    """Records that this consumer has read were lost since, and their offsets are used again."""

    code = 1031

    def __init__(
        self, message: str = "", *, partition: tuple[str, int] | None = None, position: int = -1, truncated_to: int = -1
    ) -> None:
        super().__init__(message)
        self.partition, self.position, self.truncated_to = partition, position, truncated_to


# -- on the client's side only -----------------------------------------------------------------------------------


class JobFailed(ZmqueueError):
    """Work on full segments came to nothing: the process that does it ended, or made a mistake. It is tried again."""

    code, retriable = 1025, True


class ConfigError(ZmqueueError):
    """The configuration is not valid."""

    code = 1101


class NoBrokersAvailable(ZmqueueError):
    """None of the bootstrap servers answers."""

    code, retriable = 1102, True


class DeliveryTimeout(ZmqueueError):
    """The record was not acknowledged within delivery_timeout_ms; it may still have been written."""

    code, indeterminate = 1103, True


class BufferFull(ZmqueueError):
    """The producer's buffer stayed full for max_block_ms."""

    code, retriable = 1104, True


class ClientClosed(ZmqueueError):
    """The client was closed."""

    code = 1105


class IllegalState(ZmqueueError):
    """The call does not fit the state that the client is in."""

    code = 1106


class ForkedClient(ZmqueueError):
    """The client was created in a parent process; make a new one after fork."""

    code = 1107


class CommitFailed(ZmqueueError):
    """The offsets were not committed: the group has given these partitions to another member."""

    code = 1108


class WakeupError(ZmqueueError):
    """A call that waited was ended by `wakeup`."""

    code, retriable = 1109, True


class SerializationError(ZmqueueError):
    """A key or a value could not be made into bytes."""

    code = 1120


class DeserializationError(ZmqueueError):
    """A key or a value could not be made from its bytes.

    `record` holds the record with its bytes as they are. The consumer stays before it until the application seeks:
    `consumer.seek(TopicPartition(error.topic, error.partition), error.offset + 1)`.
    """

    code = 1121
    record: Any = None
    topic: str = ""
    partition: int = -1
    offset: int = -1


class UnknownSchema(ZmqueueError):
    """The schema that a record was written with is not known, and not among those that were stored."""

    code = 1122


def error_name(cls: type[ZmqueueError]) -> str:
    """`NotLeader` -> `NOT_LEADER`."""
    return "".join("_" + c if c.isupper() and i else c for i, c in enumerate(cls.__name__)).upper()


def _all(cls: type[ZmqueueError]) -> list[type[ZmqueueError]]:
    return [sub for direct in cls.__subclasses__() for sub in (direct, *_all(direct))]


BY_CODE: dict[int, type[ZmqueueError]] = {cls.code: cls for cls in _all(ZmqueueError)}


def from_code(code: int, message: str = "") -> ZmqueueError:
    """The exception for a code that arrived over the wire; unknown codes keep their number in the text."""
    cls = BY_CODE.get(code)
    if cls is None:
        return UnknownServerError(message or f"unknown error code {code}")
    return cls(message)
