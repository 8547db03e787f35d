"""What a router counts and measures."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from opentelemetry.metrics import Meter

from headrace_common.errors import Cancelled, HeadraceError
from headrace_common.telemetry import schema
from headrace_router.admission.admission import Admission
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefix_cache.directory import PrefixCacheDirectory

_INTERVAL_S: Final = 1.0


class RouterMetrics:
    """Counts requests as they end, and looks at the queues every second.

    One event loop owns it: the queues are not looked at from the thread that exports.
    """

    def __init__(
        self,
        meter: Meter,
        queue: PrefillQueue,
        admission: Admission,
        prefixes: PrefixCacheDirectory,
    ) -> None:
        self._queue = queue
        self._prefixes = prefixes
        self._admission = admission
        self._requests = meter.create_counter(schema.METRIC_REQUESTS, "{request}")
        self._migrations = meter.create_counter(schema.METRIC_MIGRATIONS, "{migration}")
        self._first_token = meter.create_histogram(schema.METRIC_TIME_TO_FIRST_TOKEN_MS, "ms")
        self._depth = meter.create_gauge(schema.METRIC_QUEUE_DEPTH, "{item}")
        self._limit = meter.create_gauge(schema.METRIC_QUEUE_LIMIT, "{item}")
        self._age = meter.create_gauge(schema.METRIC_QUEUE_AGE_MS, "ms")
        self._wait = meter.create_gauge(schema.METRIC_QUEUE_WAIT_MS, "ms")
        self._faults = meter.create_gauge(schema.METRIC_PREFIX_FAULTS, "{worker}")
        self._task = asyncio.create_task(self._keep_looking(), name="router-metrics")

    @contextmanager
    def failures_counted(self) -> Iterator[None]:
        """Counts a request that fails or is given up in the block."""
        try:
            yield
        except HeadraceError as error:
            self.ended(error.reason, None)
            raise
        except asyncio.CancelledError:
            self.ended(Cancelled.reason, None)
            raise

    def ended(self, reason: str, first_token_ms: float | None) -> None:
        """A request has ended: `reason` is a finish reason or an error's."""
        self._requests.add(1, {schema.ATTRIBUTE_END_REASON: reason})
        if first_token_ms is not None:
            self._first_token.record(first_token_ms)

    def migrated(self, reason: str) -> None:
        """An answer that has begun goes on with another attempt, because of this error."""
        self._migrations.add(1, {schema.ATTRIBUTE_END_REASON: reason})

    def look(self) -> None:
        """Takes the queues' numbers as they are now."""
        estimate = self._queue.estimate()
        self._set_depth("prefill", estimate.depth)
        self._set_depth("prefill tokens", estimate.queued_tokens)
        self._set_depth("requests", self._admission.requests)
        self._set_depth("waiting", self._admission.waiting)
        self._set_depth("tokens", self._admission.queued_tokens)
        for name, limit in (
            ("prefill", self._queue.max_queued_tasks),
            ("requests", self._admission.max_num_seqs),
            ("tokens", self._admission.max_queued_tokens),
        ):
            self._limit.set(limit, {schema.ATTRIBUTE_QUEUE: name})
        self._faults.set(len(self._prefixes.faults))
        self._age.set(1e3 * estimate.oldest_age_s)
        if math.isfinite(estimate.wait_s):
            self._wait.set(1e3 * estimate.wait_s)

    async def close(self) -> None:
        """Looks no more."""
        self._task.cancel()
        await asyncio.wait([self._task])

    def _set_depth(self, queue: str, items: int) -> None:
        self._depth.set(items, {schema.ATTRIBUTE_QUEUE: queue})

    async def _keep_looking(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(_INTERVAL_S)
