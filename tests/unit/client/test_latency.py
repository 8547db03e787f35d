"""The parts of a latency as the client sees it."""

from __future__ import annotations

import pytest

from headrace.inference.v1 import inference_pb2, latency_pb2
from headrace_client.client import AnswerProgress, complete_latency
from headrace_common.latency.parts import Sum, TimePart, sum_from_proto, sum_to_proto


def breakdown(**parts_us: int) -> latency_pb2.LatencyBreakdown:
    parts = {TimePart[name.upper()]: duration_us for name, duration_us in parts_us.items()}
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
    progress = AnswerProgress(inference_pb2.GenerateRequest(include_latency=True))
    progress.record(inference_pb2.GenerateResponse(token_ids=[1]))
    progress.record_call()
    progress.record(last)
    assert parts_of(last.timing.latency) == {"queue": 90}


def test_a_repeated_call_brings_no_prompt_token_twice() -> None:
    def part(*ids: int, without: int = 0) -> inference_pb2.GenerateResponse:
        response = inference_pb2.GenerateResponse(prompt_token_ids=ids)
        for token_id in ids[without:]:
            response.prompt_logprobs.add(logprob=-token_id)
        progress.record(response)
        return response

    progress = AnswerProgress(inference_pb2.GenerateRequest())
    progress.record_call()
    part(1, 2, without=1)
    part(3)
    progress.record_call()
    repeated = part(1, 2, without=1)
    assert (list(repeated.prompt_token_ids), list(repeated.prompt_logprobs)) == ([], [])
    later = part(3, 4)
    assert list(later.prompt_token_ids) == [4]
    assert [entry.logprob for entry in later.prompt_logprobs] == [-4]
