"""Every first-token policy gives the same answer. They differ in which token waits for the transfer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.inference.v1 import (
    first_token_pb2,
    inference_pb2,
    inference_pb2_grpc,
    sampling_pb2,
    trace_pb2,
)
from headrace.registry.v1 import registry_pb2
from headrace_cli.commands.policy import set_policy
from headrace_common.telemetry import schema
from tests.suite.deployment import Suite, prompt_of, suite

PREFILL = first_token_pb2.FIRST_TOKEN_POLICY_PREFILL
DECODE = first_token_pb2.FIRST_TOKEN_POLICY_DECODE
LOGITS = first_token_pb2.FIRST_TOKEN_POLICY_LOGITS
LOCAL = inference_pb2.PREFILL_PLACEMENT_LOCAL
LENGTHS = (1, 2, 31, 32, 33, 64, 65, 300)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "seeded": {"temperature": 0.9, "top_p": 0.9, "seed": 5, "logprobs": 1},
    "penalized": {
        "temperature": 0.0,
        "presence_penalty": 1.5,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.8,
    },
}


async def ask(
    it: Suite, prompt: Sequence[int], count: int, policy: int = PREFILL, **fields: Any
) -> list[inference_pb2.GenerateResponse]:
    """Every message of the answer."""
    placement = fields.pop("placement", inference_pb2.PREFILL_PLACEMENT_UNSPECIFIED)
    sampling = {"temperature": 0.0, "ignore_eos": True, **fields}
    request = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenIds(ids=prompt),
        sampling=sampling_pb2.SamplingParams(max_tokens=count, **sampling),
        prefill_placement=placement,
        first_token=first_token_pb2.FirstTokenPolicy.ValueType(policy),
    )
    stub = inference_pb2_grpc.InferenceServiceStub(it.channel)
    return [response async for response in stub.Generate(request, timeout=20)]


def said(responses: list[inference_pb2.GenerateResponse]) -> tuple[Any, ...]:
    """All fields that a client could use to distinguish answers."""
    last = responses[-1]
    return (
        [token_id for response in responses for token_id in response.token_ids],
        [entry for response in responses for entry in response.logprobs],
        "".join(response.text for response in responses),
        last.finish_reason,
        last.usage.prompt_tokens,
        last.usage.completion_tokens,
    )


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 1), (2, 1), (1, 2)])
async def test_every_policy_gives_the_same_answer(
    tmp_path: Path, prefill_ranks: int, decode_ranks: int
) -> None:
    async with suite(
        tmp_path,
        prefill_tensor_parallel=prefill_ranks,
        decode_tensor_parallel=decode_ranks,
        settings=(("prefill", "max_num_batched_tokens", "64"),),
    ) as it:
        # Of each prompt length both workers compute at least one first token.
        makers = itertools.cycle((PREFILL, LOGITS))
        for length in LENGTHS:
            for count in (1, 2, 9):
                prompt, policy = prompt_of(length, 10 * length + count), next(makers)
                responses = await ask(it, prompt, count, policy)
                assert said(responses)[0] == list(it.expected(prompt, count)), (length, count)
                usage = responses[-1].usage
                assert (usage.prompt_tokens, usage.completion_tokens) == (length, count)
                # A single token is computed on decode, because a remote first token would gain nothing.
                if count > 1 < length:
                    assert (usage.decode_cached_tokens, usage.transferred_tokens) == (0, length)
            prompt = prompt_of(length, length)
            for name, sampling in SAMPLINGS.items():
                answers = [
                    said(await ask(it, prompt, 9, PREFILL, **sampling)),
                    said(await ask(it, prompt, 9, LOGITS, **sampling)),
                    said(
                        await ask(it, prompt, 9, DECODE, **sampling)
                        if length % 2
                        else await ask(it, prompt, 9, placement=LOCAL, **sampling)
                    ),
                ]
                assert all(answer == answers[0] for answer in answers), (length, name)
        for name in ("decode-0", "prefill-0"):
            await it.wait_empty(name)


async def test_stops_on_the_first_and_second_token(tmp_path: Path) -> None:
    async with suite(tmp_path) as it:
        for length in (1, 40, 64):
            prompt = prompt_of(length, length)
            expected = it.expected(prompt, 3)
            for place in (0, 1, 2):
                stops = {"stop_token_ids": [expected[place]]}
                first = expected.index(expected[place])
                for policy in (PREFILL, LOGITS, DECODE):
                    tokens, _, _, reason, _, completion = said(
                        await ask(it, prompt, 9, policy, **stops)
                    )
                    assert tokens == list(expected[: first + 1])
                    assert reason == sampling_pb2.FINISH_REASON_STOP
                    assert completion == first + 1
        for name in ("decode-0", "prefill-0"):
            await it.wait_empty(name)


async def test_many_requests_of_all_policies_at_once(tmp_path: Path) -> None:
    async with suite(tmp_path, prefill_count=2, decode_count=2) as it:
        prompts = [prompt_of(1 + 17 * number % 190, number) for number in range(40)]
        answers = await asyncio.gather(
            *(
                ask(it, prompt, 1 + number % 8, (PREFILL, LOGITS, DECODE)[number % 3])
                for number, prompt in enumerate(prompts)
            )
        )
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            assert said(answer)[0] == list(it.expected(prompt, 1 + number % 8))
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            await it.wait_empty(name)


@pytest.mark.parametrize("policy", [PREFILL, LOGITS])
async def test_a_decode_worker_killed_after_the_first_token_costs_no_token(
    tmp_path: Path, policy: first_token_pb2.FirstTokenPolicy.ValueType
) -> None:
    slow = ("decode", "model", "sim:decode_step_s=1.0")
    async with suite(tmp_path, decode_count=2, settings=(slow,)) as it:
        prompt = prompt_of(80, 3)
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenIds(ids=prompt),
            sampling=sampling_pb2.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
            first_token=policy,
        )
        call = inference_pb2_grpc.InferenceServiceStub(it.channel).Generate(request, timeout=30)
        tokens: list[int] = []
        last = inference_pb2.GenerateResponse()
        async for response in call:
            if not tokens:
                busy = [n for n in ("decode-0", "decode-1") if (await it.status(n)).reserved_blocks]
                it.kill(busy[0])
            tokens += response.token_ids
            last = response
        assert tuple(tokens) == it.expected(prompt, 3)
        assert last.usage.completion_tokens == 3
        assert last.timing.attempts > 1


def span_of(trace: trace_pb2.Trace, name: str) -> tuple[int, int]:
    (span,) = (span for span in trace.spans if span.name == name)
    start_ns = span.start_time.ToNanoseconds()
    return start_ns, start_ns + span.duration.ToNanoseconds()


async def test_the_trace_shows_which_token_includes_the_transfer(tmp_path: Path) -> None:
    async with suite(tmp_path) as it:
        for policy, maker in ((DECODE, "decode"), (PREFILL, "prefill"), (LOGITS, "logits")):
            responses = await ask(it, prompt_of(200, policy), 4, policy)
            trace = await it.trace(responses[0].trace_id)
            (root,) = (span for span in trace.spans if span.name == schema.SPAN_REQUEST)
            assert root.attributes[schema.ATTRIBUTE_FIRST_TOKEN] == maker
            _, wait_end_ns = span_of(trace, schema.SPAN_DECODE_KV_WAIT)
            _, first_end_ns = span_of(trace, schema.SPAN_FIRST_TOKEN)
            if policy == DECODE:
                assert wait_end_ns < first_end_ns
                assert all(span.name != schema.SPAN_SECOND_TOKEN for span in trace.spans)
            else:
                second_start_ns, second_end_ns = span_of(trace, schema.SPAN_SECOND_TOKEN)
                assert second_start_ns == first_end_ns
                assert wait_end_ns < second_end_ns
                if policy == PREFILL:
                    _, told_ns = span_of(trace, schema.SPAN_DECODE_TOKEN_WAIT)
                    assert told_ns < second_end_ns
                else:
                    _, logits_ns = span_of(trace, schema.SPAN_DECODE_LOGITS_WAIT)
                    _, sampled_ns = span_of(trace, schema.SPAN_DECODE_SAMPLE)
                    assert logits_ns <= sampled_ns <= first_end_ns


async def test_the_deployments_policy_is_followed_and_overridden(tmp_path: Path) -> None:
    async with suite(tmp_path) as it:
        registry = it.child("registry").endpoint
        await set_policy(registry, ["first_token=prefill"])
        prompt = prompt_of(100, 1)
        unspecified = first_token_pb2.FIRST_TOKEN_POLICY_UNSPECIFIED
        async with asyncio.timeout(5):
            while await maker_of(it, await ask(it, prompt, 2, unspecified)) != "prefill":
                await asyncio.sleep(0.1)
        assert await maker_of(it, await ask(it, prompt_of(90, 2), 2, DECODE)) == "decode"
        assert await maker_of(it, await ask(it, prompt_of(90, 2), 2, LOGITS)) == "logits"
        await set_policy(registry, ["first_token=logits"])
        async with asyncio.timeout(5):
            while await maker_of(it, await ask(it, prompt, 2, unspecified)) != "logits":
                await asyncio.sleep(0.1)
        await set_policy(registry, ["first_token="])
        assert registry_pb2.Policy().first_token == unspecified
        async with asyncio.timeout(5):
            while await maker_of(it, await ask(it, prompt, 2, unspecified)) != "decode":
                await asyncio.sleep(0.1)


async def maker_of(it: Suite, responses: list[inference_pb2.GenerateResponse]) -> str:
    trace = await it.trace(responses[0].trace_id)
    (root,) = (span for span in trace.spans if span.name == schema.SPAN_REQUEST)
    return root.attributes[schema.ATTRIBUTE_FIRST_TOKEN]
