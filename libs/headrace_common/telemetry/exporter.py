"""Exports spans over gRPC to the routers, which may change."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc
import grpc.aio
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from headrace_common.access.credentials import Credentials
from headrace_common.config import ServiceConfig
from headrace_common.rpc.channel import open_blocking_channel

_LOG = logging.getLogger(__name__)

EXPORT_TIMEOUT_S: Final = 1.0
SHUTDOWN_TIMEOUT_S: Final = 1.5
_EXPORT_METHOD: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class CollectorExporter(SpanExporter):
    """Sends each batch to every current collector. A collector that cannot be reached misses the batch.

    The exporter of OpenTelemetry has one collector, and a certificate that stays.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._credentials = Credentials.from_config(config)
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self._failing: set[str] = set()
        self._close_monotonic_s = float("inf")

    def set_endpoints(self, endpoints: Sequence[str]) -> None:
        """Replaces the collectors. Those that stay keep their channels."""
        with self._lock:
            gone = [self._channels.pop(name) for name in set(self._channels) - set(endpoints)]
            for name in endpoints:
                if name not in self._channels:
                    self._channels[name] = open_blocking_channel(name, self._config)
            self._failing &= set(endpoints)
        for channel in gone:
            channel.close()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends the spans to all collectors in parallel and waits up to 1 s. SUCCESS when all have them."""
        timeout_s = min(EXPORT_TIMEOUT_S, self._close_monotonic_s - time.monotonic())
        with self._lock:
            channels = dict(self._channels)
        if timeout_s <= 0 or not channels:
            return SpanExportResult.FAILURE if channels else SpanExportResult.SUCCESS
        content = encode_spans(spans).SerializeToString()
        calls: dict[str, Any] = {}
        for name, channel in channels.items():
            try:
                token = self._credentials.metadata_for(name)
                export = _exporter(channel).future
                calls[name] = export(content, timeout=timeout_s, metadata=token)
            except ValueError:
                _LOG.debug("collector %s was removed during an export", name)
        delivered = [self._delivered(name, call.result) for name, call in calls.items()]
        return SpanExportResult.SUCCESS if all(delivered) else SpanExportResult.FAILURE

    def close_at(self, monotonic_s: float) -> None:
        """Drops exports after this time."""
        self._close_monotonic_s = monotonic_s

    def shutdown(self) -> None:
        """Closes every channel, which ends exports in flight."""
        self.set_endpoints(())

    def _delivered(self, name: str, wait: Callable[[], object]) -> bool:
        """Whether `wait`, which waits for a collector's answer, returns."""
        try:
            wait()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            self._record_failure(name, error)
            return False
        except ValueError:
            _LOG.debug("collector %s was removed during an export", name)
            return False
        with self._lock:
            recovered = name in self._failing
            self._failing.discard(name)
        if recovered:
            _LOG.info("collector %s accepts spans again", name)
        return True

    def _record_failure(self, name: str, error: Exception) -> None:
        with self._lock:
            known = name in self._failing or name not in self._channels
            if name in self._channels:
                self._failing.add(name)
        if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAVAILABLE:
            self._reopen(name)
        if not known:
            reason = error.details() if isinstance(error, grpc.Call) else str(error)
            _LOG.warning("collector %s does not accept spans: %s", name, reason)

    def _reopen(self, name: str) -> None:
        """Replaces a channel that cannot connect, because its certificate may be an old one."""
        if not self._config.tls_certificate_file:
            return
        with self._lock:
            old = self._channels.get(name)
            if old is not None:
                self._channels[name] = open_blocking_channel(name, self._config)
        if old is not None:
            old.close()


def _exporter(channel: grpc.Channel) -> grpc.UnaryUnaryMultiCallable[Any, Any]:
    """The Export method of a collector."""
    return channel.unary_unary(_EXPORT_METHOD)
