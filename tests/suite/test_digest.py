"""Requests with corrupt KV from one prefill worker fail with KV_CORRUPT, and are then routed to another."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from headrace_common.errors import KvCorrupt
from tests.suite.deployment import Suite, prompt_of, suite

DIGEST = ("decode", "digest", "on")


async def add_wrong_digest_worker(it: Suite) -> None:
    """Adds a prefill worker that sends wrong digests, and drains the correct one."""
    honest = it.child("prefill-0")
    kept = honest.spec
    program = tuple(
        "tests.suite.wrong_digest_worker" if text == "headrace_prefill" else text
        for text in kept.arguments
    )
    honest.spec = replace(kept, arguments=program)
    await it.add("prefill-liar", "prefill-0")
    honest.spec = kept


async def still_paired(it: Suite) -> bool:
    """Whether a prompt is still sent to the worker with wrong digests, and so fails."""
    try:
        await it.generate(prompt_of(150, 4), 6)
    except KvCorrupt:
        return True
    return False


async def test_digests_pass_in_a_whole_deployment(tmp_path: Path) -> None:
    async with suite(tmp_path, settings=(DIGEST,)) as it:
        prompt = prompt_of(150, 1)
        outcome = await it.generate(prompt, 6)
        assert outcome.token_ids == it.expected(prompt, 6)
        assert outcome.last.timing.prefill_worker_id == "prefill-0"


async def test_a_pair_with_corrupt_transfers_is_separated(tmp_path: Path) -> None:
    async with suite(tmp_path, settings=(DIGEST, ("decode", "digest_mismatch_limit", "2"))) as it:
        await add_wrong_digest_worker(it)
        await it.wait_joined(2, 1)
        assert await it.terminate("prefill-0") == 0
        await it.wait_joined(1, 1)
        for number in range(2):
            with pytest.raises(KvCorrupt, match="layer 0 from rank 0 to rank 0"):
                await it.generate(prompt_of(150, number), 6)
        await it.until("decode-0", lambda status: bool(status.distrusted_workers))
        # The router receives the decode worker's status a moment later.
        async with asyncio.timeout(20):
            while await still_paired(it):
                await asyncio.sleep(0.02)
        for number in range(5, 9):
            prompt = prompt_of(150, number)
            outcome = await it.generate(prompt, 6)
            assert outcome.token_ids == it.expected(prompt, 6)
            assert not outcome.last.timing.prefill_worker_id
        await it.wait_empty("decode-0")
