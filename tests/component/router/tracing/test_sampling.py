"""Requests that are not sampled: their slow and failed ones, and their metrics."""

from __future__ import annotations

import grpc.aio
import pytest

from headrace_common.errors import NotFound
from headrace_common.telemetry import schema
from headrace_common.telemetry.metrics.prometheus import prometheus_text
from tests.component.router.fakes import Rig, reply
from tests.waiting import until


async def test_only_slow_and_failed_requests_of_the_unsampled_are_stored() -> None:
    rig = await Rig(traces_sampler="always_off", slow_trace_s=30.0).start()
    try:
        await rig.add_decode(reply("ok"))
        await rig.ask(request_id="ordinary")
        with pytest.raises(grpc.aio.AioRpcError):
            await rig.ask(request_id="failed", model="another")
        await until(lambda: rig.router.traces.name_count == 1)
        (span,) = rig.router.traces.get("failed").spans
        assert span.name == schema.SPAN_REQUEST
        assert "another" in span.error
        assert span.attributes[schema.ATTRIBUTE_REQUEST_ID] == "failed"
        with pytest.raises(NotFound):
            rig.router.traces.get("ordinary")
        text = prometheus_text(rig.telemetry.metrics.store.collect())
        assert "gen_ai_server_time_to_first_token_seconds_count" in text
        assert 'headrace_latency_part="route"' in text
    finally:
        await rig.close()


async def test_a_slow_request_keeps_its_sum_without_being_sampled() -> None:
    rig = await Rig(traces_sampler="always_off", slow_trace_s=1e-6).start()
    try:
        await rig.add_decode(reply("ok"))
        await rig.ask(request_id="slow")
        await until(lambda: rig.router.traces.name_count == 1)
        trace = rig.router.traces.get("slow")
        (span,) = trace.spans
        assert not span.error
        assert int(span.attributes[schema.ATTRIBUTE_LATENCY_TOTAL_US]) > 0
    finally:
        await rig.close()
