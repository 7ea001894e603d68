"""Every setting, its default and its limits. `conf/zmqueue.toml` shows them all with a comment each.

A value comes from the file, then the environment (`ZMQUEUE_LOG__FSYNC=interval`), then flags; the later wins. Units
stand last in a name. Nothing is guessed: an unknown key or a value out of range is a `ConfigError` naming its place.

Limits of one value are part of its type and hold wherever a section is made; what several values must keep between
them is checked by `load`, which knows where each came from. What a cluster can never change after its first start
(members, ports, storage) is written to `cluster.json` in the data folder; from then on that file wins over defaults.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta, Struct, field

from zmqueue.errors import ConfigError, FutureFormat
from zmqueue.model import KiB, MiB

Fsync = Literal["always", "interval", "os"]
Storage = Literal["disk", "memory"]

BROKERS_MAX = 9

Port = Annotated[int, Meta(ge=1, le=65_535)]
Millis = Annotated[int, Meta(ge=1, le=86_400_000)]
Bytes = Annotated[int, Meta(ge=1, le=1 << 40)]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]
Limit = Annotated[int, Meta(ge=-1, le=1 << 62)]  # -1: none
DAY_MS = 86_400_000
_ASSIGNOR_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")
_ASSIGNOR_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")

_S = TypeVar("_S", bound="Section")


class SettingError(ConfigError):
    """One setting is wrong; `key` is its full name (`log.fsync`)."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key
        self.problem = problem


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file. Making one with a value out of its limits is a SettingError."""

    def __post_init__(self) -> None:
        for known in msgspec.structs.fields(self):
            _checked(f"{_section_name(type(self))}.{known.name}", getattr(self, known.name), known.type)

    def _require(self, key: str, holds: bool, problem: str) -> None:
        if not holds:
            raise SettingError(f"{_section_name(type(self))}.{key}", f"{getattr(self, key)} {problem}")


class ClusterConfig(Section, frozen=True):
    brokers: Annotated[int, Meta(ge=1, le=BROKERS_MAX)] = 5
    host: str = "127.0.0.1"
    port_offset: Annotated[int, Meta(ge=0, le=60_000)] = 0
    data_dir: Annotated[str, Meta(min_length=1)] = "./data"
    storage: Storage = "disk"

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        try:
            loopback = ipaddress.IPv4Address(self.host).is_loopback
        except ValueError:
            raise SettingError("cluster.host", f"{self.host!r} is not an IPv4 address, such as 127.0.0.1") from None
        if not loopback:
            raise SettingError(
                "cluster.host",
                f"{self.host} can be reached from outside, and there is no security layer yet: use 127.0.0.1",
            )


class BrokerConfig(Section, frozen=True):
    base_port: Port = 9092
    push_base_port: Port = 9192
    raft_base_port: Port = 9292
    peer_base_port: Port = 9492
    request_bytes_max: Bytes = 8 * MiB
    fetch_bytes_max: Bytes = 8 * MiB
    fetch_wait_ms_max: Millis = 60_000
    requests_per_connection_max: Count = 64
    requests_waiting_max: Count = 10_000
    requests_parked_max: Count = 20_000
    bytes_in_flight_max: Bytes = 256 * MiB


class TopicsConfig(Section, frozen=True):
    default_partitions: Count = 10
    replication_factor: Annotated[int, Meta(ge=1, le=BROKERS_MAX)] = 2
    topics_max: Count = 1_000
    partitions_max: Count = 10_000


class LogConfig(Section, frozen=True):
    fsync: Fsync = "always"
    fsync_interval_ms: Millis = 50
    segment_bytes_max: Bytes = 64 * MiB
    batch_bytes_max: Bytes = 1 * MiB
    index_interval_bytes: Bytes = 64 * KiB
    segment_ms: Count = 7 * DAY_MS
    retention_ms: Limit = 7 * DAY_MS
    retention_bytes: Limit = -1
    delete_retention_ms: Annotated[int, Meta(ge=0, le=1 << 62)] = DAY_MS
    maintenance_ms: Millis = 300
    maintenance_partitions_max: Count = 200
    maintenance_files_max: Count = 4
    maintenance_bytes_per_s: Bytes = 32 * MiB
    compaction_map_bytes: Annotated[int, Meta(ge=64 * KiB, le=1 << 40)] = 64 * MiB

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        self._require(
            "batch_bytes_max",
            self.batch_bytes_max <= self.segment_bytes_max,
            f"must not exceed log.segment_bytes_max={self.segment_bytes_max}",
        )


class ReplicationConfig(Section, frozen=True):
    heartbeat_ms: Millis = 250
    session_ms: Millis = 1_500
    silence_ms: Millis = 300
    beacon_ms: Millis = 100
    lag_ms_max: Millis = 1_000
    write_lease_ms: Millis = 1_000
    read_lease_ms: Millis = 3_000
    fetch_timeout_ms: Millis = 500
    fetch_bytes_max: Bytes = 4 * MiB
    held_bytes_max: Bytes = 8 * MiB
    stall_ms: Millis = 200
    heal_after_ms: Millis = 10_000
    proposal_timeout_ms: Millis = 2_000

    def scaled(self, scale: float) -> ReplicationConfig:
        """Every time multiplied, so that their proportions, on which the protocol's safety margins rest, stay."""
        return _scaled(self, scale)


