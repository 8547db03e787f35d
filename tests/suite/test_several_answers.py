"""Several answers to one prompt in a live deployment: the KV cache of the prompt is transferred once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from headrace.inference.v1 import (
    first_token_pb2,
    inference_pb2,
    inference_pb2_grpc,
    sampling_pb2,
)
from headrace_common.errors import InvalidRequest
from headrace_common.rpc.status import error_from_rpc
from tests.suite.deployment import DEADLINE_S, Suite, greedy, suite

PROMPT = [7 + number % 200 for number in range(512)]
COUNT = 4


async def answers_to(
    it: Suite, request: inference_pb2.GenerateRequest
) -> dict[int, list[inference_pb2.GenerateResponse]]:
    """The messages of each answer."""
    stub: Any = inference_pb2_grpc.InferenceServiceStub(it.channel)
    found: dict[int, list[inference_pb2.GenerateResponse]] = {}
    async for message in stub.Generate(request, timeout=DEADLINE_S):
        found.setdefault(message.choice, []).append(message)
    return found


def tokens_of(messages: list[inference_pb2.GenerateResponse]) -> list[int]:
    return [token for message in messages for token in message.token_ids]


async def test_answers_share_the_kv_cache_of_their_prompt(tmp_path: Path) -> None:
    async with suite(tmp_path, prefill_count=1, decode_count=2) as it:
        request = greedy(PROMPT, 6, temperature=1.0, seed=5, request_id="several")
        request.prefill_placement = inference_pb2.PREFILL_PLACEMENT_REMOTE
        request.n = COUNT
        answers = await answers_to(it, request)
        assert sorted(answers) == list(range(COUNT))
        lasts = [answers[number][-1] for number in range(COUNT)]
        assert {last.timing.decode_worker_id for last in lasts} == {
            lasts[0].timing.decode_worker_id
        }
        assert lasts[0].usage.transferred_tokens == len(PROMPT) - 1
        for last in lasts[1:]:
            assert last.usage.decode_cached_tokens >= len(PROMPT) - 64
            assert last.usage.transferred_tokens < 64
        ids = {message.request_id for messages in answers.values() for message in messages}
        assert ids == {"several"}
        single = greedy(PROMPT, 6, temperature=1.0)
        for number in range(COUNT):
            single.sampling.seed = 5 + number
            (alone,) = (await answers_to(it, single)).values()
            assert tokens_of(answers[number]) == tokens_of(alone)

        request.best_of, request.n = COUNT, 1
        best = await answers_to(it, request)
        assert list(best) == [0]
        assert tokens_of(best[0]) in [tokens_of(messages) for messages in answers.values()]

        choices = sampling_pb2.StructuredOutputs(choice=sampling_pb2.Choice(texts=["yes", "née"]))
        request = greedy(PROMPT, 20, structured_outputs=choices)
        for policy in first_token_pb2.FirstTokenPolicy.values()[1:]:
            request.first_token = policy
            (answer,) = (await answers_to(it, request)).values()
            assert "".join(message.text for message in answer) in ("yes", "née")
            assert answer[-1].finish_reason == sampling_pb2.FINISH_REASON_STOP

        for fields, field in (
            ({"n": 17}, "n"),
            ({"n": 3, "best_of": 2}, "best_of"),
        ):
            wrong = greedy(PROMPT, 2)
            wrong.MergeFrom(inference_pb2.GenerateRequest(**fields))  # type: ignore[arg-type]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answers_to(it, wrong)
            error = error_from_rpc(caught.value)
            assert isinstance(error, InvalidRequest)
            assert list(error.violations) == [field]
