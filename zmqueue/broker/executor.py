"""Performs effects: the one place where the core's decisions become writes, messages and answers.

Effects run in order, step by step; what an effect leads to at once (a log opened, a log truncated) goes back to the
core, and the effects of that run after the present step. When an append fails, the rest of its step for that partition
is dropped, so that nothing is published or flushed that is not in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from zmqueue.broker.handlers import Handlers
from zmqueue.broker.logs import Logs, history, view
from zmqueue.broker.peers import Peers
from zmqueue.core import effects as e
from zmqueue.core.node import Node
from zmqueue.errors import CorruptLog, StorageFailed, StorageFull, ZmqueueError
from zmqueue.log.partition_log import PartitionLog
from zmqueue.model import PartitionKey

_logger = logging.getLogger(__name__)

OPEN_RETRY_MS = 1_000

Follow = list[e.Effect] | None


class Fatal(Exception):
    """The broker must stop: going on would be wrong."""


class Executor:
    def __init__(
        self,
        node: Node,
        logs: Logs,
        clock: Callable[[], int],
        propose: Callable[[bytes], None],
        on_registered: Callable[[int], None],
    ) -> None:
        self._node = node
        self._logs = logs
        self._clock = clock
        self._propose = propose
        self._on_registered = on_registered
        self._failed: set[PartitionKey] = set()  # partitions whose append failed in the present step
        self._dirty: dict[PartitionKey, PartitionLog] = {}
        self._unopened: dict[PartitionKey, e.OpenLog] = {}  # for want of room on the disk
        self._open_ms = 0
        self._table: dict[type[e.Effect], Callable[[Any], Follow]] = {
            e.Append: self._append,
            e.Publish: self._publish,
            e.Flush: self._flush,
            e.SendAck: self._send_ack,
            e.AnswerProduce: self._answer_produce,
            e.Advanced: self._advanced,
            e.Leading: self._leading,
            e.Moved: self._moved,
            e.SendFetch: self._send_fetch,
            e.AnswerFetch: self._answer_fetch,
            e.SendBatches: self._send_batches,
            e.SendHeartbeat: self._send_heartbeat,
            e.PublishBeacon: self._publish_beacon,
            e.Follow: self._follow,
            e.OpenLog: self._open_log,
            e.CloseLog: self._close_log,
            e.Configure: self._configure,
            e.DeleteBefore: self._delete_before,
            e.Adopt: self._adopt,
            e.Truncate: self._truncate,
            e.Reset: self._reset,
            e.AnswerCommand: self._answer_command,
            e.Propose: self._raft_propose,
            e.Registered: self._registered,
            e.TopicsChanged: self._topics_changed,
            e.Halt: self._halt,
        }

    def bind(self, peers: Peers, handlers: Handlers) -> None:
        self._peers = peers
        self._handlers = handlers

    def run(self, effects: list[e.Effect]) -> None:
        if not effects:
            return
        table, steps = self._table, [effects]
        for step in steps:  # which grows meanwhile
            for effect in step:
                follow = table[type(effect)](effect)
                if follow:
                    steps.append(follow)
            if self._failed:
                self._failed.clear()

    def end_turn(self) -> None:
        """Hand over what gathered during a turn of the loop: logs to sync, acknowledgements to send."""
        if self._dirty:
            for key, log in self._dirty.items():
                self._logs.flusher.submit(key, log)
            self._dirty.clear()
        if self._unopened:
            self._open_again()
        self._peers.send_acks(self._node.epoch)

    def on_flushed(self) -> None:
        """Syncs have come back."""
        for done in self._logs.flusher.drain():
            key: Any = done.key
            try:
                fresh = done.log.flushed(done.ticket)
            except StorageFailed as error:
                raise Fatal(f"fsync failed, and is never tried again: {error}") from error
            if fresh and self._logs.get(key) is done.log:
                self.run(self._node.on_flushed(key, done.log.durable_end, self._clock()))

    # -- the log -------------------------------------------------------------------------------------------------

    def _append(self, effect: e.Append) -> Follow:
        if effect.key in self._failed:
            return None
        log = self._logs[effect.key]
        try:
            log.append(effect.batches)
        except StorageFull as error:
            return self._on_full(effect.key, log, error)
        except StorageFailed as error:
            raise Fatal(f"partition {effect.key}: {error}") from error
        return None

    def _on_full(self, key: PartitionKey, log: PartitionLog, error: StorageFull) -> Follow:
        _logger.error("partition %s: %s", key, error)
        self._failed.add(key)
        epochs, producers = history(log)
        return self._node.on_append_failed(key, error.code, log.log_end, epochs, producers, self._clock())

    def _adopt(self, effect: e.Adopt) -> Follow:
        log = self._logs[effect.key]
        try:
            log.adopt(effect.epoch, effect.producers)
        except StorageFull as error:
            return self._on_full(effect.key, log, error)
        return None

    def _configure(self, effect: e.Configure) -> Follow:
        self._logs.configure(effect.key, effect.config)
        return None

    def _delete_before(self, effect: e.DeleteBefore) -> Follow:
        log = self._logs[effect.key]
        if effect.key in self._failed:
            return None
        try:
            log.delete_before(effect.offset)
        except StorageFull as error:
            # Whoever wanted it will want it again.
            _logger.warning("partition %s: records below %d stay for now: %s", effect.key, effect.offset, error)
            return None
        except CorruptLog as error:
            _logger.error("partition %s: %s", effect.key, error)
            self._node.on_lost(effect.key)
            return None
        return self._node.on_log_start(effect.key, log.log_start, log.first_offset)

    def _flush(self, effect: e.Flush) -> Follow:
        if effect.key not in self._failed:
            self._dirty[effect.key] = self._logs[effect.key]
        return None

    def _truncate(self, effect: e.Truncate) -> Follow:
        log = self._logs[effect.key]
        _logger.info("partition %s: truncated from %d to %d", effect.key, log.log_end, effect.end)
        log.truncate(effect.end)
        return self._restated(effect.key, log)

    def _reset(self, effect: e.Reset) -> Follow:
        log = self._logs[effect.key]
        _logger.info("partition %s: starts anew at %d", effect.key, effect.start)
        log.reset(effect.start)
        return self._restated(effect.key, log)

    def _restated(self, key: PartitionKey, log: PartitionLog) -> Follow:
        epochs, producers = history(log)
        return self._node.on_truncated(
            key, log.log_start, log.log_end, epochs, producers, self._clock(), log.first_offset
        )

    def _open_log(self, effect: e.OpenLog) -> Follow:
        try:
            log = self._logs.open(effect.key, effect.storage, effect.config)
        except StorageFull as error:
            # Until there is room this broker has no such replica, which the others see as one that is behind.
            if effect.key not in self._unopened:
                _logger.error("partition %s: %s", effect.key, error)
            self._unopened[effect.key] = effect
            self._open_ms = self._clock() + OPEN_RETRY_MS
            return None
        return self._node.on_opened(effect.key, view(log), self._clock())

    def _open_again(self) -> None:
        if self._clock() >= self._open_ms:
            waiting, self._unopened = self._unopened, {}
            self.run(list(waiting.values()))

    def _close_log(self, effect: e.CloseLog) -> Follow:
        self._unopened.pop(effect.key, None)
        self._dirty.pop(effect.key, None)
        self._logs.remove(effect.key)
        return None

    # -- other brokers -------------------------------------------------------------------------------------------

    def _publish(self, effect: e.Publish) -> Follow:
        if effect.key not in self._failed:
            self._peers.publish(effect, self._node.epoch)
        return None

    def _publish_beacon(self, effect: e.PublishBeacon) -> Follow:
        self._peers.publish_beacon(effect.rows, self._node.epoch)
        return None

    def _follow(self, effect: e.Follow) -> Follow:
        self._peers.follow(effect.key, effect.on)
        return None

    def _send_ack(self, effect: e.SendAck) -> Follow:
        self._peers.add_ack(effect.leader, effect.key, effect.leader_epoch, effect.durable_end)
        return None

    def _send_fetch(self, effect: e.SendFetch) -> Follow:
        self._peers.send_fetch(effect.leader, effect.request)
        return None

    def _answer_fetch(self, effect: e.AnswerFetch) -> Follow:
        self._peers.answer(effect.token, effect.response)
        return None

    def _send_batches(self, effect: e.SendBatches) -> Follow:
        log = self._logs[effect.key]
        try:
            data = log.read_replica(effect.offset, effect.bytes_max, log.log_end)
            if effect.fresh:
                effect.response.start_epoch, effect.response.producers = log.before_start()
        except CorruptLog as error:
            _logger.error("partition %s: %s", effect.key, error)
            self._node.on_lost(effect.key)
            data, effect.response.error = b"", StorageFailed.code
        except ZmqueueError as error:
            data, effect.response.error = b"", error.code
        self._peers.answer(effect.token, effect.response, data)
        return None

    def _send_heartbeat(self, effect: e.SendHeartbeat) -> Follow:
        self._peers.send_heartbeat(effect.controller, self._node.heartbeat(self._clock()))
        return None

    # -- clients -------------------------------------------------------------------------------------------------

    def _answer_produce(self, effect: e.AnswerProduce) -> Follow:
        self._handlers.on_produced(effect.token, effect.result)
        return None

    def _advanced(self, effect: e.Advanced) -> Follow:
        self._handlers.fetches.on_advanced(effect.key, self._clock())
        return None

    def _leading(self, effect: e.Leading) -> Follow:
        self._handlers.on_leading(effect.key)
        return None

    def _moved(self, effect: e.Moved) -> Follow:
        self._handlers.on_moved(effect.key)
        return None

    def _answer_command(self, effect: e.AnswerCommand) -> Follow:
        self._handlers.on_command(effect.token, effect.outcome)
        return None

    # -- metadata ------------------------------------------------------------------------------------------------

    def _raft_propose(self, effect: e.Propose) -> Follow:
        self._propose(effect.data)
        return None

    def _registered(self, effect: e.Registered) -> Follow:
        self._on_registered(effect.incarnation)
        return None

    def _topics_changed(self, effect: e.TopicsChanged) -> Follow:
        self._handlers.on_topics()
        return None

    def _halt(self, effect: e.Halt) -> Follow:
        raise Fatal(effect.reason)