class RaftConfig(Section, frozen=True):
    tick_ms: Millis = 50
    append_ms: Millis = 100
    election_ms_min: Millis = 600
    election_ms_max: Millis = 1_200
    ping_ms: Millis = 500
    command_bytes_max: Bytes = 32 * KiB
    digest_ms: Millis = 60_000
    compaction_entries_min: Count = 5_000
    disk_reserve_bytes: Bytes = 16 * MiB

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        self._require(
            "election_ms_min",
            self.election_ms_min < self.election_ms_max,
            f"must be below raft.election_ms_max={self.election_ms_max}",
        )

    def scaled(self, scale: float) -> RaftConfig:
        """Every time multiplied, as for replication."""
        return _scaled(self, scale)


class GroupsConfig(Section, frozen=True):
    session_timeout_ms_min: Millis = 1_000
    session_timeout_ms_max: Millis = 1_800_000
    rebalance_timeout_ms_max: Millis = 3_600_000
    groups_max: Count = 1_000
    members_max: Count = 1_000
    partitions_max: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    metadata_bytes_max: Annotated[int, Meta(ge=0, le=4_096)] = 4_096
    commits_waiting_max: Count = 1_000
    write_bytes_max: Annotated[int, Meta(ge=16 * KiB, le=1 << 40)] = 768 * KiB
    write_retry_ms: Millis = 250
    offset_retention_ms: Limit = 7 * DAY_MS
    cleanup_ms: Millis = 60_000
    assignor: Annotated[str, Meta(min_length=1)] = "sticky"
    assignors: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        self._require(
            "session_timeout_ms_min",
            self.session_timeout_ms_min <= self.session_timeout_ms_max,
            f"must not exceed groups.session_timeout_ms_max={self.session_timeout_ms_max}",
        )
        for name, target in self.assignors.items():
            well_formed = _ASSIGNOR_NAME.fullmatch(name) and _ASSIGNOR_TARGET.fullmatch(target)
            self._require("assignors", bool(well_formed), 'must name each as {mine = "package.module:name"}')


