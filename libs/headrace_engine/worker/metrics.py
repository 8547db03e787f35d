"""Metrics of the workers of one process, sampled every second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from opentelemetry.metrics import Meter

from headrace.worker.v1 import worker_pb2
from headrace_common.tasks import end_task, run_forever
from headrace_common.telemetry import schema

_INTERVAL_S: Final = 1.0
_DONE: Final = "done"

Status = Callable[[], worker_pb2.WatchStatusResponse]


class WorkerMetrics:
    """Samples the status of every reporting worker. One event loop owns it; the export thread only exports.

    The process has each instrument once; `headrace.worker_id` distinguishes its workers.
    """

    def __init__(self, meter: Meter) -> None:
        self._transfers = meter.create_counter(schema.METRIC_TRANSFERS, "{transfer}")
        self._bytes = meter.create_counter(schema.METRIC_TRANSFER_BYTES, "By")
        self._ticket_refusals = meter.create_counter(schema.METRIC_TICKET_REFUSALS, "{ticket}")
        self._callers_refused = meter.create_counter(schema.METRIC_CALLERS_REFUSED, "{refusal}")
        self._active = meter.create_gauge(schema.METRIC_TRANSFERS_ACTIVE, "{transfer}")
        self._requests = meter.create_gauge(schema.METRIC_WORKER_REQUESTS, "{request}")
        self._blocks_used = meter.create_gauge(schema.METRIC_BLOCKS_USED, "{block}")
        self._blocks_total = meter.create_gauge(schema.METRIC_BLOCKS_TOTAL, "{block}")
        self._blocks_free = meter.create_gauge(schema.METRIC_BLOCKS_FREE, "{block}")
        self._blocks_reserved = meter.create_gauge(schema.METRIC_BLOCKS_RESERVED, "{block}")
        self._blocks_quarantined = meter.create_gauge(schema.METRIC_BLOCKS_QUARANTINED, "{block}")
        self._workers: dict[str, tuple[Status, bool]] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def reporting(self, worker_id: str, status: Status, *, reserves_blocks: bool) -> Iterator[None]:
        """Samples `status` while the context lasts, and sets all gauges to 0 at its end.

        `reserves_blocks` is for decode workers; prefill workers use their blocks as a cache only.
        """
        self._workers[worker_id] = (status, reserves_blocks)
        if self._task is None:
            self._task = run_forever(self._sample_regularly(), "worker-metrics")
        try:
            yield
        finally:
            del self._workers[worker_id]
            empty = worker_pb2.WatchStatusResponse()
            self._set_gauges(worker_id, empty, reserves_blocks=reserves_blocks)

    def transfer_ended(self, worker_id: str, reason: str, payload_bytes: int) -> None:
        """A worker has ended sending: `reason` is an error's, or empty."""
        worker = {schema.ATTRIBUTE_WORKER_ID: worker_id}
        self._transfers.add(1, {**worker, schema.ATTRIBUTE_END_REASON: reason or _DONE})
        self._bytes.add(payload_bytes, worker)

    def ticket_refused(self, worker_id: str, part: str) -> None:
        """A decode worker has refused a ticket. `part` is the part of the ticket."""
        self._ticket_refusals.add(
            1, {schema.ATTRIBUTE_WORKER_ID: worker_id, schema.ATTRIBUTE_TICKET_PART: part}
        )

    def count_refused(self, refusal: str, count: int) -> None:
        """Clients of this process exceeded the bounds on each caller."""
        self._callers_refused.add(count, {schema.ATTRIBUTE_REFUSAL: refusal})

    def sample(self) -> None:
        """Sets the gauges of every reporting worker from its current status."""
        for worker_id, (status, reserves_blocks) in self._workers.items():
            self._set_gauges(worker_id, status(), reserves_blocks=reserves_blocks)

    async def close(self) -> None:
        """Stops sampling."""
        await end_task(self._task)

    def _set_gauges(
        self, worker_id: str, status: worker_pb2.WatchStatusResponse, *, reserves_blocks: bool
    ) -> None:
        worker = {schema.ATTRIBUTE_WORKER_ID: worker_id}
        for state, count in (
            ("running", status.running_requests),
            ("waiting", status.waiting_requests),
        ):
            self._requests.set(count, {**worker, schema.ATTRIBUTE_WORKER_STATE: state})
        self._active.set(status.active_transfers, worker)
        self._blocks_used.set(status.used_blocks, worker)
        if reserves_blocks:
            unavailable = status.reserved_blocks + status.quarantined_blocks
            self._blocks_total.set(status.total_blocks, worker)
            self._blocks_free.set(max(0, status.total_blocks - unavailable), worker)
            self._blocks_reserved.set(status.reserved_blocks, worker)
            self._blocks_quarantined.set(status.quarantined_blocks, worker)

    async def _sample_regularly(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(_INTERVAL_S)
