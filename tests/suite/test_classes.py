"""Requests of the three classes at once, on services without room for all: their order, their shares, and refusals."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from headrace.inference.v1 import inference_pb2, load_pb2, load_pb2_grpc, trace_pb2
from headrace_cli.commands.policy import set_policy
from headrace_common.callers.priority import Priority
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import FirstTokenLate, PermissionDenied
from headrace_common.telemetry import schema
from tests.sim_clock import ClockController
from tests.suite.deployment import (
    Outcome,
    Suite,
    advance_until_done,
    greedy,
    prompt_of,
    stepped_suite,
)
from tests.waiting import until

PROMPT_TOKENS = 50
DEADLINE_S = 300.0
RUN_S = 200.0
# The oldest prompt in the queue is this old when a request with the shorter target comes.
AGE_S = 0.5
TARGET_S = 0.1
HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW
FULL_QUEUE = (
    # One prompt at a time, 0.05 s each.
    ("prefill", "max_num_seqs", "1"),
    ("prefill", "model", "sim:prefill_s_per_token=0.001"),
    ("decode", "max_num_seqs", "128"),
    ("decode", "num_gpu_blocks_override", "1000"),
    ("decode", "model", "sim:decode_step_s=0.002"),
)
SLOTS = 8
FULL_SLOTS = (
    ("prefill", "model", "sim:prefill_s_per_token=0.0001"),
    ("decode", "max_num_seqs", str(SLOTS)),
    ("decode", "num_gpu_blocks_override", "1000"),
    ("decode", "model", "sim:decode_step_s=0.01"),
    ("router", "admission_wait_s", "250"),
)


@dataclass(frozen=True, slots=True)
class Sent:
    """A request of a class, and its answer."""

    priority: Priority
    prompt: Sequence[int]
    outcome: Outcome


def request_of(
    priority: Priority, number: int, answer_tokens: int, ttft_target: Duration | None = None
) -> inference_pb2.GenerateRequest:
    request = greedy(prompt_of(PROMPT_TOKENS, number), answer_tokens)
    request.priority = priority.to_proto()
    if ttft_target is not None:
        request.ttft_target.CopyFrom(ttft_target)
    return request


def send(
    it: Suite, counts: dict[Priority, int], answer_tokens: int, first_number: int
) -> list[asyncio.Task[Sent]]:
    """Sends requests of each class, in turns."""

    async def ask(priority: Priority, number: int) -> Sent:
        request = request_of(priority, number, answer_tokens)
        return Sent(priority, request.tokens.ids, await it.ask(request, DEADLINE_S))

    turns = sorted(
        (index / count, priority) for priority, count in counts.items() for index in range(count)
    )
    return [
        asyncio.create_task(ask(priority, number))
        for number, (_, priority) in enumerate(turns, start=first_number)
    ]


async def open_high_class(it: Suite) -> None:
    """Lets all callers use the high class, and waits until the router follows."""
    await set_policy(it.deployment.registry, ["tenant_priorities.default=high"])

    async def followed() -> bool:
        try:
            await it.operator.explain(request_of(HIGH, 0, 1))
        except PermissionDenied:
            return False
        return True

    await until(followed, interval_s=0.05)


async def load_of(it: Suite) -> load_pb2.ModelLoad:
    stub = load_pb2_grpc.LoadServiceStub(it.internal_channel)
    (model,) = (await stub.GetLoad(load_pb2.GetLoadRequest(), timeout=10.0)).models
    return model


async def handed_out(it: Suite, sent: Sequence[Sent]) -> list[Priority]:
    """The classes of the requests in the order in which a prefill worker got their prompts, by the router's clock."""

    def span_of(trace: trace_pb2.Trace) -> trace_pb2.Span:
        (span,) = (one for one in trace.spans if one.name == schema.SPAN_QUEUE)
        return span

    ends: list[tuple[int, Priority]] = []
    for one in sent:
        span = span_of(await it.trace(one.outcome.trace_id))
        ends.append((span.start_time.ToNanoseconds() + span.duration.ToNanoseconds(), one.priority))
    return [priority for _, priority in sorted(ends, key=lambda end: end[0])]


def mean_place(order: Sequence[Priority], priority: Priority) -> float:
    places = [place for place, one in enumerate(order) if one is priority]
    return sum(places) / len(places)


def while_all_wait(order: Sequence[Priority]) -> Sequence[Priority]:
    """The order up to the first end of a class."""
    last = {priority: place for place, priority in enumerate(order)}
    return order[: min(last.values()) + 1]