class TimingConfig(Section, frozen=True):
    scale: Annotated[float, Meta(ge=0.1, le=100.0)] = 1.0


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    broker: BrokerConfig = field(default_factory=BrokerConfig)
    topics: TopicsConfig = field(default_factory=TopicsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    replication: ReplicationConfig = field(default_factory=ReplicationConfig)
    raft: RaftConfig = field(default_factory=RaftConfig)
    groups: GroupsConfig = field(default_factory=GroupsConfig)
    timing: TimingConfig = field(default_factory=TimingConfig)


class Ports(NamedTuple):
    """Where one broker listens: for clients, for followers of its push, for Raft, for requests of other brokers."""

    client: int
    push: int
    raft: int
    peer: int


def ports(config: Config, broker_id: int) -> Ports:
    broker, shift = config.broker, config.cluster.port_offset + broker_id
    return Ports(
        broker.base_port + shift,
        broker.push_base_port + shift,
        broker.raft_base_port + shift,
        broker.peer_base_port + shift,
    )


# -- where values come from --------------------------------------------------------------------------------------

DEFAULT = "default"
ENV_PREFIX = "ZMQUEUE_"


class Loaded(NamedTuple):
    """The settings, and for each (`log.fsync`) where it came from: `default`, a file, a variable or a flag."""

    config: Config
    origin: dict[str, str]


class _Given(NamedTuple):
    value: Any
    origin: str
    place: str  # how an error names it


def load(file: Path | None, env: Mapping[str, str], flags: Mapping[str, Any]) -> Loaded:
    """Defaults, then `file`, then `env`, then `flags` (by full name; None means not given)."""
    given: dict[str, _Given] = {}
    if file is not None:
        given.update(_from_file(file))
    given.update(_from_env(env))
    given.update(_from_flags(flags))

    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for key, item in given.items():
        section, name = key.split(".")
        try:
            sections[section][name] = _checked(key, item.value, KEYS[key])
        except SettingError as error:
            raise ConfigError(f"{item.place}: {error.problem}") from None
    try:
        made: dict[str, Any] = {name: SECTIONS[name](**values) for name, values in sections.items()}
        config = Config(**made)
        _check_together(config, given)
    except SettingError as error:
        if error.key in given:
            raise ConfigError(f"{given[error.key].place}: {error.problem}") from None
        # A default that no longer fits: the place to name is that of the setting it collides with.
        place = next((f"{item.place}: " for key, item in given.items() if key in error.problem), "")
        raise ConfigError(f"{place}{error.key}: {error.problem}") from None
    return Loaded(config, {key: given[key].origin if key in given else DEFAULT for key in KEYS})


def _from_file(file: Path) -> Iterator[tuple[str, _Given]]:
    try:
        tables = tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 at byte {error.start}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from None
    for section, values in tables.items():
        if section not in SECTIONS:
            raise ConfigError(f"{file}:{section}: unknown section{_nearest(section, SECTIONS)}")
        if not isinstance(values, dict):
            raise ConfigError(f"{file}:{section}: must be a table: [{section}]")
        for name, value in values.items():
            key = f"{section}.{name}"
            if key not in KEYS:
                raise ConfigError(f"{file}:{key}: unknown setting{_nearest(key, KEYS)}")
            yield key, _Given(value, str(file), f"{file}:{key}")


def _from_env(env: Mapping[str, str]) -> Iterator[tuple[str, _Given]]:
    if env.get("ZMQUEUE_DATA_DIR"):
        yield "cluster.data_dir", _Given(env["ZMQUEUE_DATA_DIR"], "ZMQUEUE_DATA_DIR", "ZMQUEUE_DATA_DIR")
    for variable in sorted(env):
        section, separator, name = variable.removeprefix(ENV_PREFIX).partition("__")
        if not variable.startswith(ENV_PREFIX) or not separator:
            continue
        key = f"{section}.{name}".lower()
        if key not in KEYS:
            raise ConfigError(f"{variable}: unknown setting{_nearest(variable, map(variable_for, KEYS))}")
        yield key, _Given(_parsed(env[variable], KEYS[key]), variable, variable)


def _from_flags(flags: Mapping[str, Any]) -> Iterator[tuple[str, _Given]]:
    for key, value in flags.items():
        assert key in KEYS, f"no setting {key}"
        if value is not None:
            flag = "--" + key.partition(".")[2].replace("_", "-")
            yield key, _Given(value, flag, flag)


def variable_for(key: str) -> str:
    """The environment variable that sets `key`."""
    return ENV_PREFIX + key.replace(".", "__").upper()


def _check_together(config: Config, given: Mapping[str, _Given]) -> None:
    """What values of several sections must keep between them; a SettingError names the one to change."""
    cluster, broker, log, replication, raft = (
        config.cluster,
        config.broker,
        config.log,
        config.replication,
        config.raft,
    )
    _check_ports(config, given)
    # The default factor is lowered on a small cluster; one that was asked for is not.
    factor = config.topics.replication_factor
    if "topics.replication_factor" in given and factor > cluster.brokers:
        raise SettingError("topics.replication_factor", f"{factor} is more than cluster.brokers={cluster.brokers}")
    for key, low, other, high in (
        ("log.batch_bytes_max", log.batch_bytes_max, "broker.request_bytes_max", broker.request_bytes_max),
        ("log.batch_bytes_max", log.batch_bytes_max, "broker.fetch_bytes_max", broker.fetch_bytes_max),
        ("log.batch_bytes_max", log.batch_bytes_max, "replication.fetch_bytes_max", replication.fetch_bytes_max),
        (
            "broker.request_bytes_max",
            broker.request_bytes_max,
            "broker.bytes_in_flight_max",
            broker.bytes_in_flight_max,
        ),
    ):
        if low > high:
            raise SettingError(key, f"{low} must not exceed {other}={high}")
    for key, low, other, high in (
        ("replication.heartbeat_ms", replication.heartbeat_ms, "replication.session_ms", replication.session_ms),
        ("replication.beacon_ms", replication.beacon_ms, "replication.silence_ms", replication.silence_ms),
        # A leader that is cut off must stop acknowledging before the others may replace it.
        ("replication.write_lease_ms", replication.write_lease_ms, "replication.session_ms", replication.session_ms),
        ("raft.append_ms", raft.append_ms, "raft.election_ms_min", raft.election_ms_min),
        # What is written about groups goes into one batch, whose header and columns take room too.
        ("groups.write_bytes_max", config.groups.write_bytes_max, "log.batch_bytes_max", log.batch_bytes_max),
    ):
        if low >= high:
            raise SettingError(key, f"{low} must be below {other}={high}")


def _check_ports(config: Config, given: Mapping[str, _Given]) -> None:
    kinds = ("broker.base_port", "broker.push_base_port", "broker.raft_base_port", "broker.peer_base_port")
    taken: dict[int, tuple[str, int]] = {}
    for broker_id in range(config.cluster.brokers):
        for kind, port in zip(kinds, ports(config, broker_id), strict=True):
            if port > 65_535:
                blame = "cluster.port_offset" if "cluster.port_offset" in given else kind
                raise SettingError(blame, f"port {port} of broker {broker_id} is above 65535")
            if port in taken:
                other, other_id = taken[port]
                # Blame the one that was changed: the default is rarely the mistake.
                blame, fine = (kind, other) if kind in given else (other, kind)
                raise SettingError(blame, f"port {port} is also {fine} (brokers {other_id} and {broker_id})")
            taken[port] = (kind, broker_id)


def _checked(key: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise SettingError(key, f"{value!r:.80} is not {_describe(kind)}") from None


def _parsed(text: str, kind: Any) -> Any:
    """An environment variable as the type of its setting; what does not parse is left for the check to refuse.

    A table is written as in `mine=package.module:name, other=…`.
    """
    plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(plain) is dict:
        pairs = (part.split("=", 1) for part in text.split(",") if part.strip())
        found = [[side.strip() for side in pair] for pair in pairs]
        return dict(found) if all(len(pair) == 2 for pair in found) else text
    if plain in (int, float):
        try:
            return plain(text)
        except ValueError:
            return text
    return text


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is dict:
        return "a table of texts"
    plain, limits = (get_args(kind)[0], get_args(kind)[1]) if get_origin(kind) is Annotated else (kind, None)
    name = {int: "a whole number", float: "a number", str: "a text"}[plain]
    if limits is None:
        return name
    if limits.min_length is not None:
        return f"{name} of at least {limits.min_length} character"
    return f"{name} in {limits.ge}..{limits.le}"


def _nearest(name: str, known: Any) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return f", the nearest is {matches[0]}" if matches else ""


def _scaled(section: _S, scale: float) -> _S:
    times = {
        known.name: max(1, round(getattr(section, known.name) * scale))
        for known in msgspec.structs.fields(section)
        if known.name.endswith("_ms") or "_ms_" in known.name
    }
    return msgspec.structs.replace(section, **times)


def _section_name(section: type[Section]) -> str:
    return section.__name__.removesuffix("Config").lower()


SECTIONS: dict[str, type[Section]] = {known.name: known.type for known in msgspec.structs.fields(Config)}
KEYS: dict[str, Any] = {
    f"{name}.{known.name}": known.type
    for name, section in SECTIONS.items()
    for known in msgspec.structs.fields(section)
}


# -- what a cluster keeps for life -------------------------------------------------------------------------------

CLUSTER_FILE = "cluster.json"
SECRET_FILE = "secret"  # noqa: S105 - a file name
CLUSTER_FORMAT = 1


class Member(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One broker of the cluster, and where it listens. Clients are told `advertised` if something forwards from it."""

    id: int
    host: str
    client: Port
    push: Port
    raft: Port
    peer: Port
    advertised: Port | None = None


class ClusterFile(Struct, frozen=True, forbid_unknown_fields=True):
    """`cluster.json`: written once, by the first `up`, and the same for every broker ever after."""

    format: int
    cluster_id: str
    storage: Storage
    port_offset: int
    members: list[Member]


def new_cluster_file(config: Config, cluster_id: str) -> ClusterFile:
    members = [Member(i, config.cluster.host, *ports(config, i)) for i in range(config.cluster.brokers)]
    return ClusterFile(CLUSTER_FORMAT, cluster_id, config.cluster.storage, config.cluster.port_offset, members)


def read_cluster_file(data_dir: Path, name: str = CLUSTER_FILE) -> ClusterFile | None:
    """The cluster that `data_dir` holds, or None if it holds none."""
    path = data_dir / name
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        content = msgspec.json.decode(raw)
        if isinstance(content, dict) and isinstance(content.get("format"), int) and content["format"] > CLUSTER_FORMAT:
            raise FutureFormat(f"{path}: format {content['format']} was written by a newer version of zmqueue")
        cluster = msgspec.convert(content, ClusterFile)
    except msgspec.DecodeError as error:  # of which ValidationError is one
        raise ConfigError(f"{path}: damaged: {error}") from None
    if not cluster.members or [member.id for member in cluster.members] != list(range(len(cluster.members))):
        raise ConfigError(f"{path}: damaged: members are not numbered from 0 up")
    return cluster


def read_secret(data_dir: Path) -> bytes:
    """The 32 bytes that the brokers of a cluster share. Readable by others means no secret: refused."""
    path = data_dir / SECRET_FILE
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(33)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(f"{path}: readable by others (mode {mode & 0o777:04o}): chmod 600 it")
    if len(secret) != 32:
        raise ConfigError(f"{path}: damaged: {len(secret)} bytes instead of 32")
    return secret


def with_cluster(loaded: Loaded, cluster: ClusterFile, data_dir: Path) -> Loaded:
    """The settings with what the cluster keeps for life. A setting that was given and differs is an error."""
    first = cluster.members[0]
    shift = cluster.port_offset
    kept: dict[str, Any] = {
        "cluster.brokers": len(cluster.members),
        "cluster.host": first.host,
        "cluster.port_offset": shift,
        "cluster.storage": cluster.storage,
        "broker.base_port": first.client - shift,
        "broker.push_base_port": first.push - shift,
        "broker.raft_base_port": first.raft - shift,
        "broker.peer_base_port": first.peer - shift,
    }
    path = data_dir / CLUSTER_FILE
    sections = {name: getattr(loaded.config, name) for name in ("cluster", "broker")}
    origin = dict(loaded.origin)
    for key, value in kept.items():
        section, name = key.split(".")
        asked = getattr(sections[section], name)
        if asked == value:
            continue
        if origin[key] != DEFAULT:
            raise ConfigError(f"{origin[key]}: {key} is {asked}, but the cluster in {data_dir} was made with {value}")
        sections[section] = msgspec.structs.replace(sections[section], **{name: value})
        origin[key] = str(path)
    sections["cluster"] = msgspec.structs.replace(sections["cluster"], data_dir=str(data_dir))
    return Loaded(msgspec.structs.replace(loaded.config, **sections), origin)
