"""Reports to prefill workers how many tasks wait, so that they divide their slots among routers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from headrace.prefill.v1 import prefill_pb2
from headrace_kv.layout.layout import WorkerRef
from headrace_router.prefill_queue.worker_stream import PrefillWorkerStream

_INTERVAL_S: Final = 0.05
# Of all workers together.
_REPORTS_PER_S_MAX: Final = 500


def report_interval_s(workers: int) -> float:
    """Seconds between two rounds of reports to so many workers."""
    return max(_INTERVAL_S, workers / _REPORTS_PER_S_MAX)


class DemandReports:
    """Reports a changed demand once, and no sooner than the interval after the last report.

    The first report to a worker is sent at once: by it the worker sees that this router sends reports.
    """

    def __init__(self, demand: Callable[[], prefill_pb2.QueueDemand]) -> None:
        self._demand = demand
        self._streams: dict[WorkerRef, PrefillWorkerStream] = {}
        """The workers that get reports."""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: PrefillWorkerStream) -> None:
        """A worker gets reports from now on."""
        if stream.ref not in self._streams:
            self._streams[stream.ref] = stream
            stream.send_demand(self._demand())

    def remove(self, stream: PrefillWorkerStream) -> None:
        """A worker gets no more reports."""
        if self._streams.pop(stream.ref, None) is not None:
            stream.forget_demand()

    def changed(self) -> None:
        """The demand may have changed."""
        if self._streams and self._timer is None:
            delay_s = report_interval_s(len(self._streams))
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._report)

    def _report(self) -> None:
        self._timer = None
        demand = self._demand()
        for stream in self._streams.values():
            stream.send_demand(demand)
