"""Requests that are refused on arrival, because their first token is predicted to come too late."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import grpc.aio
import pytest

from headrace.inference.v1 import first_token_pb2, inference_pb2
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import FirstTokenLate
from headrace_common.telemetry import schema
from headrace_common.time_model.model import HandoverTimes, StepTimes, TimeModel
from headrace_frontend.admission.admission import AdmissionPermit
from headrace_router.placement import KvAware
from headrace_router.workers.table import TimeColumns
from tests.kit.router import Rig, text_of, with_settings
from tests.kit.workers import hand_over, reply, send_first_token

_WAIT_S = 100.0
_SHORT_S = 60.0
_LONG_S = 600.0


@pytest.fixture
async def waiting_rig(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A prompt would wait for 100 s in the prefill queue. No prefill was measured, so it counts as 0."""
    await rig.add_decode(reply("ok"))
    await rig.add_prefill(hand_over)
    monkeypatch.setattr(rig.router.queue, "wait_s", lambda *_: _WAIT_S)
    return rig


async def test_a_request_beyond_its_target_is_refused_with_the_excess_as_its_hint(
    waiting_rig: Rig,
) -> None:
    rig = waiting_rig
    error = await rig.error_of(
        ttft_target=duration_from_seconds(_SHORT_S), request_id="late", timeout_s=_LONG_S
    )
    caught = error.__cause__
    assert isinstance(caught, grpc.aio.AioRpcError)
    assert caught.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(error, FirstTokenLate)
    assert error.retry_after_s is not None
    assert error.metadata["bound"] == "ttft_target"
    assert error.retry_after_s == pytest.approx(
        float(error.metadata["predicted_s"]) - _SHORT_S, abs=0.01
    )
    trailers = dict(cast("Any", caught.trailing_metadata()))
    pushback_ms = int(trailers["grpc-retry-pushback-ms"])
    assert pushback_ms == pytest.approx(1e3 * error.retry_after_s, abs=2)
    # Neither worker has work of it.
    assert not rig.decodes[0].requests
    assert not rig.prefills[0].tasks
    root = await rig.root_of("late")
    assert root[schema.ATTRIBUTE_FIRST_TOKEN_BOUND] == "ttft_target"
    assert float(root[schema.ATTRIBUTE_PREDICTED_FIRST_TOKEN_S]) >= _WAIT_S
    assert await rig.text(ttft_target=duration_from_seconds(_LONG_S), timeout_s=_LONG_S) == "ok"


async def test_the_policy_has_a_target_for_requests_without_one(waiting_rig: Rig) -> None:
    rig = waiting_rig
    assert await rig.text(timeout_s=_LONG_S) == "ok"
    rig.policy.ttft_target.CopyFrom(duration_from_seconds(_SHORT_S))
    error = await rig.error_of(timeout_s=_LONG_S)
    assert isinstance(error, FirstTokenLate)
    assert error.metadata["bound"] == "policy"
    assert await rig.text(ttft_target=duration_from_seconds(_LONG_S), timeout_s=_LONG_S) == "ok"


async def test_prompts_that_stay_on_decode_do_not_wait_for_prefill_workers(
    waiting_rig: Rig,
) -> None:
    rig = waiting_rig
    rig.policy.max_queue_wait.CopyFrom(duration_from_seconds(0.5))
    assert await rig.text(ttft_target=duration_from_seconds(_SHORT_S), timeout_s=_LONG_S) == "ok"
    rig.policy.ClearField("max_queue_wait")
    rig.policy.local_prefill_max_tokens = 1_000
    assert await rig.text(ttft_target=duration_from_seconds(_SHORT_S), timeout_s=_LONG_S) == "ok"
    assert not rig.prefills[0].tasks


async def test_a_deadline_refuses_only_where_the_setting_says_so(waiting_rig: Rig) -> None:
    rig = waiting_rig
    remote = inference_pb2.PREFILL_PLACEMENT_REMOTE
    assert await rig.text(timeout_s=_SHORT_S, prefill_placement=remote) == "ok"


