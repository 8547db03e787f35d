"""Metrics of the workers of one process, sampled every second."""

from __future__ import annotations

import asyncio
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from headrace.worker.v1 import time_model_pb2, worker_pb2
from headrace_common.durations import seconds_from_duration
from headrace_common.tasks import end_task
from headrace_common.telemetry import schema
from headrace_common.telemetry.metrics.instruments import Gauge
from headrace_common.telemetry.metrics.process import Metrics
from headrace_common.time_model.model import TimeModel
from headrace_kv.messages import SendReport
from headrace_kv.prefix.events import Tier
from headrace_kv.receive.receiver import Receiver
from headrace_kv.tiers.load_times import LoadTimes
from headrace_kv.tiers.promises import NO_PROMISES, PromiseCounts

_NAMES: Final = {
    Tier.HOST: schema.ATTRIBUTE_HOST_TOKENS,
    Tier.DISK: schema.ATTRIBUTE_DISK_TOKENS,
    Tier.REMOTE: schema.ATTRIBUTE_REMOTE_TOKENS,
}


def tier_attributes(tier_tokens: Mapping[Tier, int]) -> dict[str, int]:
    """An attribute for each tier below KV memory with tokens. See PrefillOutcome.tier_tokens."""
    return {_NAMES[tier]: count for tier, count in tier_tokens.items() if count and tier in _NAMES}


_DONE: Final = "done"

Status = Callable[[], worker_pb2.WatchStatusResponse]


@dataclass(slots=True, kw_only=True)
class Reporting:
    """What is sampled of one worker.

    `reserves_blocks` and `incoming` are for decode workers; prefill workers use their blocks as a cache only.
    `tier_loads` counts the engine's loads from lower tiers, and `stored_blocks` what it stores there.
    `times` has the errors of its time model, `promises` what it keeps for clients, `device_time` what its time is
    spent on.
    """

    status: Status
    reserves_blocks: bool
    incoming: Receiver | None = None
    tier_loads: LoadTimes = field(default_factory=LoadTimes)
    stored_blocks: Callable[[], Mapping[Tier, int]] = dict
    times: Callable[[], TimeModel] = TimeModel
    promises: Callable[[], PromiseCounts] = lambda: NO_PROMISES
    device_time: Callable[[], time_model_pb2.DeviceTime] = time_model_pb2.DeviceTime
    _counted: dict[str, Counts[str]] = field(default_factory=dict, init=False)

    def uncounted(self, name: str, **counts: int) -> Counts[str]:
        """How much of these growing counts is not counted yet. It is now."""
        before = self._counted.get(name, Counts())
        # Idle time may be an estimate, and be less in the next report.
        self._counted[name] = before | Counts(counts)
        return self._counted[name] - before


