"""What the workers of one process count, and what they say of themselves every second."""

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
    """Looks at every worker that it follows. One event loop owns it: the thread that exports looks at nobody.

    The process has each instrument once; `headrace.worker_id` tells its workers apart.
    """

    def __init__(self, meter: Meter) -> None:
        self._transfers = meter.create_counter(schema.METRIC_TRANSFERS, "{transfer}")
        self._bytes = meter.create_counter(schema.METRIC_TRANSFER_BYTES, "By")
        self._active = meter.create_gauge(schema.METRIC_TRANSFERS_ACTIVE, "{transfer}")
        self._requests = meter.create_gauge(schema.METRIC_WORKER_REQUESTS, "{request}")
        self._blocks_used = meter.create_gauge(schema.METRIC_BLOCKS_USED, "{block}")
        self._blocks_total = meter.create_gauge(schema.METRIC_BLOCKS_TOTAL, "{block}")
        self._blocks_free = meter.create_gauge(schema.METRIC_BLOCKS_FREE, "{block}")
        self._blocks_reserved = meter.create_gauge(schema.METRIC_BLOCKS_RESERVED, "{block}")
        self._blocks_quarantined = meter.create_gauge(schema.METRIC_BLOCKS_QUARANTINED, "{block}")
        self._followed: dict[str, tuple[Status, bool]] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def following(self, worker_id: str, status: Status, *, blocks: bool) -> Iterator[None]:
        """Tells what `status` says while the block lasts, and then that nothing is left.

        `blocks` is for decode workers, which promise blocks; prefill workers only cache in theirs.
        """
        self._followed[worker_id] = (status, blocks)
        if self._task is None:
            self._task = run_forever(self._keep_looking(), "worker-metrics")
        try:
            yield
        finally:
            del self._followed[worker_id]
            self._tell(worker_id, worker_pb2.WatchStatusResponse(), blocks=blocks)

    def transfer_ended(self, worker_id: str, reason: str, payload_bytes: int) -> None:
        """A worker has ended sending: `reason` is an error's, or empty."""
        worker = {schema.ATTRIBUTE_WORKER_ID: worker_id}
        self._transfers.add(1, {**worker, schema.ATTRIBUTE_END_REASON: reason or _DONE})
        self._bytes.add(payload_bytes, worker)

    def look(self) -> None:
        """Takes every worker's numbers as they are now."""
        for worker_id, (status, blocks) in self._followed.items():
            self._tell(worker_id, status(), blocks=blocks)

    async def close(self) -> None:
        """Looks no more."""
        await end_task(self._task)

    def _tell(
        self, worker_id: str, status: worker_pb2.WatchStatusResponse, *, blocks: bool
    ) -> None:
        worker = {schema.ATTRIBUTE_WORKER_ID: worker_id}
        for state, count in (
            ("running", status.running_requests),
            ("waiting", status.waiting_requests),
        ):
            self._requests.set(count, {**worker, schema.ATTRIBUTE_WORKER_STATE: state})
        self._active.set(status.active_transfers, worker)
        self._blocks_used.set(status.used_blocks, worker)
        if blocks:
            taken = status.reserved_blocks + status.quarantined_blocks
            self._blocks_total.set(status.total_blocks, worker)
            self._blocks_free.set(max(0, status.total_blocks - taken), worker)
            self._blocks_reserved.set(status.reserved_blocks, worker)
            self._blocks_quarantined.set(status.quarantined_blocks, worker)

    async def _keep_looking(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(_INTERVAL_S)
