"""The parts of a latency as the client sees it."""

from __future__ import annotations

import time

import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2, latency_pb2, sampling_pb2
from headrace_client.latency import DirectSteps, complete_latency
from headrace_client.progress import Progress
from headrace_common.latency.calls import Call
from headrace_common.latency.parts import Part, Sum, sum_from_proto, sum_to_proto


def breakdown(**parts_us: int) -> latency_pb2.LatencyBreakdown:
    parts = {Part[name.upper()]: duration_us for name, duration_us in parts_us.items()}
    return latency_pb2.LatencyBreakdown(first_token=sum_to_proto(Sum(sum(parts.values()), parts)))


def parts_of(latency: latency_pb2.LatencyBreakdown) -> dict[str, int]:
    found = sum_from_proto(latency.first_token)
    assert sum(found.parts_us.values()) == found.total_us
    return {part.label: duration_us for part, duration_us in found.parts_us.items()}


@pytest.mark.parametrize(
    "measured_us, retry_us, expected",
    [
        (130, 0, {"queue": 90, "network": 40}),
        (130, 20, {"queue": 90, "network": 20, "retry": 20}),
        (105, 20, {"queue": 90, "network": 10, "retry": 5}),
        # The client's clock cannot show less than the router's.
        (50, 0, {"queue": 90, "network": 10}),
    ],
)
def test_the_client_adds_what_the_router_has_not_seen(
    measured_us: int, retry_us: int, expected: dict[str, int]
) -> None:
    latency = breakdown(queue=90, network=10)
    complete_latency(latency, measured_us, retry_us)
    assert parts_of(latency) == expected


def test_a_call_that_continues_an_answer_changes_nothing() -> None:
    last = inference_pb2.GenerateResponse()
    last.timing.latency.CopyFrom(breakdown(queue=90))
    progress = Progress(inference_pb2.GenerateRequest(include_latency=True))
    progress.record(inference_pb2.GenerateResponse(token_ids=[1]))
    progress.record_call()
    progress.record(last)
    assert parts_of(last.timing.latency) == {"queue": 90}


class Clock:
    """The monotonic clock in microseconds."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_us = 0
        patch.setattr(time, "monotonic_ns", lambda: 1_000 * self.now_us)

    def at(self, now_us: int) -> None:
        self.now_us = now_us


def direct_steps(clock: Clock, begin_us: int = 1_000, *, remote: bool = False) -> DirectSteps:
    """Route from 1,000 to 1,100, Generate from 1,110 to 1,200, a token at 2,000."""
    route = latency_pb2.RouteSteps(
        tokenize_start_us=10, tokenize_end_us=30, route_start_us=40, sent_us=60
    )
    steps = DirectSteps(begin_us, Call(1_000_000, 1_100_000), route)
    clock.at(1_200)
    steps.reserved(1_110_000, remote=remote)
    steps.made(
        decode_pb2.AttemptTimes(
            reserved_us=70, kv_arrived_us=800, step_start_us=820, first_token_us=860
        )
    )
    return steps


def test_the_sum_of_a_direct_request(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    steps = direct_steps(clock, remote=True)
    clock.at(1_980)
    steps.prefilled(
        1_210_000,
        latency_pb2.TaskSteps(
            queued_us=20,
            pulled_us=120,
            received_us=130,
            compute_start_us=140,
            compute_end_us=640,
            first_write_us=200,
            last_write_us=690,
            sent_us=750,
            clock_error_us=3,
        ),
    )
    latency = steps.latency(2_000)
    assert latency.first_token.total_us == 1_000
    assert parts_of(latency) == {
        "admission": 20,
        "tokenize": 20,
        "route": 30,
        "reserve": 100,
        "queue": 100,
        "batch_wait": 10,
        "prefill": 500,
        "transfer_exposed": 60,
        "decode_wait": 20,
        "first_step": 40,
        "network": 100,
    }
    assert (latency.transfer_exposed_us, latency.transfer_hidden_us) == (60, 440)
    assert latency.clock_error_us == 10 + 10 + 3


def test_a_direct_request_with_a_local_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    latency = direct_steps(Clock(monkeypatch)).latency(2_000)
    parts = parts_of(latency)
    assert "queue" not in parts
    assert parts["prefill"] == 40
    assert latency.transfer_owner == latency_pb2.TRANSFER_OWNER_UNSPECIFIED


def test_an_attempt_before_a_direct_one_is_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    late = direct_steps(clock, begin_us=1_000 - 500_000)
    assert parts_of(late.latency(2_000))["retry"] >= 500_000


def test_a_prefill_without_a_report_is_not_called_local(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(direct_steps(Clock(monkeypatch), remote=True).latency(2_000))
    assert parts["first_step"] == 40
    assert "prefill" not in parts


def test_an_answer_that_moves_keeps_the_latency_of_its_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress = Progress(inference_pb2.GenerateRequest(include_latency=True))
    progress.direct = direct_steps(Clock(monkeypatch))
    progress.record(inference_pb2.GenerateResponse(token_ids=[1]))
    progress.first_s = 2_000e-6
    progress.record_failure("d0")
    progress.record_route(0, latency_pb2.RouteSteps())
    progress.record_call()
    last = inference_pb2.GenerateResponse(
        token_ids=[2], finish_reason=sampling_pb2.FINISH_REASON_STOP
    )
    # The router that continues the answer knows only its own part.
    last.timing.latency.CopyFrom(breakdown(queue=7))
    progress.record(last)
    assert last.timing.latency == direct_steps(Clock(monkeypatch)).latency(2_000)
