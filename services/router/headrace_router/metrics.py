"""The router's metrics.

A new gauge is one entry in `_gauges`. A new counter is one instrument and one method of RouterMetrics. The names are in
`headrace_common.telemetry.schema`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from headrace.inference.v1 import load_pb2
from headrace_common.callers.priority import Priority
from headrace_common.errors import Cancelled, HeadraceError
from headrace_common.latency.breakdown import (
    OWNED_BY_FIRST,
    OWNED_BY_SECOND,
    Breakdown,
    Owner,
)
from headrace_common.latency.parts import Sum, TimePart
from headrace_common.tasks import end_task
from headrace_common.telemetry import schema
from headrace_common.telemetry.metrics.instruments import (
    BucketCounts,
    Example,
    Histogram,
    HistogramPoint,
    HistogramSeries,
    Labels,
)
from headrace_common.telemetry.metrics.process import Metrics
from headrace_common.telemetry.schema_tables import METRICS
from headrace_frontend.admission.admission import Admission
from headrace_frontend.request.response_stream import ResponseStream
from headrace_frontend.running.runner import RequestCounter
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefix_cache.directory import PrefixCacheDirectory
from headrace_router.status.traffic import BucketSums, TrafficCounts
from headrace_router.tracing.attempt_record import Regret
from headrace_router.workers.directory import WorkerDirectory
from headrace_text.codec import TextCodec

_Read: TypeAlias = Callable[[], Mapping[str, float] | float]
"""Returns a value for each value of the label, or one value. Infinity means that nothing is reported."""


def _gauges(
    queue: PrefillQueue,
    admission: Admission,
    prefixes: PrefixCacheDirectory,
    workers: WorkerDirectory,
    codecs: Mapping[str, TextCodec],
) -> Mapping[str, _Read]:
    def depths() -> Mapping[str, float]:
        return {
            "prefill": queue.depth,
            "prefill tokens": queue.queued_tokens,
            "requests": admission.requests.pool.used,
            "slots": admission.used_slots,
            "waiting": admission.waiting,
            "tokens": admission.tokens.pool.used,
        }

    def limits() -> Mapping[str, float]:
        return {
            "prefill": queue.max_queued_tasks,
            "requests": admission.requests.pool.capacity,
            "slots": admission.slots,
            "tokens": admission.tokens.pool.capacity,
        }

    def differences() -> Mapping[str, float]:
        return {model: codec.encoder_differences for model, codec in codecs.items()}

    return {
        schema.METRIC_ENCODER_DIFFERENCES: differences,
        schema.METRIC_QUEUE_DEPTH: depths,
        schema.METRIC_QUEUE_LIMIT: limits,
        schema.METRIC_CLASS_QUEUE_DEPTH: queue.depths,
        schema.METRIC_CLASS_QUEUE_AGE: queue.oldest_ages_s,
        schema.METRIC_QUEUE_AGE: lambda: max(queue.oldest_ages_s().values()),
        schema.METRIC_QUEUE_WAIT: queue.wait_s,
        schema.METRIC_PREFIX_FAULTS: lambda: len(prefixes.faults),
        schema.METRIC_CLOCK_OFFSET: workers.clock_offsets_s,
    }


def _total(points: Mapping[Labels, HistogramPoint], *labels: str) -> float:
    """Of all series with these labels."""
    return sum(point.total for found, point in points.items() if {*labels} <= {*found})


def _bucket_sums(name: str, histogram: Histogram) -> BucketSums:
    """The buckets of all series together."""
    bounds = METRICS[name].buckets
    counts = [point.counts for point in histogram.points().values()]
    return BucketSums(bounds, list(map(sum, zip([0] * (len(bounds) + 1), *counts, strict=True))))


class RouterMetrics(RequestCounter):
    """Counts requests as they end, and samples the gauges every second while the metrics have readers.

    Owned by one event loop: the thread that exports must not read the queues.
    """

    def __init__(
        self,
        metrics: Metrics,
        queue: PrefillQueue,
        admission: Admission,
        prefixes: PrefixCacheDirectory,
        workers: WorkerDirectory,
        codecs: Mapping[str, TextCodec],
    ) -> None:
        store = metrics.store
        self._requests = store.counter(schema.METRIC_REQUESTS)
        self.count_migration = store.counter(schema.METRIC_MIGRATIONS).count
        """Counts a response that has started and needs another attempt, by the error's reason."""
        self.count_move = store.counter(schema.METRIC_MOVES).count
        """Counts a move, by "moved" or an error's reason, and by what asked for it."""
        self._fetches = store.counter(schema.METRIC_PREFIX_FETCHES)
        self._fetched_tokens = store.counter(schema.METRIC_PREFIX_FETCHED_TOKENS)
        self.count_dropped_spans = store.counter(schema.METRIC_TRACE_SPANS_DROPPED).add
        """Counts spans that the trace store dropped, by the bound. Any thread may call it."""
        self.count_refused = store.counter(schema.METRIC_CALLERS_REFUSED).add
        """Counts calls or connections of clients beyond the bounds on each caller, by the refusal."""
        self.count_early_refusal = store.counter(schema.METRIC_EARLY_REFUSALS).count
        """Counts a request of a model that was refused by its prediction, by the name of the bound."""
        self.count_pick = store.counter(schema.METRIC_PICKS).count
        """Counts a question of a gateway, by "picked" or an error's reason."""
        model = schema.ATTRIBUTE_GEN_AI_REQUEST_MODEL
        self._first_token = store.histogram(schema.METRIC_TIME_TO_FIRST_TOKEN)
        self._first_token_of_class = store.histogram(schema.METRIC_CLASS_FIRST_TOKEN)
        self.record_prediction = store.histogram(schema.METRIC_PREDICTED_FIRST_TOKEN).record
        """Records a predicted time to first token in seconds, of a model."""
        self._regrets = store.histogram(
            schema.METRIC_REGRET, model, schema.ATTRIBUTE_OTHER_DECISION
        )
        self._duration = store.histogram(schema.METRIC_REQUEST_DURATION)
        self._per_token = store.histogram(schema.METRIC_TIME_PER_OUTPUT_TOKEN)
        self._gaps = store.histogram(schema.METRIC_INTER_TOKEN_LATENCY)
        self._tokens = store.histogram(schema.METRIC_REQUEST_TOKENS)
        self._parts = store.histogram(
            schema.METRIC_LATENCY,
            model,
            schema.ATTRIBUTE_LATENCY_TOKEN,
            schema.ATTRIBUTE_LATENCY_PART,
        )
        self._parts_of: dict[tuple[str, Owner], dict[TimePart, HistogramSeries]] = {}
        self._answers_of: dict[tuple[str, Priority], Sequence[HistogramSeries]] = {}
        self._lock = store.lock
        self._exposed = store.histogram(schema.METRIC_TRANSFER_EXPOSED)
        self._prompt_tokens = store.counter(schema.METRIC_PROMPT_TOKENS)
        gauges = _gauges(queue, admission, prefixes, workers, codecs)
        self._gauges = [(store.gauge(name), read) for name, read in gauges.items()]
        self._task = metrics.start_sampling(self.sample)

    def prefix_fetched(self, worker_id: str, reason: str, token_count: int) -> None:
        """A fetch of a prefix for a decode worker has ended: `reason` is an error's, or empty."""
        self._fetches.add(1, worker_id, reason or "done")
        if not reason:
            self._fetched_tokens.add(token_count, worker_id)

    def count_failure(self, error: BaseException) -> None:
        if isinstance(error, HeadraceError):
            self._requests.count(error.reason)
        elif isinstance(error, asyncio.CancelledError):
            self._requests.count(Cancelled.reason)

    def traffic(self) -> TrafficCounts:
        """The sums of all models."""
        tokens = self._tokens.points()
        return TrafficCounts(
            ended=Counter({end: int(count) for (end,), count in self._requests.points().items()}),
            prompt_tokens=int(_total(tokens, "input")),
            answer_tokens=int(_total(tokens, "output")),
            first_tokens=_bucket_sums(schema.METRIC_CLASS_FIRST_TOKEN, self._first_token_of_class),
            gaps=_bucket_sums(schema.METRIC_INTER_TOKEN_LATENCY, self._gaps),
        )

    def token_gaps(self) -> BucketCounts:
        return self._gaps.local_counts()

    def count_answer(
        self,
        end_reason: str,
        answer: ResponseStream,
        arrival_ns: int,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        self._requests.count(end_reason)
        if not answer.first_token_ns:
            return
        model, example = answer.request.model, (answer.trace_id, time.time())
        prompt_tokens = len(answer.request.token_ids)
        first_ns, total_ns = answer.first_token_ns - arrival_ns, answer.last_token_ns - arrival_ns
        first_s, total_s, new_tokens = 1e-9 * first_ns, 1e-9 * total_ns, answer.new_tokens
        known = self._answers_of.get((model, priority)) or self._answers(model, priority)
        first, duration, per_token, gaps, prompts, answers = known
        with self._lock:
            first.add(first_s, example)
            duration.add(total_s, example)
            if new_tokens > 1:
                per_token.add((total_s - first_s) / (new_tokens - 1), example)
            if answer.gaps is not None:
                gaps.merge(answer.gaps)
            prompts.add(prompt_tokens)
            answers.add(new_tokens)
        if (usage := answer.usage) is not None:
            cached, transferred = usage.decode_cached_tokens, usage.transferred_tokens
            self._prompt_tokens.add(cached, model, "decode_cache")
            self._prompt_tokens.add(transferred, model, "transferred")
            self._prompt_tokens.add(max(0, prompt_tokens - cached - transferred), model, "computed")

    def _answers(self, model: str, priority: Priority) -> Sequence[HistogramSeries]:
        first = self._first_token_of_class.series(model, priority.label)
        others = [one.series(model) for one in (self._duration, self._per_token, self._gaps)]
        tokens = [self._tokens.series(model, one) for one in ("input", "output")]
        return self._answers_of.setdefault((model, priority), (first, *others, *tokens))

    def answered(self, model: str) -> load_pb2.RequestTotals:
        """Sums over the answered requests of a model, for planners."""
        duration = self._duration.points().get((model,))
        if duration is None:
            return load_pb2.RequestTotals()
        tokens, prompts = self._tokens.points(), self._prompt_tokens.points()
        first_us = round(1e6 * _total(self._first_token_of_class.points(), model))
        duration_us = round(1e6 * duration.total)
        return load_pb2.RequestTotals(
            request_count=sum(duration.counts),
            prompt_tokens=int(_total(tokens, model, "input")),
            cached_prompt_tokens=int(prompts.get((model, "decode_cache"), 0)),
            answer_tokens=int(_total(tokens, model, "output")),
            time_to_first_token_us=first_us,
            streaming_us=max(0, duration_us - first_us),
            duration_us=duration_us,
        )

    def count_latency(self, answer: ResponseStream, breakdown: Breakdown) -> None:
        """Counts the time to the first token of an answer that has started, and its parts, which add up to it."""
        model, example = answer.request.model, (answer.trace_id, time.time())
        self._first_token.record(1e-6 * breakdown.first.total_us, model, example=example)
        self._record_parts(breakdown.first, model, OWNED_BY_FIRST, example)
        if breakdown.second is not None:
            self._record_parts(breakdown.second, model, OWNED_BY_SECOND, example)
        if owner := breakdown.owner:
            exposed_s = 1e-6 * breakdown.exposed_us
            self._exposed.record(exposed_s, model, owner.value, example=example)

    def _record_parts(self, one: Sum, model: str, token: Owner, example: Example) -> None:
        known = self._parts_of.setdefault((model, token), {})
        for part in one.parts_us.keys() - known.keys():
            known[part] = self._parts.series(model, token.value, part.label)
        with self._lock:
            for part, duration_us in one.parts_us.items():
                known[part].add(1e-6 * duration_us, example)

    def count_regret(self, regret: Regret) -> None:
        """Counts a request with an estimate. It has no regret when the other decision would have been no better."""
        model = regret.other.worker.model
        self._regrets.record(max(0.0, regret.gained_s), model, regret.other.kind)

    def sample(self) -> None:
        """Sets every gauge to its current value."""
        for instrument, read in self._gauges:
            value = read()
            if isinstance(value, Mapping):
                instrument.replace(value)
            elif math.isfinite(value):
                instrument.set(value)
            else:
                instrument.clear()

    async def close(self) -> None:
        """Stops sampling."""
        await end_task(self._task)
