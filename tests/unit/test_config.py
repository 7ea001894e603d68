"""Where settings come from, what is refused, and that errors name the place to mend."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from zmqueue import config
from zmqueue.errors import ConfigError, FutureFormat

SHIPPED = Path(__file__).parents[2] / "conf" / "zmqueue.toml"


def load(text: str | None = None, env: dict[str, str] | None = None, *, tmp: Path, **flags: Any) -> config.Loaded:
    file = None
    if text is not None:
        file = tmp / "z.toml"
        file.write_text(text)
    return config.load(file, env or {}, {key.replace("__", "."): value for key, value in flags.items()})


# -- the shipped file --------------------------------------------------------------------------------------------


def test_the_shipped_file_holds_exactly_the_defaults():
    assert config.load(SHIPPED, {}, {}).config == config.Config()


def test_the_shipped_file_names_every_setting():
    tables = tomllib.loads(SHIPPED.read_text())
    assert {f"{section}.{key}" for section, values in tables.items() for key in values} == set(config.KEYS)


# -- precedence and origin ---------------------------------------------------------------------------------------


def test_flags_win_over_environment_over_file_over_defaults(tmp_path):
    text = "[raft]\ntick_ms = 21\nappend_ms = 101\nping_ms = 501\n"
    env = {"ZMQUEUE_RAFT__APPEND_MS": "102", "ZMQUEUE_RAFT__PING_MS": "502"}
    config_, origin = load(text, env, tmp=tmp_path, raft__ping_ms=503)
    assert (config_.raft.tick_ms, config_.raft.append_ms, config_.raft.ping_ms) == (21, 102, 503)
    assert origin["raft.tick_ms"] == str(tmp_path / "z.toml")
    assert origin["raft.append_ms"] == "ZMQUEUE_RAFT__APPEND_MS"
    assert origin["raft.ping_ms"] == "--ping-ms"
    assert origin["raft.digest_ms"] == "default"


def test_a_flag_that_was_not_given_changes_nothing(tmp_path):
    assert load(tmp=tmp_path, cluster__brokers=None) == load(tmp=tmp_path)


def test_every_setting_has_an_origin(tmp_path):
    assert set(load(tmp=tmp_path).origin) == set(config.KEYS)


def test_environment_values_take_the_type_of_their_setting(tmp_path):
    env = {"ZMQUEUE_TIMING__SCALE": "2.5", "ZMQUEUE_LOG__FSYNC": "os", "ZMQUEUE_CLUSTER__BROKERS": "3"}
    loaded = load(env=env, tmp=tmp_path).config
    assert (loaded.timing.scale, loaded.log.fsync, loaded.cluster.brokers) == (2.5, "os", 3)


def test_an_environment_variable_holds_a_table_as_pairs(tmp_path):
    env = {"ZMQUEUE_GROUPS__ASSIGNORS": "mine=package.module:name, other = my:Other"}
    assert load(env=env, tmp=tmp_path).config.groups.assignors == {"mine": "package.module:name", "other": "my:Other"}
    with pytest.raises(ConfigError, match=r"^ZMQUEUE_GROUPS__ASSIGNORS: 'mine' is not a table of texts"):
        load(env={"ZMQUEUE_GROUPS__ASSIGNORS": "mine"}, tmp=tmp_path)


def test_variables_of_another_form_are_not_settings(tmp_path):
    env = {"ZMQUEUE_BOOTSTRAP": "127.0.0.1:1", "ZMQUEUE_PYTHON": "x", "XZMQUEUE_LOG__FSYNK": "1", "PATH": "/"}
    assert load(env=env, tmp=tmp_path).config == config.Config()


def test_the_data_dir_variable_sets_the_data_dir(tmp_path):
    config_, origin = load(env={"ZMQUEUE_DATA_DIR": "/srv/z"}, tmp=tmp_path)
    assert (config_.cluster.data_dir, origin["cluster.data_dir"]) == ("/srv/z", "ZMQUEUE_DATA_DIR")


# -- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[log]\nfsynk = 'os'", "log.fsynk: unknown setting, the nearest is log.fsync"),
        ("[lgo]\nfsync = 'os'", "lgo: unknown section, the nearest is log"),
        ("brokers = 3", "brokers: unknown section, the nearest is broker"),
        ("[[log]]\nfsync = 'os'", "log: must be a table: [log]"),
        ("[log]\nfsync = 'sometimes'", "log.fsync: 'sometimes' is not one of always, interval, os"),
        ("[cluster]\nbrokers = '5'", "cluster.brokers: '5' is not a whole number in 1..9"),
        ("[cluster]\nbrokers = true", "cluster.brokers: True is not a whole number in 1..9"),
        ("[cluster]\nbrokers = 5.0", "cluster.brokers: 5.0 is not a whole number in 1..9"),
        ("[cluster]\nbrokers = 0", "cluster.brokers: 0 is not a whole number in 1..9"),
        ("[cluster]\nbrokers = 10", "cluster.brokers: 10 is not a whole number in 1..9"),
        ("[cluster]\nbrokers = []", "cluster.brokers: [] is not a whole number in 1..9"),
        ("[cluster]\ndata_dir = ''", "cluster.data_dir: '' is not a text of at least 1 character"),
        ("[timing]\nscale = nan", "timing.scale: nan is not a number in 0.1..100.0"),
        ("[timing]\nscale = inf", "timing.scale: inf is not a number in 0.1..100.0"),
        ("[broker]\nbase_port = 70000", "broker.base_port: 70000 is not a whole number in 1..65535"),
        ("[cluster]\nport_offset = 57000", "cluster.port_offset: port 66092 of broker 0 is above 65535"),
        ("[raft]\nelection_ms_min = 1200", "raft.election_ms_min: 1200 must be below raft.election_ms_max=1200"),
        ("[raft]\nappend_ms = 600", "raft.append_ms: 600 must be below raft.election_ms_min=600"),
        ("[replication]\nsession_ms = 900", "replication.session_ms: replication.write_lease_ms: 1000 must be below"),
        ("[topics]\nreplication_factor = 6", "topics.replication_factor: 6 is more than cluster.brokers=5"),
        ("[log]\nsegment_bytes_max = 1000", "log.segment_bytes_max: log.batch_bytes_max: 1048576 must not exceed"),
        ("[log]\nbatch_bytes_max = 9000000", "log.batch_bytes_max: 9000000 must not exceed broker.request_bytes_max"),
        ("[log]\nbatch_bytes_max = 700000", "log.batch_bytes_max: groups.write_bytes_max: 786432 must be below"),
        ("[groups]\nassignors = 'mine'", "groups.assignors: 'mine' is not a table of texts"),
        (
            "[groups.assignors]\nmine = 'package.module'",
            "groups.assignors: {'mine': 'package.module'} must name each as",
        ),
        ("[groups]\nsession_timeout_ms_min = 2000000", "groups.session_timeout_ms_min: 2000000 must not exceed"),
        ("[cluster]\nhost = 'localhost'", "cluster.host: 'localhost' is not an IPv4 address, such as 127.0.0.1"),
        ("[cluster]\nhost = '0.0.0.0'", "cluster.host: 0.0.0.0 can be reached from outside"),
    ],
)
def test_a_wrong_setting_is_refused_by_file_and_key(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        load(text, tmp=tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'z.toml'}:{message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("push", [9092, 9096, 9292])
def test_two_uses_of_one_port_are_refused_by_the_setting_that_was_changed(tmp_path, push):
    with pytest.raises(ConfigError, match=r"z\.toml:broker\.push_base_port: port \d+ is also broker\.\w+ \(brokers "):
        load(f"[broker]\npush_base_port = {push}", tmp=tmp_path)


def test_a_port_range_just_beside_another_is_fine(tmp_path):
    assert config.ports(load("[broker]\npush_base_port = 9097", tmp=tmp_path).config, 0).push == 9097


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[log", "not valid TOML"),
        (b"[log]\nfsync = 'os'\nfsync = 'os'\n", "not valid TOML"),
        (b"\xff\xfe[log]", "not UTF-8 at byte 0"),
        (b"\x00", "not valid TOML"),
        (b"x = " + b"[" * 100_000, "not valid TOML"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, content, message):
    file = tmp_path / "z.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        config.load(file, {}, {})
    assert str(caught.value).startswith(f"{file}: {message}")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.toml: cannot be read: No such file"):
        config.load(tmp_path / "nothing.toml", {}, {})


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ZMQUEUE_LOG__FSYNK", "os", "unknown setting, the nearest is ZMQUEUE_LOG__FSYNC"),
        ("ZMQUEUE_RAFT__TICK_MS", "soon", "'soon' is not a whole number in 1..86400000"),
        ("ZMQUEUE_RAFT__TICK_MS", "", "'' is not a whole number in 1..86400000"),
    ],
)
def test_a_wrong_variable_is_refused_by_its_name(tmp_path, variable, value, message):
    with pytest.raises(ConfigError) as caught:
        load(env={variable: value}, tmp=tmp_path)
    assert str(caught.value) == f"{variable}: {message}"


def test_a_section_made_in_code_keeps_its_limits():
    with pytest.raises(ConfigError, match=r"log\.batch_bytes_max: 2048 must not exceed"):
        config.LogConfig(segment_bytes_max=1024, batch_bytes_max=2048)
    with pytest.raises(ConfigError, match=r"raft\.tick_ms: 0 is not a whole number"):
        config.RaftConfig(tick_ms=0)


# -- derived values ----------------------------------------------------------------------------------------------


def test_ports_are_base_plus_id_plus_offset(tmp_path):
    loaded = load(tmp=tmp_path, cluster__port_offset=1000).config
    assert config.ports(loaded, 3) == config.Ports(client=10095, push=10195, raft=10295, peer=10495)


def test_scaling_multiplies_times_and_nothing_else():
    plain = config.ReplicationConfig()
    slow = plain.scaled(2.5)
    changed = {name for name in plain.__struct_fields__ if getattr(plain, name) != getattr(slow, name)}
    assert changed == {name for name in plain.__struct_fields__ if "_ms" in name}
    assert (slow.session_ms, slow.lag_ms_max, slow.fetch_bytes_max) == (3750, 2500, plain.fetch_bytes_max)
    assert config.ReplicationConfig(beacon_ms=1).scaled(0.1).beacon_ms == 1


# -- what a cluster keeps for life -------------------------------------------------------------------------------


def written(tmp_path: Path, **flags: Any) -> config.ClusterFile:
    cluster = config.new_cluster_file(load(tmp=tmp_path, **flags).config, "c1")
    (tmp_path / "cluster.json").write_bytes(msgspec.json.encode(cluster))
    return cluster


def test_the_cluster_file_comes_back_as_written(tmp_path):
    cluster = written(tmp_path, cluster__brokers=3, cluster__port_offset=50)
    assert config.read_cluster_file(tmp_path) == cluster
    assert cluster.members[2] == config.Member(2, "127.0.0.1", 9144, 9244, 9344, 9544)


def test_a_member_may_be_advertised_at_another_port_than_it_listens_on(tmp_path):
    plain = written(tmp_path)
    assert b"advertised" not in (tmp_path / "cluster.json").read_bytes()
    members = [msgspec.structs.replace(member, advertised=member.client + 1000) for member in plain.members]
    forwarded = msgspec.structs.replace(plain, members=members)
    (tmp_path / "cluster.json").write_bytes(msgspec.json.encode(forwarded))
    assert config.read_cluster_file(tmp_path) == forwarded


def test_a_folder_without_a_cluster_has_none(tmp_path):
    assert config.read_cluster_file(tmp_path) is None
    assert config.read_cluster_file(tmp_path / "absent") is None


def test_what_the_cluster_was_made_with_wins_over_defaults(tmp_path):
    text = "[broker]\nbase_port = 20000"
    first = load(text, tmp=tmp_path, cluster__brokers=3, cluster__port_offset=50, cluster__storage="memory")
    (tmp_path / "cluster.json").write_bytes(msgspec.json.encode(config.new_cluster_file(first.config, "c1")))
    cluster = config.read_cluster_file(tmp_path)
    assert cluster is not None
    later, origin = config.with_cluster(load(tmp=tmp_path), cluster, tmp_path)
    assert (later.cluster.brokers, later.cluster.port_offset, later.cluster.storage) == (3, 50, "memory")
    assert config.ports(later, 2) == config.ports(first.config, 2)
    assert origin["cluster.brokers"] == str(tmp_path / "cluster.json")
    assert later.cluster.data_dir == str(tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"cluster__brokers": 3}, r"--brokers: cluster\.brokers is 3, but the cluster in .* was made with 5"),
        ({"cluster__port_offset": 7}, r"--port-offset: cluster\.port_offset is 7, but .* was made with 0"),
        ({"cluster__storage": "memory"}, r"--storage: cluster\.storage is memory, but .* was made with disk"),
    ],
)
def test_asking_for_another_cluster_than_the_folder_holds_is_refused(tmp_path, flags, message):
    cluster = written(tmp_path)
    with pytest.raises(ConfigError, match=message):
        config.with_cluster(load(tmp=tmp_path, **flags), cluster, tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 1}', b"\xff"])
def test_a_damaged_cluster_file_is_refused(tmp_path, content):
    (tmp_path / "cluster.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"cluster\.json: damaged"):
        config.read_cluster_file(tmp_path)


def test_a_cluster_file_of_a_newer_version_is_left_alone(tmp_path):
    (tmp_path / "cluster.json").write_bytes(b'{"format": 2, "planets": []}')
    with pytest.raises(FutureFormat, match="newer version"):
        config.read_cluster_file(tmp_path)


def test_a_secret_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(os.urandom(32))
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="secret: readable by others"):
        config.read_secret(tmp_path)
    path.chmod(0o600)
    assert config.read_secret(tmp_path) == path.read_bytes()
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes instead of 32"):
        config.read_secret(tmp_path)
