"""Every setting, its default and its limits. `conf/zmqueue.toml` shows them all with a comment each.

A value comes from the file, then the environment (`ZMQUEUE_LOG__FSYNC=interval`), then flags; the later wins. Units
stand last in a name. Nothing is guessed: an unknown key or a value out of range is a `ConfigError` that names its place.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from zmqueue.errors import ConfigError
from zmqueue.model import KiB, MiB

Fsync = Literal["always", "interval", "os"]
Storage = Literal["disk", "memory"]


class ClusterConfig(Struct, frozen=True, forbid_unknown_fields=True):
    brokers: int = 5
    host: str = "127.0.0.1"
    port_offset: int = 0
    data_dir: str = "./data"
    storage: Storage = "disk"


class BrokerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    base_port: int = 9092
    push_base_port: int = 9192
    raft_base_port: int = 9292
    peer_base_port: int = 9492
    request_bytes_max: int = 8 * MiB
    fetch_bytes_max: int = 8 * MiB
    fetch_wait_ms_max: int = 60_000
    requests_per_connection_max: int = 64
    requests_waiting_max: int = 10_000
    bytes_in_flight_max: int = 256 * MiB


class TopicsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    default_partitions: int = 10
    replication_factor: int = 2
    topics_max: int = 1_000
    partitions_max: int = 10_000


class LogConfig(Struct, frozen=True, forbid_unknown_fields=True):
    fsync: Fsync = "always"
    fsync_interval_ms: int = 50
    segment_bytes_max: int = 64 * MiB
    batch_bytes_max: int = 1 * MiB
    index_interval_bytes: int = 64 * KiB

    def __post_init__(self) -> None:
        if not 0 < self.batch_bytes_max <= self.segment_bytes_max:
            raise ConfigError(f"log.batch_bytes_max={self.batch_bytes_max} must be in 1..{self.segment_bytes_max}")


class ReplicationConfig(Struct, frozen=True, forbid_unknown_fields=True):
    heartbeat_ms: int = 250
    session_ms: int = 1_500
    silence_ms: int = 300
    beacon_ms: int = 100
    lag_ms_max: int = 1_000
    write_lease_ms: int = 1_000
    read_lease_ms: int = 3_000
    fetch_timeout_ms: int = 500
    fetch_bytes_max: int = 4 * MiB
    held_bytes_max: int = 8 * MiB
    stall_ms: int = 200
    heal_after_ms: int = 10_000
    proposal_timeout_ms: int = 2_000


class RaftConfig(Struct, frozen=True, forbid_unknown_fields=True):
    tick_ms: int = 20
    append_ms: int = 100
    election_ms_min: int = 600
    election_ms_max: int = 1_200
    ping_ms: int = 500
    command_bytes_max: int = 32 * KiB
    digest_ms: int = 60_000
    compaction_entries_min: int = 5_000
    disk_reserve_bytes: int = 16 * MiB


class TimingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    scale: float = 1.0


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    broker: BrokerConfig = field(default_factory=BrokerConfig)
    topics: TopicsConfig = field(default_factory=TopicsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    replication: ReplicationConfig = field(default_factory=ReplicationConfig)
    raft: RaftConfig = field(default_factory=RaftConfig)
    timing: TimingConfig = field(default_factory=TimingConfig)
