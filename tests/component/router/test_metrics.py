"""The metrics that a router exports to a collector."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace_common.errors import InvalidRequest
from headrace_common.telemetry import schema
from tests.collector import Collector, collecting
from tests.kit.router import Rig
from tests.kit.workers import hand_over, reply
from tests.waiting import until


@pytest.fixture
async def collected() -> AsyncIterator[tuple[Rig, Collector]]:
    async with collecting() as (collector, endpoint):
        rig = await Rig(otlp_endpoint=endpoint).start()
        yield rig, collector
        await rig.close()


async def _export(rig: Rig) -> None:
    rig.router.metrics.sample()
    await asyncio.to_thread(rig.telemetry.metrics.force_flush)


async def test_requests_are_counted_by_their_end(collected: tuple[Rig, Collector]) -> None:
    rig, collector = collected
    await rig.add_decode(reply("ok"))
    for _ in range(3):
        await rig.ask()
    with pytest.raises(InvalidRequest):
        await rig.ask(model="another")
    await _export(rig)
    ended = {schema.ATTRIBUTE_END_REASON: "length"}
    assert collector.value(schema.METRIC_REQUESTS, **ended) == 3
    refused = {schema.ATTRIBUTE_END_REASON: InvalidRequest.reason}
    assert collector.value(schema.METRIC_REQUESTS, **refused) == 1
    model = {schema.ATTRIBUTE_GEN_AI_REQUEST_MODEL: "sim"}
    assert collector.value(schema.METRIC_ENCODER_DIFFERENCES, **model) == 0
    for name in (
        *(schema.METRIC_TIME_TO_FIRST_TOKEN, schema.METRIC_REQUEST_DURATION),
        *(schema.METRIC_TIME_PER_OUTPUT_TOKEN,),
    ):
        assert collector.value(name, **model) == 3, name
    for kind in ("input", "output"):
        tokens = {**model, schema.ATTRIBUTE_GEN_AI_TOKEN_TYPE: kind}
        assert collector.value(schema.METRIC_REQUEST_TOKENS, **tokens) == 3
    # What planners get of the same requests.
    answered, other = rig.router.metrics.answered("sim"), rig.router.metrics.answered("other")
    assert (answered.request_count, answered.answer_tokens, other.request_count) == (3, 6, 0)
    assert answered.duration_us == answered.time_to_first_token_us + answered.streaming_us > 0


async def test_depth_limit_and_age_of_the_queues_are_exported(
    collected: tuple[Rig, Collector],
) -> None:
    rig, collector = collected
    await rig.add_decode(reply("ok"))
    worker = await rig.add_prefill(hand_over, credit=0)
    waiting = asyncio.create_task(rig.ask())
    await until(lambda: rig.router.queue.depth == 1)
    await asyncio.sleep(0.05)
    await _export(rig)
    prefill = {schema.ATTRIBUTE_QUEUE: "prefill"}
    assert collector.value(schema.METRIC_QUEUE_DEPTH, **prefill) == 1
    assert collector.value(schema.METRIC_QUEUE_DEPTH, **{schema.ATTRIBUTE_QUEUE: "requests"}) == 1
    limits = {name: collector.value(schema.METRIC_QUEUE_LIMIT, **{schema.ATTRIBUTE_QUEUE: name})
              for name in ("prefill", "requests", "tokens", "slots")}  # fmt: skip
    assert limits == {"prefill": 1_024, "requests": 1_024, "tokens": 4_194_304, "slots": 8}
    age_s = collector.value(schema.METRIC_QUEUE_AGE)
    assert age_s is not None
    assert 0.05 <= age_s < 10
    await worker.give_credit(1)
    await waiting
    await _export(rig)
    assert collector.value(schema.METRIC_QUEUE_DEPTH, **prefill) == 0
