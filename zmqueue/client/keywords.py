"""Keywords that a client does not take: what to do instead, or which name was meant."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

_SECURITY = "connections are not encrypted with TLS or authenticated with SASL"
_SOCKETS = "ZeroMQ looks after connections"
_METRICS = "ask metrics() for the numbers"
# kafka-python's, where nothing here could do what they say. One that is taken is honoured.
KAFKA_ONLY: dict[str, str] = {
    "api_version": "brokers and clients of zmqueue speak one protocol, whose versions they settle themselves",
    "api_version_auto_timeout_ms": "there is no version to find out",
    "allow_auto_create_topics": "topics are made with Admin.create_topic",
    "connections_max_idle_ms": _SOCKETS,
    "default_offset_commit_callback": "give a callback to commit_async, or an interceptor with on_commit",
    "exclude_internal_topics": "a pattern never matches topics of zmqueue itself",
    "metric_group_prefix": _METRICS,
    "metric_reporters": _METRICS,
    "metrics_enabled": _METRICS,
    "metrics_num_samples": _METRICS,
    "metrics_sample_window_ms": _METRICS,
    "legacy_iterator": "there is one way to iterate",
    "receive_buffer_bytes": _SOCKETS,
    "reconnect_backoff_max_ms": _SOCKETS,
    "reconnect_backoff_ms": _SOCKETS,
    "retry_backoff_ms": "a consumer finds its pace by itself",  # producers have it
    "security_protocol": _SECURITY,
    "selector": _SOCKETS,
    "send_buffer_bytes": _SOCKETS,
    "socket_options": _SOCKETS,
    "sock_chunk_buffer_count": _SOCKETS,
    "sock_chunk_bytes": _SOCKETS,
    "transaction_timeout_ms": "there are no transactions yet",
}


def refuse_unknown(client: type, unknown: Mapping[str, Any]) -> None:
    """Raises TypeError for the first of these keywords, if there are any."""
    for name in unknown:
        why = KAFKA_ONLY.get(name)
        if why is None and name.startswith(("ssl_", "sasl_")):
            why = _SECURITY
        if why is not None:
            raise TypeError(f"{client.__name__}: leave out {name!r}, which is Kafka's: {why}")
        nearest = difflib.get_close_matches(name, inspect.signature(client).parameters, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise TypeError(f"{client.__name__} has no option {name!r}{hint}")
