"""The router's metrics.

A new gauge is one entry in `_gauges`. A new counter is one instrument and one method of RouterMetrics. The names are in
`headrace_common.telemetry.schema`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from opentelemetry.metrics import Meter

from headrace_common.errors import Cancelled, HeadraceError
from headrace_common.telemetry import schema
from headrace_router.admission.admission import Admission
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefix_cache.directory import PrefixCacheDirectory
from headrace_router.workers.directory import WorkerDirectory

_SAMPLE_INTERVAL_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Gauge:
    """`read` returns a value for each value of `attribute`, or one value. Infinity means that nothing is reported."""

    name: str
    unit: str
    read: Callable[[], Mapping[str, float] | float]
    attribute: str = schema.ATTRIBUTE_QUEUE


def _gauges(
    queue: PrefillQueue,
    admission: Admission,
    prefixes: PrefixCacheDirectory,
    workers: WorkerDirectory,
) -> tuple[_Gauge, ...]:
    def depths() -> Mapping[str, float]:
        estimate = queue.estimate()
        return {
            "prefill": estimate.depth,
            "prefill tokens": estimate.queued_tokens,
            "requests": admission.requests,
            "slots": admission.used_slots,
            "waiting": admission.waiting,
            "tokens": admission.queued_tokens,
        }

    def limits() -> Mapping[str, float]:
        return {
            "prefill": queue.max_queued_tasks,
            "requests": admission.max_num_seqs,
            "slots": admission.slots,
            "tokens": admission.max_queued_tokens,
        }

    def clock_offsets_ms() -> Mapping[str, float]:
        return {name: 1e3 * offset_s for name, offset_s in workers.clock_offsets_s().items()}

    return (
        _Gauge(schema.METRIC_QUEUE_DEPTH, "{item}", depths),
        _Gauge(schema.METRIC_QUEUE_LIMIT, "{item}", limits),
        _Gauge(schema.METRIC_QUEUE_AGE_MS, "ms", lambda: 1e3 * queue.estimate().oldest_age_s),
        _Gauge(schema.METRIC_QUEUE_WAIT_MS, "ms", lambda: 1e3 * queue.estimate().wait_s),
        _Gauge(schema.METRIC_PREFIX_FAULTS, "{worker}", lambda: len(prefixes.faults)),
        _Gauge(schema.METRIC_CLOCK_OFFSET_MS, "ms", clock_offsets_ms, schema.ATTRIBUTE_WORKER_ID),
    )


class RouterMetrics:
    """Counts requests as they end, and samples the gauges every second.

    Owned by one event loop: the thread that exports must not read the queues.
    """

    def __init__(
        self,
        meter: Meter,
        queue: PrefillQueue,
        admission: Admission,
        prefixes: PrefixCacheDirectory,
        workers: WorkerDirectory,
    ) -> None:
        self._requests = meter.create_counter(schema.METRIC_REQUESTS, "{request}")
        self._migrations = meter.create_counter(schema.METRIC_MIGRATIONS, "{migration}")
        self._dropped_spans = meter.create_counter(schema.METRIC_TRACE_SPANS_DROPPED, "{span}")
        self._callers_refused = meter.create_counter(schema.METRIC_CALLERS_REFUSED, "{refusal}")
        self._first_token = meter.create_histogram(schema.METRIC_TIME_TO_FIRST_TOKEN_MS, "ms")
        self._gauges = tuple(
            (meter.create_gauge(gauge.name, gauge.unit), gauge)
            for gauge in _gauges(queue, admission, prefixes, workers)
        )
        self._task = asyncio.create_task(self._sample_forever(), name="router-metrics")

    @contextmanager
    def count_failures(self) -> Iterator[None]:
        """Counts a request that the block fails or cancels."""
        try:
            yield
        except HeadraceError as error:
            self.count_request(error.reason)
            raise
        except asyncio.CancelledError:
            self.count_request(Cancelled.reason)
            raise

    def count_request(self, end_reason: str, first_token_ms: float | None = None) -> None:
        """Counts a request that has ended. `end_reason` is a finish reason or an error's reason."""
        self._requests.add(1, {schema.ATTRIBUTE_END_REASON: end_reason})
        if first_token_ms is not None:
            self._first_token.record(first_token_ms)

    def count_migration(self, reason: str) -> None:
        """Counts a response that has started and needs another attempt. `reason` is the error's."""
        self._migrations.add(1, {schema.ATTRIBUTE_END_REASON: reason})

    def count_refused(self, refusal: str, count: int) -> None:
        """Counts calls or connections of clients beyond the bounds on each caller."""
        self._callers_refused.add(count, {schema.ATTRIBUTE_REFUSAL: refusal})

    def count_dropped_spans(self, bound: str, count: int) -> None:
        """Counts spans that the trace store dropped. Any thread may call it."""
        self._dropped_spans.add(count, {schema.ATTRIBUTE_TRACE_BOUND: bound})

    def sample(self) -> None:
        """Sets every gauge to its current value."""
        for instrument, gauge in self._gauges:
            value = gauge.read()
            if isinstance(value, Mapping):
                for name, items in value.items():
                    instrument.set(items, {gauge.attribute: name})
            elif math.isfinite(value):
                instrument.set(value)

    async def close(self) -> None:
        """Stops sampling."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _sample_forever(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(_SAMPLE_INTERVAL_S)
