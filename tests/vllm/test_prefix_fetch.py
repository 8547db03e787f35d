"""A conversation on real engines where prefill fetches what decode generated, while the source freezes."""

from __future__ import annotations

import pytest

from headrace_common.errors import TransferTimeout
from tests.vllm.conftest import RunJob
from tests.vllm.pair import BLOCK_TOKENS, STEPS_AHEAD
from tests.vllm.prefix_fetch import FROZEN_TURN, TURNS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]


@pytest.mark.parametrize(
    ("model", "prefill_ranks", "decode_ranks", "stages", "both_roles", "engine_args"),
    [
        ("tiny-llama-deep", 1, 1, 1, False, ""),
        ("tiny-llama-deep", 1, 1, 1, False, STEPS_AHEAD),
        ("tiny-llama", 1, 1, 1, True, ""),
        ("tiny-llama", 2, 1, 1, False, ""),
        ("tiny-llama", 1, 1, 2, False, ""),
    ],
)
def test_every_turn_fetches_what_decode_has_and_a_frozen_source_costs_no_answer(
    run_job: RunJob,
    model: str,
    prefill_ranks: int,
    decode_ranks: int,
    stages: int,
    both_roles: bool,
    engine_args: str,
) -> None:
    found = run_job(
        "tests.vllm.prefix_fetch:conversation",
        model=model,
        prefill_ranks=prefill_ranks,
        decode_ranks=decode_ranks,
        stages=stages,
        both_roles=both_roles,
        engine_args=engine_args,
    )
    assert found["answers"] == found["plain"]
    assert len(found["answers"]) == TURNS
    # All turns but the first.
    assert found["fetched_tokens"] == found["expected_tokens"]
    assert len(found["fetched_tokens"]) == TURNS - 1
    assert min(found["fetched_tokens"]) >= BLOCK_TOKENS
    late = [TransferTimeout.reason if turn == FROZEN_TURN else "" for turn in range(1, TURNS)]
    assert found["reasons"] == late
    # I1: the blocks that the frozen engine may write are held beside those of the prompt.
    assert found["held_blocks"] == found["fetched_tokens"][FROZEN_TURN - 1] // BLOCK_TOKENS
    assert found["left_blocks"] == [0, 0]
