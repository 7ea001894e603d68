"""The partition logs of one broker: where they lie, which are open, and how the core sees them.

    DATA_DIR/broker-N/partitions/<topic id, hex>-<partition>/

Folders are named by topic id, never by name. Memory topics live in the same shape in memory, and are gone with the
process.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from zmqueue.config import LogConfig
from zmqueue.core.epochs import Epochs
from zmqueue.core.log_view import LogView
from zmqueue.core.producers import Producers
from zmqueue.core.topic_config import settings_of
from zmqueue.log.files import Files, open_files
from zmqueue.log.flusher import Flusher
from zmqueue.log.partition_log import PartitionLog
from zmqueue.log.recovery import sweep_deleted
from zmqueue.model import PartitionKey

_logger = logging.getLogger(__name__)
_FOLDER = re.compile(r"([0-9a-f]{32})-([0-9]{1,5})\Z")


class Logs:
    def __init__(self, folder: Path, config: LogConfig, on_flushed: Callable[[], None]) -> None:
        self._folder = f"{folder}/partitions"
        self._config = config
        self._disk: Files = open_files("disk")
        self._memory: Files = open_files("memory")
        self._open: dict[PartitionKey, PartitionLog] = {}
        self._damaged: set[PartitionKey] = set()
        self.flusher = Flusher(on_flushed, config.fsync, config.fsync_interval_ms)

    def recover(self, trusted: bool) -> Iterator[tuple[PartitionKey, LogView]]:
        """Open every log that is on disk. Those found damaged beyond their tail are then in `damaged`.

        `trusted`: nothing that was written is missing, so full segments need not be read. Settings of topics are not
        known yet.
        """
        self._disk.mkdir(self._folder)
        sweep_deleted(self._disk, self._folder)
        for name in sorted(self._disk.listdir(self._folder)):
            match = _FOLDER.match(name)
            if match is None:
                _logger.warning("%s/%s is not a partition's folder: ignored", self._folder, name)
                continue
            key = PartitionKey(bytes.fromhex(match[1]), int(match[2]))
            log = self._open[key] = PartitionLog.open(self._disk, f"{self._folder}/{name}", self._config, trusted)
            if log.recovery.truncated_bytes:
                _logger.info("%s: cut a torn tail of %d bytes", name, log.recovery.truncated_bytes)
            if log.recovery.corrupt:
                _logger.error("%s: damaged; put aside %s", name, ", ".join(log.recovery.quarantined))
                self._damaged.add(key)
            yield key, view(log)

    @property
    def memory(self) -> Files:
        """Where the logs of memory topics lie."""
        return self._memory

    @property
    def damaged(self) -> list[PartitionKey]:
        return sorted(self._damaged)

    def damage_registered(self) -> None:
        """The cluster knows what is missing here."""
        for key in self._damaged:
            if key in self._open:
                self._open[key].corruption_registered()
        self._damaged.clear()

    def open(self, key: PartitionKey, storage: str, config: Mapping[str, str]) -> PartitionLog:
        name = f"{key.topic_id.hex()}-{key.partition}"
        settings = settings_of(config, self._config)
        if storage == "memory":
            log = PartitionLog.open(self._memory, name, self._config, settings=settings)
        else:
            log = PartitionLog.open(self._disk, f"{self._folder}/{name}", self._config, settings=settings)
        self._open[key] = log
        return log

    def configure(self, key: PartitionKey, config: Mapping[str, str]) -> None:
        """The settings of the topic that this log belongs to."""
        self._open[key].configure(settings_of(config, self._config))

    def __getitem__(self, key: PartitionKey) -> PartitionLog:
        return self._open[key]

    def get(self, key: PartitionKey) -> PartitionLog | None:
        return self._open.get(key)

    def __iter__(self) -> Iterator[PartitionKey]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)

    def remove(self, key: PartitionKey) -> None:
        log = self._open.pop(key, None)
        if log is not None:
            log.delete()

    def close(self) -> None:
        """Everything appended is durable afterwards."""
        self.flusher.close()
        for done in self.flusher.drain():
            done.log.flushed(done.ticket)
        for log in self._open.values():
            log.close()
        self._open.clear()
        self._disk.close()


def view(log: PartitionLog) -> LogView:
    """The log as the core sees it. Nothing above the log start is known to be committed until a leader says so."""
    epochs, producers = history(log)
    return LogView(log.log_start, log.log_end, log.durable_end, epochs, producers, log.log_start, log.first_offset)


def history(log: PartitionLog) -> tuple[Epochs, Producers]:
    return Epochs(log.epochs), log.producers.copy()
