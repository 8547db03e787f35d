"""Every task ends in one TaskDone, failures included."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace.inference.v1 import adapter_pb2, sampling_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.config import ServiceConfig
from headrace_common.errors import InternalError, TransferFailed
from headrace_common.registry.adapters import Adapter
from headrace_common.telemetry import schema
from headrace_common.telemetry.setup import Telemetry, init_telemetry
from headrace_common.time_model.model import NO_STEPS
from headrace_engine.interface import DecodeTokens, PrefillOutcome, PrefillWork, TokenLogprobs
from headrace_kv.layout import KvDescriptor, KvLayout, WorkerRef
from headrace_kv.messages import SendReport
from headrace_prefill.worker import PrefillWorker
from tests.transfer_links import sent_link

REF = WorkerRef("prefill-0", "00112233445566ff")
REPORT = SendReport("x1", 0, "", "", (sent_link(),), 321, "10.0.0.1")
FIRST_TOKEN = DecodeTokens((7,), (TokenLogprobs(-0.5, ((7, -0.5),)),))
OUTCOME = PrefillOutcome(2, 500, 4_000, (REPORT,))
Behaviour = Callable[[PrefillWork], Awaitable[PrefillOutcome]]


LAYOUT = KvLayout.attention(
    model="m", dtype="f", layer_count=1, kv_head_count=1, block_tokens=16, parts={"kv": 4}
)


class ScriptedEngine:
    """Prefills with the behaviour of a test. A prefill worker calls nothing else."""

    adapters = (Adapter("poet", "aa"),)
    descriptor = KvDescriptor(LAYOUT, ())
    step_times = NO_STEPS
    vocabulary_size = 32_000

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour

    async def prefill(
        self,
        work: PrefillWork,
        on_first_token: Callable[[DecodeTokens], None] | None = None,
        on_report: Callable[[SendReport], None] | None = None,
    ) -> PrefillOutcome:
        if on_report is not None:
            on_report(REPORT)
        if work.sampling is not None and on_first_token is not None:
            on_first_token(FIRST_TOKEN)
        return await self._behaviour(work)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def telemetry(exporter: InMemorySpanExporter) -> Iterator[Telemetry]:
    telemetry = init_telemetry("prefill", "prefill-0", ServiceConfig(traces_sampler="always_on"))
    telemetry.add_exporter(exporter)
    yield telemetry
    telemetry.shutdown()


def worker_of(
    behaviour: Behaviour, telemetry: Telemetry, slots: int = 2, **more: Any
) -> PrefillWorker:
    return PrefillWorker(
        ref=REF,
        engine=ScriptedEngine(behaviour),  # type: ignore[arg-type]
        telemetry=telemetry,
        slot_count=slots,
        task_timeout_s=30,
        **more,
    )


def task(name: str = "x1", seconds: float = 30, **changes: object) -> prefill_pb2.PrefillTask:
    fields: dict[str, object] = {
        "transfer_id": name,
        "request_id": "r",
        "token_ids": [1, 2, 3],
        "decode_worker_id": "decode-0",
        "decode_incarnation": "ff",
        "decode_endpoint": "127.0.0.1:1",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    }
    message = prefill_pb2.PrefillTask(**{**fields, **changes})  # type: ignore[arg-type]
    message.remaining.FromNanoseconds(int(seconds * 1e9))
    return message


async def good(work: PrefillWork) -> PrefillOutcome:
    return OUTCOME


async def test_a_successful_task_reports_its_bytes_and_records_its_spans(
    telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    done = await worker_of(good, telemetry).run(task())
    assert (done.reason, done.cached_tokens, done.payload_bytes) == ("", 2, 400)
    telemetry.force_flush()
    spans = exporter.get_finished_spans()
    assert sorted(span.name for span in spans) == sorted(
        [schema.SPAN_PREFILL, schema.SPAN_PREFILL_COMPUTE, schema.SPAN_TRANSFER_LINK]
    )
    root = next(span for span in spans if span.name == schema.SPAN_PREFILL)
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert f"{root.context.trace_id:032x}" == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert root.attributes is not None
    assert root.attributes[schema.ATTRIBUTE_CONTROL_BYTES] == 321
    assert root.attributes[schema.ATTRIBUTE_PAYLOAD_BYTES] == 400
    children = [span for span in spans if span is not root]
    assert {span.parent.span_id for span in children if span.parent} == {root.context.span_id}


async def test_the_start_is_reported_between_getting_a_slot_and_computing(
    telemetry: Telemetry,
) -> None:
    order: list[str] = []
    held = asyncio.Event()

    async def note(work: PrefillWork) -> PrefillOutcome:
        order.append(f"engine {work.target.transfer_id}")
        await held.wait()
        return OUTCOME

    async def on_start(name: str) -> None:
        order.append(f"start {name}")

    worker = worker_of(note, telemetry, slots=2)
    running = [
        asyncio.create_task(worker.run(task(name), partial(on_start, name))) for name in "abc"
    ]
    await asyncio.sleep(0.05)
    assert order == ["start a", "engine a", "start b", "engine b"]
    held.set()
    assert [(await one).reason for one in running] == ["", "", ""]
    assert order[4:] == ["start c", "engine c"]


async def test_a_task_gets_only_an_adapter_that_the_engine_has(telemetry: Telemetry) -> None:
    works: list[PrefillWork] = []

    async def note(work: PrefillWork) -> PrefillOutcome:
        works.append(work)
        return OUTCOME

    worker = worker_of(note, telemetry)
    right, wrong = (
        task(cache_salt="0a", adapter=adapter_pb2.Adapter(name="poet", digest=digest))
        for digest in ("aa", "bb")
    )
    assert not (await worker.run(right)).reason
    done = await worker.run(wrong)
    assert done.reason == "INVALID_FIELD"
    assert "'poet' is an adapter with another digest" in done.detail
    assert [work.adapter for work in works] == [Adapter("poet", "aa")]


async def test_a_task_with_a_salt_that_is_none_is_rejected(telemetry: Telemetry) -> None:
    done = await worker_of(good, telemetry).run(task(cache_salt="tenant-a"))
    assert done.reason == "INVALID_FIELD"
    assert "cache_salt" in done.detail


@pytest.mark.parametrize(
    "failure,reason",
    [
        (TransferFailed("the peer is gone"), "TRANSFER_FAILED"),
        (InternalError("oops"), "INTERNAL"),
        (ValueError("oops"), "INTERNAL"),
    ],
)
async def test_a_failure_is_reported_by_reason(
    telemetry: Telemetry, failure: Exception, reason: str
) -> None:
    async def fail(work: PrefillWork) -> PrefillOutcome:
        raise failure

    ended: list[tuple[object, ...]] = []
    worker = worker_of(fail, telemetry, on_ended=lambda *args: ended.append(args))
    done = await worker.run(task())
    assert (done.transfer_id, done.reason, bool(done.detail)) == ("x1", reason, True)
    # All tokens of the prompt count as computed in vain.
    assert ended == [("decode-0", reason, 0, [REPORT], 3)]


async def test_the_deadline_ends_a_task_and_the_engines_work(telemetry: Telemetry) -> None:
    quiet = asyncio.Event()

    async def slow(work: PrefillWork) -> PrefillOutcome:
        try:
            await asyncio.sleep(60)
        finally:
            quiet.set()
        return OUTCOME

    done = await worker_of(slow, telemetry).run(task(seconds=0.05))
    assert done.reason == "DEADLINE_EXCEEDED"
    assert quiet.is_set()


@pytest.mark.parametrize("fields", [{}, {"sampling": sampling_pb2.SamplingParams(max_tokens=1)}])
async def test_a_cancelled_task_is_reported_after_the_engine_has_stopped(
    telemetry: Telemetry, fields: dict[str, Any]
) -> None:
    order: list[str] = []

    async def slow(work: PrefillWork) -> PrefillOutcome:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            order.append("quiet")
        return OUTCOME

    wasted: list[int] = []
    worker = worker_of(slow, telemetry, on_ended=lambda *args: wasted.append(args[-1]))
    running = asyncio.create_task(worker.run(task(**fields)))
    await asyncio.sleep(0.02)
    running.cancel()
    done = await running
    order.append("done")
    assert (done.reason, order) == ("CANCELLED", ["quiet", "done"])
    # A first token may have ended the answer.
    assert wasted == [0 if fields else 3]


@pytest.mark.parametrize(
    "changes,field",
    [
        ({"token_ids": []}, "token_ids"),
        ({"transfer_id": ""}, "transfer_id"),
        ({"start_token": 3}, "start_token"),
    ],
)
async def test_wrong_fields_are_refused_by_name(
    telemetry: Telemetry, changes: dict[str, object], field: str
) -> None:
    done = await worker_of(good, telemetry).run(task(**changes))  # type: ignore[arg-type]
    assert done.reason == "INVALID_FIELD"
    assert field in done.detail


async def test_a_token_beyond_the_vocabulary_fails_its_task_before_the_engine_gets_it(
    telemetry: Telemetry,
) -> None:
    async def never(work: PrefillWork) -> PrefillOutcome:
        raise AssertionError(work)

    done = await worker_of(never, telemetry).run(task(token_ids=[1, 2**32 - 1]))
    assert (done.reason, "token_ids[1]" in done.detail) == ("INVALID_FIELD", True)