async def answered(
    it: Suite, clock: ClockController, tasks: Sequence[asyncio.Task[Sent]]
) -> list[Sent]:
    """All answers, which must be right."""
    sent = await advance_until_done(clock, *tasks, timeout_s=RUN_S)
    for one in sent:
        count = len(one.outcome.token_ids)
        assert one.outcome.token_ids == it.expected(one.prompt, count)
    return sent


async def test_classes_share_a_full_prefill_queue_by_weight_and_late_requests_are_refused(
    tmp_path: Path,
) -> None:
    counts = {HIGH: 40, NORMAL: 10, LOW: 3}
    async with stepped_suite(tmp_path, FULL_QUEUE) as (it, clock):
        await open_high_class(it)
        # It occupies the prefill worker until the clock advances.
        first = send(it, {NORMAL: 1}, 2, first_number=1_000)
        await it.wait_running("prefill-0")
        tasks = send(it, counts, 2, first_number=2_000)

        async def all_queued() -> bool:
            return (await load_of(it)).queued_prompts == len(tasks)

        await until(all_queued, 60.0, lambda: str([task for task in tasks if task.done()]), 0.05)
        # The router counts the age of a prompt by a real clock.
        await asyncio.sleep(AGE_S)
        for number, priority in enumerate(Priority):
            late = request_of(priority, 3_000 + number, 2, duration_from_seconds(TARGET_S))
            with pytest.raises(FirstTokenLate) as caught:
                await it.ask(late, DEADLINE_S)
            error = caught.value
            predicted_s = float(error.metadata["predicted_s"])
            assert error.metadata["bound"] == "ttft_target"
            assert predicted_s > AGE_S / 2
            assert error.retry_after_s == pytest.approx(predicted_s - TARGET_S, abs=0.01)
        # Refusals have not joined the queue.
        assert await all_queued()
        sent = await answered(it, clock, tasks)
        await answered(it, clock, first)
        order = await handed_out(it, sent)
        assert Counter(order) == counts
        assert mean_place(order, HIGH) < mean_place(order, NORMAL)
        # The documented bound: between two tasks of a class, another one gets at most one task, and as many more as the
        # ratio of the weights.
        contended = while_all_wait(order)
        assert contended.count(LOW) == counts[LOW]
        places = [place for place, one in enumerate(contended) if one is LOW]
        for before, after in zip([-1, *places], places, strict=False):
            between = Counter(contended[before + 1 : after])
            assert between[HIGH] <= 1 + HIGH.weight // LOW.weight, order
            assert between[NORMAL] <= 1 + NORMAL.weight // LOW.weight, order
        # Low prompts do not get more than their share either.
        assert contended.count(HIGH) >= (counts[LOW] - 1) * HIGH.weight // LOW.weight - 1, order
        # Without a queue, the same target is met again.
        (again,) = await advance_until_done(
            clock, it.ask(request_of(LOW, 4_000, 2, duration_from_seconds(60.0)), DEADLINE_S)
        )
        assert again.token_ids == it.expected(prompt_of(PROMPT_TOKENS, 4_000), 2)


async def test_classes_share_full_decode_slots_by_weight(tmp_path: Path) -> None:
    counts = {HIGH: 16, NORMAL: 16, LOW: 16}
    async with stepped_suite(tmp_path, FULL_SLOTS) as (it, clock):
        await open_high_class(it)
        first = send(it, {LOW: SLOTS}, 40, first_number=1_000)

        async def waiting(count: int) -> bool:
            return (await load_of(it)).waiting_requests == count

        await until(lambda: _holds(it, SLOTS), 60.0, "every slot taken", 0.05)
        tasks = send(it, counts, 20, first_number=2_000)
        await until(lambda: waiting(len(tasks)), 60.0, "all wait for a slot", 0.05)
        await answered(it, clock, first)
        sent = await answered(it, clock, tasks)
        order = await handed_out(it, sent)
        assert Counter(order) == counts
        assert mean_place(order, HIGH) < mean_place(order, NORMAL) < mean_place(order, LOW)
        # A class that holds no slot gets the next free one. So with eight slots, low requests have at least one of
        # eight while all wait.
        contended = while_all_wait(order)
        assert contended.count(LOW) >= len(contended) // SLOTS - 1, order
        assert contended.count(HIGH) > len(contended) / 2, order


async def _holds(it: Suite, count: int) -> bool:
    status = await it.status("decode-0")
    return status.running_requests + status.waiting_requests >= count