class WorkerMetrics:
    """Samples the status of every reporting worker. One event loop owns it; the export thread only exports.

    The process has each instrument once; `headrace.worker_id` distinguishes its workers.
    """

    def __init__(self, metrics: Metrics) -> None:
        store, worker = metrics.store, schema.ATTRIBUTE_WORKER_ID
        self._transfers = store.counter(schema.METRIC_TRANSFERS)
        self._wasted_tokens = store.counter(schema.METRIC_WASTED_TOKENS)
        self._bytes = store.counter(schema.METRIC_TRANSFER_BYTES)
        link = (schema.ATTRIBUTE_LINK_KIND, schema.ATTRIBUTE_TRANSPORT)
        pair = (worker, schema.ATTRIBUTE_DECODE_WORKER_ID, *link)
        self._link_bytes = store.counter(schema.METRIC_LINK_BYTES, *pair)
        self._link_time = store.counter(schema.METRIC_LINK_TIME, *pair)
        self._link_rate = store.histogram(schema.METRIC_LINK_RATE, *link)
        self._ticket_refusals = store.counter(schema.METRIC_TICKET_REFUSALS)
        self._callers_refused = store.counter(schema.METRIC_CALLERS_REFUSED)
        self._prefix_fetches = store.counter(schema.METRIC_PREFIX_FETCHES)
        self._fetched_tokens = store.counter(schema.METRIC_PREFIX_FETCHED_TOKENS)
        self._comparisons = store.counter(
            schema.METRIC_CANARY_COMPARISONS,
            worker,
            schema.ATTRIBUTE_PREFILL_WORKER_ID,
            schema.ATTRIBUTE_CANARY_OUTCOME,
            schema.ATTRIBUTE_CANARY_LAYER,
            schema.ATTRIBUTE_CANARY_HEAD,
        )
        self._active = store.gauge(schema.METRIC_TRANSFERS_ACTIVE)
        self._requests = store.gauge(schema.METRIC_WORKER_REQUESTS)
        self._device_time = store.counter(schema.METRIC_DEVICE_TIME)
        self._stall = store.gauge(schema.METRIC_WORKER_STALL)
        self._blocks_used = store.gauge(schema.METRIC_BLOCKS_USED)
        self._blocks_total = store.gauge(schema.METRIC_BLOCKS_TOTAL)
        self._blocks_free = store.gauge(schema.METRIC_BLOCKS_FREE)
        self._blocks_reserved = store.gauge(schema.METRIC_BLOCKS_RESERVED)
        self._blocks_quarantined = store.gauge(schema.METRIC_BLOCKS_QUARANTINED)
        self._tier_blocks = store.counter(schema.METRIC_TIER_LOADED_BLOCKS)
        self._tier_failed = store.counter(schema.METRIC_TIER_FAILED_BLOCKS)
        self._tier_stored = store.counter(schema.METRIC_TIER_STORED_BLOCKS)
        self._states = store.gauge(
            schema.METRIC_TRANSFER_STATES, worker, schema.ATTRIBUTE_TRANSFER_STATE
        )
        self._leases = store.gauge(schema.METRIC_WRITE_LEASES)
        self._time_errors = store.gauge(schema.METRIC_TIME_ERROR)
        self._promises = store.gauge(schema.METRIC_PROMISES)
        self._promised_blocks = store.gauge(schema.METRIC_PROMISED_BLOCKS)
        self._broken_promises = store.counter(schema.METRIC_BROKEN_PROMISES)
        self._gauges = [one for one in vars(self).values() if isinstance(one, Gauge)]
        self._metrics = metrics
        self._workers: dict[str, Reporting] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def reporting(self, worker_id: str, worker: Reporting) -> Iterator[None]:
        """Samples a worker while the context lasts, and removes its gauges at its end."""
        self._workers[worker_id] = worker
        if self._task is None:
            self._task = self._metrics.start_sampling(self.sample)
        try:
            yield
        finally:
            del self._workers[worker_id]
            for gauge in self._gauges:
                gauge.remove(worker_id)

    def transfer_ended(
        self,
        worker_id: str,
        decode_worker_id: str,
        reason: str,
        payload_bytes: int,
        reports: Sequence[SendReport] = (),
        wasted_tokens: int = 0,
    ) -> None:
        """A worker has ended sending: `reason` is an error's, or empty. `reports` are those of its ranks.

        `wasted_tokens`: those of a prompt that was computed in vain.
        """
        self._transfers.add(1, worker_id, reason or _DONE)
        if wasted_tokens:
            self._wasted_tokens.add(wasted_tokens, worker_id, reason)
        self._bytes.add(payload_bytes, worker_id)
        for report in reports:
            for link in report.links:
                if link.payload_bytes:
                    labels = (report.kind_of(link), link.transport)
                    pair = (worker_id, decode_worker_id, *labels)
                    self._link_bytes.add(link.payload_bytes, *pair)
                    self._link_time.add(1e-9 * link.moving_ns, *pair)
                    bytes_per_s = 1e9 * link.payload_bytes / max(1, link.moving_ns)
                    self._link_rate.record(bytes_per_s, *labels)

    def prefix_fetched(self, worker_id: str, reason: str, token_count: int) -> None:
        """A prefill worker's fetch of a prefix has ended: `reason` is an error's, or empty."""
        self._prefix_fetches.add(1, worker_id, reason or _DONE)
        if not reason:
            self._fetched_tokens.add(token_count, worker_id)

    def blocks_compared(
        self,
        worker_id: str,
        prefill_worker_id: str,
        outcome: str,
        layer: int | None = None,
        head: int | None = None,
    ) -> None:
        """A decode worker has compared KV of a prefill worker. `layer` and `head` are the first that differ."""
        place = ("", "") if layer is None else (str(layer), str(head))
        self._comparisons.add(1, worker_id, prefill_worker_id, outcome, *place)

    def ticket_refused(self, worker_id: str, part: str) -> None:
        """A worker has refused a ticket. `part` is the part of the ticket."""
        self._ticket_refusals.add(1, worker_id, part)

    def count_refused(self, refusal: str, count: int) -> None:
        """Clients of this process exceeded the bounds on each caller."""
        self._callers_refused.add(count, refusal)

    def sample(self) -> None:
        """Sets the gauges of every reporting worker from its current status."""
        for worker_id, worker in self._workers.items():
            status = worker.status()
            self._set_gauges(worker_id, status, reserves_blocks=worker.reserves_blocks)
            if worker.incoming is not None:
                for state, count in worker.incoming.count_states().items():
                    self._states.set(count, worker_id, state)
                self._leases.set(worker.incoming.lease_count, worker_id)
            self._set_time_errors(worker_id, worker.times())
            for counter, blocks in (
                (self._tier_blocks, worker.tier_loads.loaded_blocks()),
                (self._tier_failed, worker.tier_loads.failed_blocks()),
                (self._tier_stored, worker.stored_blocks()),
            ):
                # KV memory itself is no tier here.
                counts = {
                    tier.name.lower(): count
                    for tier, count in blocks.items()
                    if tier != Tier.DEVICE
                }
                new = worker.uncounted(counter.name, **counts)
                for tier in counts:
                    counter.add(new[tier], worker_id, tier)
            self._count_promises(worker_id, worker)
            spent = worker.device_time()
            new_us = worker.uncounted(
                "device_time",
                idle=spent.idle_us,
                computing=spent.computing_us,
                billed=spent.billed_us,
            )
            for state, us in new_us.items():
                self._device_time.add(1e-6 * us, worker_id, state)

    def _count_promises(self, worker_id: str, worker: Reporting) -> None:
        now = worker.promises()
        if not now.blocks:
            # Its engine has no tiers, or has not reported them.
            return
        self._promises.set(now.promises, worker_id)
        for tier, count in now.blocks.items():
            self._promised_blocks.set(count, worker_id, tier.name.lower())
        new = worker.uncounted("promises", broken=now.broken)
        self._broken_promises.add(new["broken"], worker_id)

    def _set_time_errors(self, worker_id: str, model: TimeModel) -> None:
        steps, handovers = model.steps, model.handovers
        if steps.prompt_steps + steps.answer_steps > 1:
            self._time_errors.set(steps.error_p50, worker_id, "step", "p50")
            self._time_errors.set(steps.error_p90, worker_id, "step", "p90")
        if handovers.count > 1:
            self._time_errors.set(handovers.error_p50, worker_id, "handover", "p50")
            self._time_errors.set(handovers.error_p90, worker_id, "handover", "p90")

    async def close(self) -> None:
        """Stops sampling."""
        await end_task(self._task)

    def _set_gauges(
        self, worker_id: str, status: worker_pb2.WatchStatusResponse, *, reserves_blocks: bool
    ) -> None:
        self._requests.set(status.running_requests, worker_id, "running")
        self._requests.set(status.waiting_requests, worker_id, "waiting")
        self._active.set(status.active_transfers, worker_id)
        self._stall.set(seconds_from_duration(status.stall.age), worker_id)
        self._blocks_used.set(status.used_blocks, worker_id)
        if reserves_blocks:
            unavailable = status.reserved_blocks + status.quarantined_blocks
            self._blocks_total.set(status.total_blocks, worker_id)
            self._blocks_free.set(max(0, status.total_blocks - unavailable), worker_id)
            self._blocks_reserved.set(status.reserved_blocks, worker_id)
            self._blocks_quarantined.set(status.quarantined_blocks, worker_id)
