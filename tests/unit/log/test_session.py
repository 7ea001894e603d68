from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from zmqueue.errors import ConfigError, DataFolderInUse, FutureFormat
from zmqueue.log.session import _INCARNATIONS_MAX, BOOT_ID_VARIABLE, DataFolder, _sealed


@pytest.fixture
def reboot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it and the machine has had its power cut."""
    file = tmp_path / "boot_id"
    boots = iter(range(100))

    def again() -> None:
        file.write_text(f"boot-{next(boots)}\n")

    again()
    monkeypatch.setenv(BOOT_ID_VARIABLE, str(file))
    return again


@pytest.fixture
def path(tmp_path: Path, reboot: Any) -> Path:
    return tmp_path / "data" / "broker-1"


def opened(path: Path, fsync: str = "always") -> DataFolder:
    return DataFolder.open(path, "cluster-a", 1, fsync)


def ran(path: Path, incarnation: int = 7, fsync: str = "always", *, clean: bool) -> bytes:
    """One whole life of a broker; it ends by a shutdown or by a kill."""
    folder = opened(path, fsync)
    folder.begin(incarnation)
    folder.confirm(incarnation)
    folder.close(clean)
    return folder.dir_id


def judged(path: Path, fsync: str = "always") -> bool:
    folder = opened(path, fsync)
    folder.close(clean=False)
    return folder.unclean


# -- identity ----------------------------------------------------------------------------------------------------


def test_a_folder_keeps_its_identity(path: Path):
    first = ran(path, clean=True)
    assert len(first) == 16
    assert ran(path, clean=False) == first
    assert ran(path.with_name("broker-2"), clean=True) != first


def test_a_folder_of_another_broker_or_cluster_is_refused(path: Path):
    ran(path, clean=True)
    before = (path / "meta").read_bytes(), (path / "session").read_bytes()
    for cluster, broker in (("cluster-b", 1), ("cluster-a", 2)):
        with pytest.raises(ConfigError, match="belongs to broker 1 of cluster cluster-a"):
            DataFolder.open(path, cluster, broker, "always")
    assert ((path / "meta").read_bytes(), (path / "session").read_bytes()) == before
    assert not judged(path), "a refusal lets go of the lock"


def test_a_folder_is_held_by_one_broker(path: Path):
    held = opened(path)
    with pytest.raises(DataFolderInUse, match="process"):
        opened(path)
    held.close(clean=False)
    opened(path).close(clean=False)


@pytest.mark.parametrize("name", ["meta", "session"])
def test_a_future_format_is_refused_and_left_untouched(path: Path, name: str):
    ran(path, clean=True)

    class Future(msgspec.Struct):
        format: int
        unheard_of: str

    future = _sealed(Future(2, "x"))
    (path / name).write_bytes(future)
    with pytest.raises(FutureFormat):
        opened(path)
    assert (path / name).read_bytes() == future


# -- the verdict -------------------------------------------------------------------------------------------------


def test_a_fresh_or_wiped_folder_is_unclean(path: Path):
    assert judged(path)
    ran(path, clean=True)
    assert not judged(path)
    (path / "session").unlink()
    assert judged(path)


def test_a_new_identity_is_unclean(path: Path):
    before = ran(path, clean=True)
    (path / "meta").unlink()
    folder = opened(path)
    assert folder.unclean
    assert folder.dir_id != before
    folder.close(clean=False)


@pytest.mark.parametrize("fsync", ["always", "interval", "os"])
def test_a_kill_within_one_boot_loses_nothing(path: Path, fsync: str):
    ran(path, fsync=fsync, clean=False)
    assert not judged(path, fsync)


@pytest.mark.parametrize(("fsync", "unclean"), [("always", False), ("interval", True), ("os", True)])
def test_a_power_cut_loses_what_was_acknowledged_before_its_sync(path: Path, reboot: Any, fsync: str, unclean: bool):
    ran(path, fsync=fsync, clean=False)
    reboot()
    assert judged(path, fsync) is unclean


def test_what_counts_is_how_the_run_before_acknowledged(path: Path, reboot: Any):
    ran(path, fsync="os", clean=False)
    reboot()
    assert judged(path, "always")


@pytest.mark.parametrize("fsync", ["interval", "os"])
def test_after_a_clean_shutdown_a_reboot_loses_nothing(path: Path, reboot: Any, fsync: str):
    ran(path, fsync=fsync, clean=True)
    reboot()
    assert not judged(path, fsync)
    folder = opened(path, fsync)
    folder.begin(8)
    folder.close(clean=False)
    reboot()
    assert judged(path, fsync), "once begun, the shutdown before no longer counts"


def test_the_verdict_survives_crashes_until_a_registration_has_carried_it(path: Path, reboot: Any):
    ran(path, fsync="os", clean=False)
    reboot()
    for incarnation in (8, 9):
        folder = opened(path, "os")
        assert folder.unclean
        folder.begin(incarnation)
        folder.close(clean=incarnation == 9)
    folder = opened(path, "os")
    assert folder.unclean
    folder.begin(10)
    folder.confirm(10)
    folder.close(clean=False)
    assert not judged(path, "os")


@pytest.mark.parametrize("name", ["meta", "session"])
def test_any_flipped_bit_makes_the_folder_unclean(path: Path, name: str):
    ran(path, clean=True)
    good = {other: (path / other).read_bytes() for other in ("meta", "session")}
    for at in range(len(good[name])):
        for bit in (0, 5):
            bad = bytearray(good[name])
            bad[at] ^= 1 << bit
            (path / name).write_bytes(bad)
            assert judged(path), f"byte {at}"
            for other, data in good.items():
                (path / other).write_bytes(data)
    assert len(list(path.glob(f"{name}.corrupt-*"))) == 2 * len(good[name])


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 9, b"00000000 \n"])
def test_a_session_of_any_content_is_judged_and_not_believed(path: Path, content: bytes):
    ran(path, clean=True)
    (path / "session").write_bytes(content)
    assert judged(path)


# -- incarnations ------------------------------------------------------------------------------------------------


def test_incarnations_are_those_the_cluster_may_know(path: Path):
    folder = opened(path)
    assert folder.previous_incarnations == []
    folder.begin(3)
    folder.confirm(3)
    folder.close(clean=False)
    for nth in (4, 5):
        folder = opened(path)
        folder.begin(nth)
        folder.close(clean=False)
    folder = opened(path)
    assert folder.previous_incarnations == [3, 4, 5]
    folder.begin(6)
    folder.confirm(6)
    assert folder.previous_incarnations == [3, 4, 5]
    folder.close(clean=True)
    assert opened(path).previous_incarnations == [6]


def test_the_list_of_incarnations_is_bounded_and_keeps_the_confirmed_one(path: Path):
    ran(path, 1, clean=True)
    folder = opened(path)
    for nth in range(2, 302):
        folder.begin(nth)
    folder.close(clean=False)
    previous = opened(path).previous_incarnations
    assert len(previous) == _INCARNATIONS_MAX
    assert (previous[0], previous[-1]) == (1, 301)


def test_the_session_is_on_disk_before_begin_returns(path: Path):
    folder = opened(path)
    folder.begin(3)
    assert b'"incarnations":[3]' in (path / "session").read_bytes()
    folder.close(clean=False)
