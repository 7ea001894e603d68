"""The administrator's client: topics, consumer groups and the cluster, each call with a bounded time."""

from __future__ import annotations

import time

from zmqueue.client.descriptions import BrokerDescription, ClusterDescription
from zmqueue.client.group_admin import GroupAdmin
from zmqueue.client.routing import parse_bootstrap
from zmqueue.client.topic_admin import TopicAdmin
from zmqueue.errors import NoBrokersAvailable, ZmqueueError
from zmqueue.wire import messages
from zmqueue.wire.frames import Operation


class Admin(TopicAdmin, GroupAdmin):
    def describe_cluster(self) -> ClusterDescription:
        answer = self._metadata([], time.monotonic() + self._timeout_s)
        brokers = [BrokerDescription(b.id, b.host, b.port, b.fenced, b.epoch) for b in answer.brokers]
        return ClusterDescription(
            answer.cluster_id, answer.controller, answer.index, sorted(brokers, key=lambda broker: broker.id)
        )

    def broker_status(self, broker_id: int | None = None, address: str | None = None) -> messages.StatusResponse:
        """How one broker is doing, in its own words: the one of this id or at this address, or any."""
        deadline = time.monotonic() + self._timeout_s
        request = messages.StatusRequest()
        if address is not None:
            return self._attempt(parse_bootstrap(address)[0], Operation.STATUS, request, deadline)
        if broker_id is None:
            return self._command(Operation.STATUS, request, deadline, [])
        if broker_id not in self._router.metadata.brokers:
            # A broker that starts answers for itself before anybody knows the cluster.
            found = self._status_at_bootstrap(broker_id, deadline)
            if found is not None:
                return found
            self._router.wait_for(lambda: broker_id in self._router.metadata.brokers or None, self._left(deadline))
        if broker_id not in self._router.metadata.brokers:
            raise NoBrokersAvailable(f"the cluster has no broker {broker_id}")
        return self._attempt(broker_id, Operation.STATUS, request, deadline)

    def _status_at_bootstrap(self, broker_id: int, deadline: float) -> messages.StatusResponse | None:
        for address in self._bootstrap:
            try:
                answer = self._attempt(address, Operation.STATUS, messages.StatusRequest(), deadline)
            except ZmqueueError as error:
                if not error.retriable or len(self._bootstrap) == 1:
                    raise
                continue
            if answer.broker == broker_id:
                return answer
        return None
