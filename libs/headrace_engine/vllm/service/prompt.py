"""Converts prompts to vLLM's. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.inputs.llm import TokensPrompt


def token_prompt(token_ids: Sequence[int], cache_salt: str) -> TokensPrompt:
    """The prompt for `generate`. vLLM hashes the salt with the first block, so it shares no block with other salts."""
    prompt: TokensPrompt = {"prompt_token_ids": list(token_ids)}
    if cache_salt:
        prompt["cache_salt"] = cache_salt
    return prompt
