"""A deployment with a remote pool: decode loads what prefill has stored, and a broken store costs no answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from headrace.inference.v1 import inference_pb2
from headrace_cli.client import reset_prefix_cache
from headrace_common.telemetry import schema
from tests.freezing import freeze, thaw
from tests.suite.deployment import Suite, prompt_of, suite
from tests.waiting import until

LOCAL = inference_pb2.PREFILL_PLACEMENT_LOCAL
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
BLOCK_TOKENS = 32
PROMPT_TOKENS = 8 * BLOCK_TOKENS + 1
LONG_S = 60.0
# A store that works may need as long on a busy machine.
SETTINGS = tuple((role, "kv_pool_timeout_s", "2") for role in ("prefill", "decode"))


async def cached(it: Suite, prompt: list[int]) -> int:
    """The tokens of a prompt that decode has, or loads from the pool. Its answer is right."""
    await reset_prefix_cache(it.child("decode-0").endpoint, LONG_S)
    outcome = await it.generate(prompt, 4, placement=LOCAL, timeout_s=LONG_S)
    assert outcome.token_ids == it.expected(prompt, 4)
    found = outcome.last.usage.decode_cached_tokens
    (span,) = [
        span for span in (await it.trace(outcome.trace_id)).spans if span.name == schema.SPAN_DECODE
    ]
    assert int(span.attributes.get(schema.ATTRIBUTE_REMOTE_TOKENS, 0)) == found
    return found


async def share(it: Suite, prompt: list[int]) -> None:
    """Lets prefill compute a prompt until decode finds it in the pool."""

    async def shared() -> bool:
        await reset_prefix_cache(it.child("decode-0").endpoint, LONG_S)
        await reset_prefix_cache(it.child("prefill-0").endpoint, LONG_S)
        outcome = await it.generate(prompt, 4, placement=REMOTE, timeout_s=LONG_S)
        assert outcome.token_ids == it.expected(prompt, 4)
        return await cached(it, prompt) == PROMPT_TOKENS - 1

    await until(shared, LONG_S, interval_s=0.1)


@contextmanager
def frozen_store(it: Suite) -> Iterator[None]:
    """Stops the store's memory and its master."""
    node = psutil.Process(it.child("pool").process.pid)
    process_ids = [node.pid, *(child.pid for child in node.children())]
    freeze(*process_ids)
    try:
        yield
    finally:
        thaw(*process_ids)


async def test_prompts_are_shared_and_a_frozen_or_killed_store_costs_no_answer(
    tmp_path: Path,
) -> None:
    async with suite(tmp_path, pool_gib=0.0625, settings=SETTINGS) as it:
        first, second, third = (prompt_of(PROMPT_TOKENS, number) for number in range(3))
        await share(it, first)
        with frozen_store(it):
            # The first request after the store has stopped waits for it, and the next ones do not.
            for prompt in (first, second, first):
                assert await cached(it, prompt) == 0
        await share(it, second)
        it.kill("pool")
        for prompt in (first, second):
            assert await cached(it, prompt) == 0
        supervisor = it.deployment.supervisor
        again = await supervisor.start(replace(it.child("pool").spec, keeps_log=True))
        await supervisor.wait_ready([again])
        await share(it, third)
