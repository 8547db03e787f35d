"""Two prefill workers with vLLM compute one prompt in turn. Its tokens are those of one engine alone."""

from __future__ import annotations

import os

import pytest

from headrace_common.errors import TransferFailed
from tests.vllm.conftest import RunJob

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

COUNT = int(os.environ.get("HEADRACE_TEST_PROMPTS", "10"))


def test_tokens_equal_one_engine_s_and_a_failure_of_each_part_leaves_no_wrong_kv(
    run_job: RunJob,
) -> None:
    found = run_job(
        "tests.vllm.divided_prompts:divided_prompts", model="tiny-llama-deep", count=COUNT
    )
    assert found["answers"] == found["plain"]
    assert len(found["answers"]) == COUNT
    assert max(found["parts"]) >= 4
    # Each engine has its own parts, and gets the one before from the other.
    assert all(fetched == token for fetched, token in found["fetched"])
    assert any(found["beside"])
    # After the first layer the engine may have begun: the attempt fails. Else it computes all tokens itself.
    assert set(found["reasons"]) <= {"", TransferFailed.reason}
    assert TransferFailed.reason in found["reasons"]
    assert all(answer == found["expected"] for answer in found["after"])
    assert found["left_blocks"] == [0, 0]
