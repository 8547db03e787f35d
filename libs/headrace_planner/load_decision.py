"""The decision by load: adds or removes at most one worker of each role, from thresholds. Pure.

The rules are those of Dynamo's load-based planner: the prefill queue and its trend, the KV usage of decode workers, and
a grace after a decode worker was added. A worker is removed only if the load of the remaining ones stays below the
threshold of an addition. So no addition follows a removal.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace_planner.observation import Interval, PlannedRole, Reason, WorkerCounts
from headrace_planner.settings import LoadSettings


@dataclass(frozen=True, slots=True)
class LoadState:
    """What the next decision must know of earlier ones."""

    grace_intervals: int = 0
    """Further intervals in which no decode worker is removed."""


def decide_by_load(
    settings: LoadSettings, interval: Interval, state: LoadState
) -> tuple[tuple[Reason, ...], LoadState]:
    """The rules that ask for another number of workers: at most one a role, and one worker more or less.

    The interval has at least one sample, and its numbers of workers did not change.
    """
    prefill = _prefill_rule(settings, interval)
    decode = _decode_rule(settings, interval, state)
    grace = max(0, state.grace_intervals - 1)
    if decode is not None and decode.count > interval.counts.decode:
        grace = settings.decode_grace_intervals
    return tuple(reason for reason in (prefill, decode) if reason is not None), LoadState(grace)


def apply_reasons(counts: WorkerCounts, reasons: tuple[Reason, ...]) -> WorkerCounts:
    """The counts that the reasons ask for."""
    for reason in reasons:
        counts = counts.changed(reason.role, reason.count)
    return counts


def _prefill_rule(settings: LoadSettings, interval: Interval) -> Reason | None:
    weight = settings.low_prompt_weight
    queues = [sample.queue_per_worker(weight) for sample in interval.samples]
    mean = sum(queues) / len(queues)
    classes = _mean_counts(interval)
    note = f" Low prompts count {weight:g}." if weight < 1 and classes["low_prompts"] else ""
    expected = max(0.0, queues[-1] + (queues[-1] - queues[0]) * settings.trend_intervals)
    count = interval.counts.prefill
    if mean > settings.prefill_up_queue and (
        expected > settings.prefill_up_queue or queues[-1] > settings.prefill_up_queue
    ):
        return Reason(
            PlannedRole.PREFILL,
            "queue above threshold",
            count + 1,
            {
                "queue": mean,
                "expected_queue": expected,
                "threshold": settings.prefill_up_queue,
                **classes,
            },
            f"{mean:.2f} prompts wait for each prefill worker, more than {settings.prefill_up_queue:g}, "
            f"and the trend leads to {expected:.2f}.{note}",
        )
    after = _load_without_one(mean, count)
    if count > 1 and mean < settings.prefill_down_queue and after < settings.prefill_up_queue:
        return Reason(
            PlannedRole.PREFILL,
            "queue below threshold",
            count - 1,
            {
                "queue": mean,
                "queue_after": after,
                "threshold": settings.prefill_down_queue,
                **classes,
            },
            f"{mean:.2f} prompts wait for each prefill worker, fewer than {settings.prefill_down_queue:g}. "
            f"With one worker less it is {after:.2f}.{note}",
        )
    return None


def _mean_counts(interval: Interval) -> dict[str, float]:
    """The mean numbers of queued prompts of the classes high and low."""
    counts = [sample.queued_by_class for sample in interval.samples]
    return {
        "high_prompts": sum(one.high for one in counts) / len(counts),
        "low_prompts": sum(one.low for one in counts) / len(counts),
    }


def _decode_rule(settings: LoadSettings, interval: Interval, state: LoadState) -> Reason | None:
    loads = [sample.decode_load for sample in interval.samples]
    mean = sum(loads) / len(loads)
    count = interval.counts.decode
    if mean > settings.decode_up_load:
        return Reason(
            PlannedRole.DECODE,
            "load above threshold",
            count + 1,
            {"load": mean, "threshold": settings.decode_up_load},
            f"Decode workers have a mean load of {mean:.2f}, more than {settings.decode_up_load:g}.",
        )
    after = _load_without_one(mean, count)
    if (
        count > 1
        and state.grace_intervals == 0
        and mean < settings.decode_down_load
        and after < settings.decode_up_load
    ):
        return Reason(
            PlannedRole.DECODE,
            "load below threshold",
            count - 1,
            {"load": mean, "load_after": after, "threshold": settings.decode_down_load},
            f"Decode workers have a mean load of {mean:.2f}, less than {settings.decode_down_load:g}. "
            f"With one worker less it is {after:.2f}.",
        )
    return None


def _load_without_one(load: float, count: int) -> float:
    return load * count / (count - 1) if count > 1 else load
