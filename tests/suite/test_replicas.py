"""Two routers over one registry each see the load that the other causes."""

from __future__ import annotations

from pathlib import Path

from tests.suite.deployment import Suite, greedy, prompt_of, suite
from tests.waiting import until

SETTINGS = (("decode", "model", "sim:decode_step_s=0.04"), ("decode", "max_num_seqs", "32"))


async def _held_tokens(it: Suite, seed: int) -> dict[str, int]:
    """The load of the decode workers as this router has it."""
    routed = await it.operator.explain(greedy(prompt_of(50, seed), 1))
    return {candidate.worker_id: candidate.held_tokens for candidate in routed.candidates}


async def test_a_router_sees_the_load_of_the_other(tmp_path: Path) -> None:
    async with (
        suite(tmp_path, decode_count=2, settings=SETTINGS) as it,
        it.through(await it.add("router-1", "router")) as other,
    ):
        await other.wait_joined(1, 2)
        request = greedy(prompt_of(460, 400), 150)
        (running,) = await it.begun([request])

        async def loaded() -> bool:
            return max((await _held_tokens(other, 1)).values()) >= 460

        await until(loaded, interval_s=0.02)
        held = await _held_tokens(other, 2)
        assert sorted(held) == ["decode-0", "decode-1"]
        busy = max(held, key=held.__getitem__)
        assert not running.done()
        outcome = await other.generate(prompt_of(50, 3), 1)
        assert outcome.last.timing.decode_worker_id != busy
        answer = await running
        assert answer.token_ids == it.expected_of(request)
        assert answer.last.timing.decode_worker_id == busy
