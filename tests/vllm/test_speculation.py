"""Drafts from the request's own tokens on decode change no token."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import RunJob
from tests.vllm.speculation import SAMPLING

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_decode_may_draft_tokens_from_the_request(run_job: RunJob) -> None:
    result = run_job("tests.vllm.speculation:measure", model="tiny-llama")
    assert all(len(token_ids) == SAMPLING.max_tokens for token_ids in result["plain"])
    for way in ("split", "after_first", "together"):
        assert result[way] == result["plain"], way
    assert result["seeded"][0] == result["seeded"][1]
    # Accepted drafts: an output has several tokens.
    assert sum(result["steps"]) < 0.8 * sum(map(len, result["split"]))
