"""Requests that stream past this router: they count as admitted, and their traces are made whole, until they end.

That one has ended is heard from its decode worker's span, which every router is sent. Where none comes, a ticket that
has expired counts for as long as its worker reports more requests than this router has placed there itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from opentelemetry.proto.trace.v1 import trace_pb2 as otlp_pb2

from headrace.inference.v1 import inference_pb2
from headrace_common.rpc.trace_context import context_from_traceparent
from headrace_common.telemetry import schema
from headrace_common.telemetry.setup import Telemetry
from headrace_kv.layout.layout import WorkerRef
from headrace_router.admission.admission import AdmissionPermit
from headrace_router.workers.directory import WorkerDirectory

_SWEEP_S: Final = 1.0
_STEPS: Final = (schema.SPAN_DECODE, schema.SPAN_DECODE_GENERATE)


@dataclass(slots=True)
class _Held:
    trace_id: bytes
    ref: WorkerRef
    traceparent: str
    ticket: AdmissionPermit
    release: Callable[[], None]
    arrival_unix_ns: int
    expire_monotonic_s: float
    end_monotonic_s: float


class DirectRequestTracker:
    """One event loop owns it. `ttl_s` is a ticket's life, `longest_s` that of a request that set no deadline."""

    def __init__(
        self, view: WorkerDirectory, telemetry: Telemetry, *, ttl_s: float, longest_s: float
    ) -> None:
        self._view = view
        self._telemetry = telemetry
        self._ttl_s = ttl_s
        self._longest_s = max(ttl_s, longest_s)
        self._held: dict[str, _Held] = {}
        self._of_trace: dict[bytes, str] = {}
        self._sweeping: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._held)

    def begin(
        self,
        direct: inference_pb2.DirectRequest,
        ref: WorkerRef,
        ticket: AdmissionPermit,
        release: Callable[[], None],
        arrival_unix_ns: int,
    ) -> None:
        """A ticket was given away; `release` is called once, when the request has ended or was never made."""
        now_s = time.monotonic()
        trace_id = bytes.fromhex(direct.traceparent.split("-")[1])
        self._held[direct.transfer_id] = _Held(
            *(trace_id, ref, direct.traceparent, ticket, release, arrival_unix_ns),
            expire_monotonic_s=now_s + self._ttl_s,
            end_monotonic_s=now_s + self._longest_s,
        )
        self._of_trace[trace_id] = direct.transfer_id
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)

    def ticket(self, transfer_id: str) -> AdmissionPermit | None:
        """What lets a request in whose prompt is handed back; None when it does not count here any more."""
        held = self._held.get(transfer_id)
        return None if held is None else held.ticket

    def hear(self, resource_spans: Iterable[otlp_pb2.ResourceSpans]) -> None:
        """Takes workers' spans: what they say of requests that are counted here."""
        if not self._held:
            return
        for resource in resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    if span.name in _STEPS and span.trace_id in self._of_trace:
                        self._take(span)

    def close(self) -> None:
        """Releases everything."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        for transfer_id in tuple(self._held):
            self._release(transfer_id)

    def _take(self, span: otlp_pb2.Span) -> None:
        transfer_id = self._of_trace[span.trace_id]
        if span.name == schema.SPAN_DECODE:
            # A client's trace may hold several requests.
            said = {pair.key: pair.value.string_value for pair in span.attributes}
            self._release(said.get(schema.ATTRIBUTE_TRANSFER_ID, transfer_id))
            return
        held = self._held[transfer_id]
        parent = context_from_traceparent(held.traceparent)
        first_ns, last_ns = span.start_time_unix_nano, span.end_time_unix_nano
        record = self._telemetry.record_span
        record(schema.SPAN_FIRST_TOKEN, parent, held.arrival_unix_ns, first_ns)
        record(schema.SPAN_STREAM, parent, first_ns, last_ns)

    def _sweep(self) -> None:
        now_s = time.monotonic()
        expired: dict[WorkerRef, list[str]] = {}
        for transfer_id, held in tuple(self._held.items()):
            if now_s >= held.end_monotonic_s:
                self._release(transfer_id)
            elif now_s >= held.expire_monotonic_s:
                expired.setdefault(held.ref, []).append(transfer_id)
        for ref, transfer_ids in expired.items():
            for transfer_id in transfer_ids[
                : len(transfer_ids) - self._view.external_request_count(ref)
            ]:
                self._release(transfer_id)
        loop = asyncio.get_running_loop()
        self._sweeping = loop.call_later(_SWEEP_S, self._sweep) if self._held else None

    def _release(self, transfer_id: str) -> None:
        held = self._held.pop(transfer_id, None)
        if held is not None:
            if self._of_trace.get(held.trace_id) == transfer_id:
                del self._of_trace[held.trace_id]
            held.release()
