"""What the planner's core observes, from what routers and workers report. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.inference.v1 import load_pb2
from headrace.worker.v1 import worker_pb2
from headrace_planner.observation import ClassCounts, DecodeLoad, LoadSample, RequestStatistics

_US = 1e-6
_SUMS = tuple(field.name for field in load_pb2.RequestTotals.DESCRIPTOR.fields)


@dataclass(frozen=True, slots=True)
class DecodeReading:
    """The status of a decode worker, and its slots."""

    status: worker_pb2.WatchStatusResponse
    max_num_seqs: int


Totals = Mapping[str, load_pb2.RequestTotals]
"""Sums over the answered requests of one model, by router incarnation."""


def load_sample(
    routers: Iterable[load_pb2.ModelLoad],
    prefill: Iterable[worker_pb2.WatchStatusResponse],
    decode: Iterable[DecodeReading],
) -> LoadSample:
    """The load of one model. Workers that drain are left out, because they take no requests."""
    loads = tuple(routers)
    pulling = [status for status in prefill if _serves(status)]
    queued = sum(load.queued_prompts for load in loads)
    queued += sum(status.waiting_requests for status in pulling)
    return LoadSample(
        prefill_workers=len(pulling),
        queued_prompts=queued,
        decode=_decode_loads(
            [reading for reading in decode if _serves(reading.status)],
            sum(load.waiting_requests for load in loads),
        ),
        queued_by_class=ClassCounts(
            high=sum(load.queued_by_class.high for load in loads),
            normal=sum(load.queued_by_class.normal for load in loads),
            low=sum(load.queued_by_class.low for load in loads),
        ),
    )


def request_statistics(before: Totals, after: Totals) -> RequestStatistics | None:
    """The requests that were answered between two readings, or None without any.

    A router that the first reading lacks counts from its next reading on. A router with smaller sums has started again.
    """
    sums = dict.fromkeys(_SUMS, 0)
    for router, totals in after.items():
        first = before.get(router)
        if first is None:
            continue
        restarted = totals.request_count < first.request_count
        for name in _SUMS:
            sums[name] += getattr(totals, name) - (0 if restarted else getattr(first, name))
    count = sums["request_count"]
    if count <= 0:
        return None
    gaps = sums["answer_tokens"] - count
    prompt_tokens = sums["prompt_tokens"]
    return RequestStatistics(
        request_count=count,
        prompt_tokens=prompt_tokens / count,
        answer_tokens=sums["answer_tokens"] / count,
        ttft_s=_US * sums["time_to_first_token_us"] / count,
        itl_s=_US * sums["streaming_us"] / gaps if gaps > 0 else 0.0,
        duration_s=_US * sums["duration_us"] / count,
        cached_share=min(1.0, sums["cached_prompt_tokens"] / max(1, prompt_tokens)),
    )


def _decode_loads(readings: Sequence[DecodeReading], waiting: int) -> tuple[DecodeLoad, ...]:
    """The loads, with the requests that wait on routers spread evenly: any worker may get them."""
    share, rest = divmod(waiting, max(1, len(readings)))
    return tuple(
        _decode_load(reading, share + (index < rest)) for index, reading in enumerate(readings)
    )


def _decode_load(reading: DecodeReading, waiting: int) -> DecodeLoad:
    status = reading.status
    held = max(status.used_blocks, status.reserved_blocks + status.quarantined_blocks)
    return DecodeLoad(
        kv_usage=_share(held, status.total_blocks),
        waiting_requests=status.waiting_requests + waiting,
        slot_usage=_share(status.running_requests + status.waiting_requests, reading.max_num_seqs),
    )


def _share(part: int, whole: int) -> float:
    return min(1.0, part / whole) if whole else 0.0


def _serves(status: worker_pb2.WatchStatusResponse) -> bool:
    return status.state == worker_pb2.WatchStatusResponse.STATE_SERVING
