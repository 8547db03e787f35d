"""Every first-token policy gives the same answer. They differ in which token waits for the transfer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.inference.v1 import first_token_pb2, inference_pb2, trace_pb2
from headrace.registry.v1 import registry_pb2
from headrace_cli.commands.policy import set_policy
from headrace_common.telemetry import schema
from tests.suite.deployment import Outcome, greedy, prompt_of, suite
from tests.waiting import until

UNSPECIFIED = first_token_pb2.FIRST_TOKEN_POLICY_UNSPECIFIED
PREFILL = first_token_pb2.FIRST_TOKEN_POLICY_PREFILL
DECODE = first_token_pb2.FIRST_TOKEN_POLICY_DECODE
LOGITS = first_token_pb2.FIRST_TOKEN_POLICY_LOGITS
LENGTHS = (1, 2, 31, 32, 33, 64, 65, 180)
# The number of tokens, and how they are chosen.
CASES: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {}),
    (2, {}),
    (7, {"presence_penalty": 1.5, "frequency_penalty": 1.5, "repetition_penalty": 1.8}),
    (8, {"temperature": 0.9, "top_p": 0.9, "seed": 5, "logprobs": 1}),
    (9, {"logprobs": 2}),
)


def asked(length: int, count: int, policy: int, **sampling: Any) -> inference_pb2.GenerateRequest:
    request = greedy(prompt_of(length, 10 * length + count), count, **sampling)
    request.first_token = first_token_pb2.FirstTokenPolicy.ValueType(policy)
    return request


def said(outcome: Outcome) -> tuple[Any, ...]:
    """All fields that a client could use to distinguish answers."""
    usage, reason = outcome.last.usage, outcome.last.finish_reason
    counts = (usage.prompt_tokens, usage.completion_tokens)
    return outcome.token_ids, outcome.logprobs, outcome.text, reason, counts


@pytest.mark.core
async def test_every_policy_gives_the_same_answer(tmp_path: Path) -> None:
    batched = (("prefill", "max_num_batched_tokens", "64"),)
    async with suite(tmp_path, prefill_count=2, decode_count=2, settings=batched) as it:

        async def compare(length: int, count: int, sampling: dict[str, Any]) -> None:
            # One after the other. The first one finds no cached prefix.
            policies = (PREFILL, LOGITS, DECODE) if length % 2 else (LOGITS, PREFILL, DECODE)
            requests = [asked(length, count, policy, **sampling) for policy in policies]
            answers = [await it.ask(request) for request in requests]
            assert answers[0].token_ids == it.expected_of(requests[0]), (length, count)
            assert all(said(answer) == said(answers[0]) for answer in answers), (length, count)
            usage = answers[0].last.usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (length, count)
            # A single token is computed on decode, because a remote first token would gain nothing.
            if count > 1 < length:
                assert (usage.decode_cached_tokens, usage.transferred_tokens) == (0, length)

        await asyncio.gather(
            *(compare(length, count, sampling) for length in LENGTHS for count, sampling in CASES)
        )
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            await it.wait_empty(name)


def span_of(trace: trace_pb2.Trace, name: str) -> tuple[int, int]:
    (span,) = (span for span in trace.spans if span.name == name)
    start_ns = span.start_time.ToNanoseconds()
    return start_ns, start_ns + span.duration.ToNanoseconds()


def earliest_end_of(trace: trace_pb2.Trace, name: str) -> int:
    """The end of a worker's span by the router's clock, less the error of the clocks' difference."""
    (span,) = (span for span in trace.spans if span.name == name)
    error_ms = float(span.attributes[schema.ATTRIBUTE_CLOCK_ERROR_MS])
    return span_of(trace, name)[1] - round(1e6 * error_ms)


async def test_the_trace_shows_which_token_includes_the_transfer(tmp_path: Path) -> None:
    async with suite(tmp_path) as it:
        for policy, maker in ((DECODE, "decode"), (PREFILL, "prefill"), (LOGITS, "logits")):
            trace = await it.trace((await it.ask(asked(200 + policy, 4, policy))).trace_id)
            (root,) = (span for span in trace.spans if span.name == schema.SPAN_REQUEST)
            assert root.attributes[schema.ATTRIBUTE_FIRST_TOKEN] == maker
            wait_end_ns = earliest_end_of(trace, schema.SPAN_DECODE_KV_WAIT)
            _, first_end_ns = span_of(trace, schema.SPAN_FIRST_TOKEN)
            if policy == DECODE:
                assert wait_end_ns < first_end_ns
                assert all(span.name != schema.SPAN_SECOND_TOKEN for span in trace.spans)
                continue
            second_start_ns, second_end_ns = span_of(trace, schema.SPAN_SECOND_TOKEN)
            assert second_start_ns == first_end_ns
            assert wait_end_ns < second_end_ns
            if policy == PREFILL:
                received_ns = earliest_end_of(trace, schema.SPAN_DECODE_TOKEN_WAIT)
                assert received_ns < second_end_ns
            else:
                _, logits_ns = span_of(trace, schema.SPAN_DECODE_LOGITS_WAIT)
                _, sampled_ns = span_of(trace, schema.SPAN_DECODE_SAMPLE)
                assert logits_ns <= sampled_ns
                assert earliest_end_of(trace, schema.SPAN_DECODE_SAMPLE) <= first_end_ns


async def test_the_deployments_policy_is_followed_and_overridden(tmp_path: Path) -> None:
    async with suite(tmp_path) as it:

        async def maker_of(policy: int) -> str:
            trace = await it.trace((await it.ask(asked(100, 2, policy))).trace_id)
            (root,) = (span for span in trace.spans if span.name == schema.SPAN_REQUEST)
            return root.attributes[schema.ATTRIBUTE_FIRST_TOKEN]

        assert registry_pb2.Policy().first_token == UNSPECIFIED
        for wanted, maker in (("prefill", "prefill"), ("logits", "logits"), ("", "decode")):
            await set_policy(it.deployment.registry, [f"first_token={wanted}"])

            async def followed(maker: str = maker) -> bool:
                return await maker_of(UNSPECIFIED) == maker

            await until(followed, interval_s=0.1)
            if wanted == "prefill":
                assert await maker_of(DECODE) == "decode"
                assert await maker_of(LOGITS) == "logits"
