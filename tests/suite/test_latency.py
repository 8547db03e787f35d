"""The parts of the time to the first token add up, for requests of every kind, in traces that a collector receives."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from headrace.inference.v1 import first_token_pb2, inference_pb2
from headrace_client import Client
from headrace_common.errors import HeadraceError
from headrace_common.latency.parts import Sum, TimePart, sum_from_proto
from headrace_common.telemetry import schema
from headrace_common.telemetry.latency import PART_ATTRIBUTES
from tests.collector import SpanReceiver, receiving_spans
from tests.ports import free_port
from tests.suite.deployment import DEADLINE_S, Suite, greedy, prompt_of, suite
from tests.waiting import until

REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
LOCAL = inference_pb2.PREFILL_PLACEMENT_LOCAL
BY_DECODE = first_token_pb2.FIRST_TOKEN_POLICY_DECODE
BY_PREFILL = first_token_pb2.FIRST_TOKEN_POLICY_PREFILL
BY_HIDDEN_STATE = first_token_pb2.FIRST_TOKEN_POLICY_HIDDEN
KINDS = ((REMOTE, BY_DECODE), (REMOTE, BY_PREFILL), (REMOTE, BY_HIDDEN_STATE), (LOCAL, BY_DECODE))
MODEL = "sim:layers=3,layer_s=0.002"
# A step for three layers takes this long at least.
LAYERS_US = 6_000
REQUESTS = 100
HTTP_REQUESTS = 16
MOVED_REQUESTS = 8
CANCELLED_REQUESTS = 4
AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Measured:
    """What the client measured, and the sum that it got."""

    trace_id: str
    ttft_us: int
    latency: Sum
    transferred_tokens: int


async def measure(client: Client, request: inference_pb2.GenerateRequest) -> Measured:
    request.include_latency = True
    start_s, first_s, trace_id = time.monotonic(), 0.0, ""
    last = inference_pb2.GenerateResponse()
    async for last in client.stream(request, DEADLINE_S):
        trace_id = trace_id or last.trace_id
        if last.token_ids and not first_s:
            first_s = time.monotonic()
    return Measured(
        trace_id,
        math.ceil(1e6 * (first_s - start_s)),
        sum_from_proto(last.timing.latency.first_token),
        last.usage.transferred_tokens,
    )


async def measure_many(
    client: Client, requests: Iterable[inference_pb2.GenerateRequest]
) -> list[Measured]:
    """With few at once, as the machine has few cores."""
    rest = iter(requests)

    async def work() -> list[Measured]:
        return [await measure(client, request) for request in rest]

    found = await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return [one for some in found for one in some]


def attribute(span: Span, name: str) -> Any:
    for one in span.attributes:
        if one.key == name:
            return getattr(one.value, str(one.value.WhichOneof("value")))
    return None


def sum_of(span: Span) -> Sum:
    """The sum in the attributes of a span."""
    parts = {
        part: value
        for part, name in PART_ATTRIBUTES.items()
        if (value := attribute(span, name)) is not None
    }
    return Sum(attribute(span, schema.ATTRIBUTE_LATENCY_TOTAL_US), parts)


def check_parents(spans: list[Span]) -> Span:
    """One root and no orphan. Returns the root."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans), "a span came twice"
    (root,) = (span for span in spans if not span.parent_span_id)
    assert root.name == schema.SPAN_REQUEST
    orphans = [s.name for s in spans if s.parent_span_id and s.parent_span_id not in by_id]
    assert orphans == []
    return root


def check_trace(spans: list[Span]) -> Span:
    """A whole trace: one root with a sum, no orphan, and links for attempts after others. Returns the root."""
    root = check_parents(spans)
    found = sum_of(root)
    assert sum(found.parts_us.values()) == found.total_us
    for span in spans:
        if span.name == schema.SPAN_SECOND_TOKEN:
            second = sum_of(span)
            assert sum(second.parts_us.values()) == second.total_us > 0
    attempts = sorted(
        (span for span in spans if span.name == schema.SPAN_ATTEMPT),
        key=lambda span: span.start_time_unix_nano,
    )
    for before, after in itertools.pairwise(attempts):
        assert [link.span_id for link in after.links] == [before.span_id]
    return root


