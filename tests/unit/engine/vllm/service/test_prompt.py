"""Prompts for vLLM."""

from __future__ import annotations

from headrace_engine.vllm.service.sampling import token_prompt


def test_a_salt_is_given_to_vllm_and_an_empty_one_is_not() -> None:
    assert token_prompt((1, 2), "abc") == {"prompt_token_ids": [1, 2], "cache_salt": "abc"}
    assert token_prompt((1, 2), "") == {"prompt_token_ids": [1, 2]}
