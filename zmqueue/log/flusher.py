"""Group commit: one thread that syncs for all partitions of a broker while the loop goes on.

The loop appends, then submits the log; the thread takes everything that was submitted, syncs it (the call releases the
GIL), and gives the tickets back through `drain`. While one round is being synced, appends of all partitions gather for
the next, so the rate of syncs follows the disk and not the number of requests.

Why this is safe without locking the logs
- A ticket is made on the loop's thread, by `submit`, after the write it covers; the thread reads it and never the log.
  Its end is therefore below everything that its sync, which starts later, makes durable.
- A log submitted again before its round began gets a new ticket in place of the old one: the new one covers all that
  the old one did, as nothing leaves a log's list of unsynced files before a ticket has come back. Had the second call
  been dropped as a duplicate, the appends between the two would wait for a flush that nobody asked for.
- A log submitted while its ticket is being synced goes into the next round, for the sync may have begun before its
  last write.
- The loop may meanwhile roll, truncate, close or delete the log. The ticket has pinned its files, so no descriptor is
  closed or given out again under the thread; syncing a file that was cut or removed does no harm; and a ticket of an
  older generation is refused by `PartitionLog.flushed`. Pins are returned on the loop's thread, by `flushed`.

A failed fsync is final (rule D3): the kernel may have dropped the dirty pages and reports success next time. It is
given back once, as the error of its ticket; the rest of the round is not, and no more work is taken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from zmqueue.config import Fsync
from zmqueue.errors import StorageFailed, ZmqueueError
from zmqueue.log.partition_log import PartitionLog
from zmqueue.log.ticket import FlushTicket


class Flushed(NamedTuple):
    """A ticket that is done, or has failed: `log.flushed(ticket)` either way, which raises the ticket's error."""

    key: Hashable
    log: PartitionLog
    ticket: FlushTicket


class Flusher:
    """`submit`, `drain` and `close` belong to the loop's thread.

    `on_done` wakes the loop to call `drain`. It is called from either thread and must not block.
    """

    def __init__(self, on_done: Callable[[], None], mode: Fsync = "always", interval_ms: int = 50) -> None:
        self._on_done = on_done
        self._mode = mode
        self._interval_s = interval_ms / 1000
        # The lock guards these three; it is held for a few instructions only.
        self._queued: dict[Hashable, Flushed] = {}
        self._closing = False
        self._wanted = threading.Condition(threading.Lock())
        self._completed: deque[Flushed] = deque()
        self.failed: ZmqueueError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zmqueue-flush", daemon=True)
        self._thread.start()

    def submit(self, key: Hashable, log: PartitionLog) -> None:
        """Have everything that is in the log now made durable. Raises StorageFailed once a sync has failed."""
        if self.failed is not None:
            raise StorageFailed(f"no more is synced after: {self.failed}")
        assert not self._closing, "the flusher is closed"
        ticket = log.begin_flush()
        now = ticket.empty or self._mode == "os"
        if now or self._mode == "interval":
            # Acknowledgements do not wait for the disk; the thread, if it has work, works for later.
            ahead = ticket if now else log.begin_flush()
            quiet = not self._completed
            self._completed.append(Flushed(key, log, ahead))
            if quiet:
                self._on_done()
        if now:
            return
        with self._wanted:
            replaced = self._queued.get(key)
            self._queued[key] = Flushed(key, log, ticket)
            if len(self._queued) == 1 and replaced is None:
                self._wanted.notify()
        if replaced is not None:
            replaced.ticket.release()

    def drain(self) -> list[Flushed]:
        """What was done since the last call, oldest first."""
        if not self._completed:
            return []
        done = []
        while self._completed:
            done.append(self._completed.popleft())
        return done

    def close(self) -> None:
        """Sync what is queued and end. What came of it is there to `drain`."""
        with self._wanted:
            self._closing = True
            self._wanted.notify()
        self._stop.set()
        self._thread.join()

    # -- on the flush thread

    def _run(self) -> None:
        while round_ := self._take():
            for item in round_:
                self._sync(item)
                # If others wait there already, the loop was told and has yet to look; it looks until it finds none.
                self._completed.append(item)
                if len(self._completed) == 1:
                    self._on_done()
                if self.failed is not None:
                    break
            if self.failed is not None:
                return
            if self._mode == "interval":
                self._stop.wait(self._interval_s)

    def _sync(self, item: Flushed) -> None:
        try:
            item.ticket.sync()
        except ZmqueueError as error:
            item.ticket.error = self.failed = error
        except Exception as error:
            # A mistake of ours, but no acknowledgement may wait for a thread that silently ended.
            item.ticket.error = self.failed = StorageFailed(f"flush failed: {error!r}")

    def _take(self) -> list[Flushed]:
        """All that is queued, waiting for the first; empty when closed."""
        with self._wanted:
            while not self._queued and not self._closing:
                self._wanted.wait()
            queued, self._queued = self._queued, {}
        return list(queued.values())