async def received(
    receiver: SpanReceiver, trace_id: str, complete: Callable[[list[Span]], bool]
) -> list[Span]:
    def arrived() -> bool:
        return complete(receiver.traces.get(trace_id, []))

    await until(arrived, 10.0, lambda: str([s.name for s in receiver.traces.get(trace_id, [])]))
    return receiver.traces[trace_id]


def has_root(spans: list[Span]) -> bool:
    """Whether the root has arrived, with the spans of the workers of all its attempts, and every span's parent."""
    names = Counter(span.name for span in spans)
    attempts = [span for span in spans if span.name == schema.SPAN_ATTEMPT]
    prefills = sum(
        attribute(span, schema.ATTRIBUTE_PREFILL_WORKER_ID) is not None for span in attempts
    )
    roots = sum(not span.parent_span_id for span in spans)
    return (
        roots == 1
        and {span.parent_span_id for span in spans} - {b""} <= {span.span_id for span in spans}
        and names[schema.SPAN_DECODE] >= len(attempts)
        and names[schema.SPAN_PREFILL] >= prefills
    )


@asynccontextmanager
async def deployed(
    folder: Path, *more: tuple[str, str, str]
) -> AsyncIterator[tuple[Suite, SpanReceiver]]:
    """A deployment of which the test receives all spans."""
    async with receiving_spans() as (receiver, endpoint):
        settings = (
            ("prefill", "model", MODEL),
            ("decode", "model", MODEL),
            ("decode", "drain_grace_s", "0.3"),
            *((role, "otlp_endpoint", endpoint) for role in ("router", "prefill", "decode")),
            *more,
        )
        async with suite(
            folder, decode_count=2, prefill_tensor_parallel=2, settings=settings
        ) as it:
            yield it, receiver


@pytest.mark.core
async def test_requests_of_every_kind_have_complete_sums(tmp_path: Path) -> None:
    async with deployed(tmp_path) as (it, receiver), Client(it.deployment.router) as client:
        # The first transfers connect.
        await measure_many(client, requests_of(8, 1_000))
        measured = await measure_many(client, requests_of(REQUESTS, 0))
        assert len(measured) == REQUESTS
        check_sums(measured)
        await check_bytes(receiver, measured)


async def test_requests_over_http_and_those_that_end_early_have_complete_sums(
    tmp_path: Path,
) -> None:
    http = f"127.0.0.1:{free_port()}"
    async with deployed(tmp_path, ("router", "http_listen", http)) as (it, receiver):
        await check_http(it, receiver, http)
        await check_migrated(it, receiver)
        await check_cancelled(it, receiver)


def requests_of(count: int, seed: int) -> list[inference_pb2.GenerateRequest]:
    found = []
    for number in range(count):
        placement, policy = KINDS[number % len(KINDS)]
        length = 40 + 97 * (number % 5)
        request = greedy(prompt_of(length, seed + number), 1 + number % 4, placement)
        request.first_token = policy
        found.append(request)
    return found


def check_sums(measured: Sequence[Measured]) -> None:
    """Each sum is complete and lies within the time that the client has seen.

    A busy machine may stop a process between two steps, so a part of some sums remains without a step.
    """
    for one in measured:
        assert sum(one.latency.parts_us.values()) == one.latency.total_us
        assert one.latency[TimePart.PREFILL] > 0, one
        assert LAYERS_US <= one.latency.total_us <= one.ttft_us, one
    shares = [one.latency[TimePart.UNACCOUNTED] / one.latency.total_us for one in measured]
    assert statistics.median(shares) <= 0.02, shares


