"""A conversation in a deployment where prefill fetches what decode has."""

from __future__ import annotations

from pathlib import Path

from headrace.inference.v1 import inference_pb2
from headrace_common.telemetry import schema
from tests.suite.deployment import Outcome, Suite, prompt_of, suite

REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
# Computing is far slower than any fetch, also on a busy machine.
SETTINGS = (
    ("prefill", "prefix_fetch_min_tokens", "32"),
    ("prefill", "prefix_fetch_timeout_s", "20"),
    ("prefill", "model", "sim:prefill_s_per_token=0.005"),
)
TURN_TOKENS = 80
ANSWER_TOKENS = 64
LONG_S = 60.0


async def ask(it: Suite, prompt: list[int]) -> Outcome:
    """The answer, which is right."""
    outcome = await it.generate(prompt, ANSWER_TOKENS, placement=REMOTE, timeout_s=LONG_S)
    assert outcome.token_ids == it.expected(prompt, ANSWER_TOKENS)
    return outcome


async def fetched_tokens(it: Suite, outcome: Outcome) -> int:
    """The tokens that the prefill task of a request has fetched."""
    trace = await it.trace(outcome.trace_id)
    assert trace.complete
    spans = [one for one in trace.spans if one.name == schema.SPAN_PREFIX_FETCH]
    assert not [one for one in spans if schema.ATTRIBUTE_ERROR_REASON in one.attributes]
    return sum(int(one.attributes[schema.ATTRIBUTE_TOKENS]) for one in spans)


async def test_turns_of_a_conversation_are_fetched_and_a_killed_decode_worker_costs_no_answer(
    tmp_path: Path,
) -> None:
    async with suite(tmp_path, settings=SETTINGS, decode_count=2) as it:
        prompt = prompt_of(TURN_TOKENS, 1)
        outcome = await ask(it, prompt)
        assert await fetched_tokens(it, outcome) == 0
        for turn in range(2, 4):
            prompt = [*prompt, *outcome.token_ids, *prompt_of(TURN_TOKENS, turn)]
            outcome = await ask(it, prompt)
            # Blocks have 32 tokens. Prefill has the last prompt, and decode has its answer too.
            assert await fetched_tokens(it, outcome) >= ANSWER_TOKENS - 32
        it.kill(outcome.last.timing.decode_worker_id)
        for turn in range(4, 6):
            prompt = [*prompt, *outcome.token_ids, *prompt_of(TURN_TOKENS, turn)]
            outcome = await ask(it, prompt)
