"""What disks do to the folder of a broker that does not run, and what its replicas hold at the end.

Damage is chosen by a seeded `random.Random`. The Raft folder is spared unless it is named: a member that forgot its
vote takes no part in votes until it is admitted again, so that is damaged on one broker at a time.

The power cut follows the fsync ledger (zmqueue/log/watched.py). A file keeps what was synced; of what was written after
that, any prefix survives. Names are taken as durable once written, and the Raft journal, which syncs before it promises
anything and does not write to the ledger, is left as it is.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from google_crc32c import value as crc32c

from zmqueue.errors import CorruptBatch
from zmqueue.wire.batch import HEADER_BYTES, parse_header

PARTITIONS = "partitions"
ZERO_BYTES = 4096
RAFT_FILES = ("meta", "journal", "vote", "snapshot")  # what is read of the folder; the rest is room, or was put aside


def segments(folder: Path) -> list[Path]:
    """The segment files of a broker that hold something."""
    return sorted(path for path in (folder / PARTITIONS).glob("*/*.log") if path.stat().st_size)


def tear(folder: Path, rng: random.Random) -> str:
    """The last bytes of a segment that is appended to are gone, or are zeros."""
    newest = {path.parent: path for path in segments(folder)}
    if not newest:
        return "nothing to tear"
    path = rng.choice(sorted(newest.values()))
    size = path.stat().st_size
    if rng.random() < 0.5:
        cut = rng.randint(1, min(size, 2 * ZERO_BYTES))
        with path.open("r+b") as file:
            file.truncate(size - cut)
        return f"cut {cut} bytes of {path.relative_to(folder)}"
    cut = min(size, ZERO_BYTES)
    with path.open("r+b") as file:
        file.seek(size - cut)
        file.write(bytes(cut))
    return f"zeroed {cut} bytes of {path.relative_to(folder)}"


def flip(folder: Path, rng: random.Random, flips: int, *, raft: bool = False) -> str:
    """Single bits, in any file that the broker reads when it starts."""
    candidates = [*segments(folder), *(path for name in ("meta", "session") if (path := folder / name).exists())]
    if raft:
        candidates = [path for path in sorted((folder / "raft").glob("*")) if path.is_file() and path.stat().st_size]
        candidates = [path for path in candidates if path.name in RAFT_FILES]
    if not candidates:
        return "nothing to flip"
    touched = set()
    for _ in range(flips):
        path = rng.choice(candidates)
        at = rng.randrange(path.stat().st_size)
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ (1 << rng.randrange(8))]))
        touched.add(path.relative_to(folder))
    return f"flipped {flips} bits in {len(touched)} files, as {sorted(touched)[0]}"


def wipe(folder: Path, *, raft: bool = False) -> str:
    for path in folder.iterdir():
        if path.name == "raft" and not raft:
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return "wiped, Raft folder too" if raft else "wiped"


def save(folder: Path, to: Path) -> None:
    """A copy of everything but the Raft folder."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("raft"))


def restore(folder: Path, copy: Path) -> str:
    wipe(folder)
    shutil.copytree(copy, folder, dirs_exist_ok=True)
    return "rolled back"


# -- power cuts ------------------------------------------------------------------------------------------------------


def synced_sizes(ledger: Path) -> dict[str, int]:
    """How much of each file is sure to be on disk. A ledger that was cut off in its last line loses only that."""
    sizes: dict[str, int] = {}
    for line in ledger.read_bytes().splitlines() if ledger.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        path = entry["path"]
        if entry["op"] == "sync":
            sizes[path] = entry["size"]
        elif entry["op"] == "rename":
            inside = [name for name in sizes if name == path or name.startswith(path + "/")]
            for name in inside:
                sizes[entry["to"] + name[len(path) :]] = sizes.pop(name)
        elif entry["op"] == "remove":
            sizes.pop(path, None)
    return sizes


def cut_power(folder: Path, ledger: Path, rng: random.Random) -> int:
    """Every segment ends somewhere between what was synced and what was written. Returns the bytes that were lost."""
    sizes = synced_sizes(ledger)
    lost = 0
    for path in (folder / PARTITIONS).glob("*/*.log"):
        size = path.stat().st_size
        safe = min(size, sizes.get(str(path), 0))
        # Often nothing or all of it: the ends of the range are where mistakes are.
        keep = rng.choice([safe, rng.randint(safe, size), size])
        if keep < size:
            with path.open("r+b") as file:
                file.truncate(keep)
            lost += size - keep
    return lost


def shorten(folder: Path, rng: random.Random) -> int:
    """Every segment loses some of its end, synced or not. Returns the bytes that were lost."""
    lost = 0
    for path in segments(folder):
        size = path.stat().st_size
        cut = rng.randint(1, min(size, 2 * ZERO_BYTES))
        with path.open("r+b") as file:
            file.truncate(size - cut)
        lost += cut
    return lost


# -- what is there at the end ----------------------------------------------------------------------------------------


def dump(folder: Path, topic_id: bytes, partition: int) -> tuple[int, int, list[int]] | None:
    """Log start, log end and [base offset, checksum, ...] of a replica's batches; None if there is no such replica."""
    logs = sorted((folder / PARTITIONS / f"{topic_id.hex()}-{partition}").glob("*.log"))
    if not logs:
        return None
    start = end = int(logs[0].stem)
    row: list[int] = []
    for path in logs:
        data, at = path.read_bytes(), 0
        while at + HEADER_BYTES <= len(data):
            try:
                header = parse_header(data, at)
            except CorruptBatch:
                return start, end, row  # what lies behind is not part of the log
            row += [header.base_offset, crc32c(data[at : at + header.total_bytes])]
            end = header.next_offset
            at += header.total_bytes
    return start, end, row