async def check_bytes(receiver: SpanReceiver, measured: list[Measured]) -> None:
    """Every trace is whole, and prefill has sent what decode's ledger counted."""
    transfers = 0
    for one in measured:
        spans = await received(receiver, one.trace_id, has_root)
        root = check_trace(spans)
        assert sum_of(root).total_us <= one.latency.total_us
        methods = {s.name: attribute(s, schema.ATTRIBUTE_RPC_METHOD) for s in spans}
        assert methods[schema.SPAN_REQUEST].endswith("InferenceService/Generate")
        assert methods[schema.SPAN_DECODE].endswith("DecodeService/Link")
        for wait in (span for span in spans if span.name == schema.SPAN_DECODE_KV_WAIT):
            (sent,) = (span for span in spans if span.name == schema.SPAN_PREFILL)
            payload = attribute(wait, schema.ATTRIBUTE_PAYLOAD_BYTES)
            if payload is None:
                # The answer ended with its first token, before the transfer.
                continue
            assert payload == attribute(sent, schema.ATTRIBUTE_PAYLOAD_BYTES)
            assert attribute(root, schema.ATTRIBUTE_TRANSFER_OWNER)
            transfers += 1
    assert transfers > REQUESTS // 2


async def check_http(it: Suite, receiver: SpanReceiver, listen: str) -> None:
    async def ask(http: httpx.AsyncClient, name: str) -> None:
        body = {"model": "sim", "prompt": name * 20, "max_tokens": 4, "include_latency": True}
        headers = {"x-request-id": name}
        answer = (await http.post("/v1/completions", json=body, headers=headers)).json()
        first = answer["choices"][0]["latency"]["first_token"]
        assert first["total_us"] == sum(first["parts_us"].values()) > 0
        assert "prefill" in first["parts_us"]
        trace_id = (await it.trace(name)).trace_id
        root = check_trace(await received(receiver, trace_id, has_root))
        assert attribute(root, schema.ATTRIBUTE_HTTP_ROUTE) == "/v1/completions"
        assert attribute(root, schema.ATTRIBUTE_RPC_METHOD) is None

    async with httpx.AsyncClient(base_url=f"http://{listen}", timeout=DEADLINE_S) as http:
        await asyncio.gather(*(ask(http, f"http-{n}") for n in range(HTTP_REQUESTS)))


async def check_migrated(it: Suite, receiver: SpanReceiver) -> None:
    """Answers that move to another worker, and requests that are retried there, keep complete sums."""
    requests = [
        greedy(prompt_of(60, 2_000 + n), 400, KINDS[n % 4][0]) for n in range(MOVED_REQUESTS)
    ]
    for number, request in enumerate(requests):
        request.first_token = KINDS[number % 4][1]
        request.include_latency = True
    answers = await it.begun(requests)
    ended = asyncio.create_task(it.terminate("decode-1"))
    outcomes = await asyncio.gather(*answers)
    assert await ended == 0
    moved = 0
    for outcome in outcomes:
        latency = outcome.last.timing.latency.first_token
        assert sum(part.duration_us for part in latency.parts) == latency.total_us > 0
        spans = await received(receiver, outcome.trace_id, has_root)
        check_trace(spans)
        moved += sum(span.name == schema.SPAN_ATTEMPT for span in spans) > 1
    assert moved


async def check_cancelled(it: Suite, receiver: SpanReceiver) -> None:
    names = [f"cancelled-{n}" for n in range(CANCELLED_REQUESTS)]
    answers = await it.begun(
        [greedy(prompt_of(60, 3_000 + n), 4_000, REMOTE, name) for n, name in enumerate(names)]
    )
    for answer in answers:
        answer.cancel()
        with suppress(asyncio.CancelledError, HeadraceError):
            await answer
    for name in names:
        trace_id = (await it.trace(name)).trace_id
        check_trace(await received(receiver, trace_id, has_root))