@with_settings(early_refusal=True)
async def test_a_deadline_that_the_prefill_queue_would_miss_refuses(waiting_rig: Rig) -> None:
    rig = waiting_rig
    remote = inference_pb2.PREFILL_PLACEMENT_REMOTE
    error = await rig.error_of(timeout_s=_SHORT_S, prefill_placement=remote)
    assert isinstance(error, FirstTokenLate)
    assert error.metadata["bound"] == "deadline"
    assert await rig.text(timeout_s=_LONG_S, prefill_placement=remote) == "ok"
    # An answer that has begun is worth more than its deadline.
    tokens = inference_pb2.TokenIds(ids=[1, 2])
    assert text_of(
        await rig.ask(timeout_s=_SHORT_S, prefill_placement=remote, generated=tokens)
    ).endswith("ok")


async def test_a_request_waits_for_no_slot_that_comes_too_late(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.add_decode(reply("ok"))
    monkeypatch.setattr(AdmissionPermit, "expected_slot_wait_s", lambda *_: _WAIT_S)
    error = await rig.error_of(ttft_target=duration_from_seconds(_SHORT_S), timeout_s=_LONG_S)
    assert isinstance(error, FirstTokenLate)
    assert error.metadata["slot_wait_s"] == "100.000"
    assert await rig.text(ttft_target=duration_from_seconds(_LONG_S), timeout_s=_LONG_S) == "ok"


async def test_the_prediction_of_placement_decides_while_workers_learn(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.add_decode(reply("ok"))
    choose = KvAware.choose
    monkeypatch.setattr(KvAware, "choose", lambda *given: replace(choose(*given), first_s=_WAIT_S))
    ttft_target = duration_from_seconds(_SHORT_S)
    monkeypatch.setattr(TimeColumns, "age_s", 31.0)
    assert await rig.text(ttft_target=ttft_target, timeout_s=_LONG_S) == "ok"
    monkeypatch.setattr(TimeColumns, "age_s", 29.0)
    error = await rig.error_of(ttft_target=ttft_target, timeout_s=_LONG_S)
    assert isinstance(error, FirstTokenLate)
    # What is not the prefill of this prompt is a wait, which may be shorter later.
    assert error.metadata["queue_wait_s"] == "100.000"
    assert error.retry_after_s is not None


async def test_a_first_token_of_the_prefill_worker_waits_for_no_hand_over(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.add_decode(reply("ok", after_first_token=True))
    await rig.add_prefill(send_first_token("a"))
    handovers = HandoverTimes(fixed_s=_WAIT_S, count=9)
    times = TimeModel(StepTimes(fixed_s=0.001, prompt_steps=9), handovers)
    monkeypatch.setattr(rig.router.queue, "mean_times", lambda *_: times)
    target = duration_from_seconds(_SHORT_S)
    rig.policy.first_token = first_token_pb2.FIRST_TOKEN_POLICY_PREFILL
    assert await rig.text(ttft_target=target, timeout_s=_LONG_S) == "aok"
    rig.policy.first_token = first_token_pb2.FIRST_TOKEN_POLICY_DECODE
    assert isinstance(await rig.error_of(ttft_target=target, timeout_s=_LONG_S), FirstTokenLate)


async def test_over_http_the_refusal_is_429_with_retry_after(waiting_rig: Rig) -> None:
    status, headers, body = await waiting_rig.post({"prompt": "a prompt", "ttft_target_s": 60})
    assert status == 429
    assert _WAIT_S - _SHORT_S <= int(headers["retry-after"]) <= _SHORT_S
    assert body["error"]["code"] == "rate_limit_exceeded"
    assert body["error"]["headrace"]["reason"] == "FIRST_TOKEN_LATE"
    for field in ("ttft_target_s", "tpot_target_s"):
        status, _, body = await waiting_rig.post({"prompt": "a prompt", field: 0})
        assert (status, body["error"]["param"]) == (400, field)
