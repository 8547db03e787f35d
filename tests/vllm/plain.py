"""A job: answers of vLLM alone, without Headrace."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Texts:
    """The answer to each prompt."""

    texts: list[str]


async def chat_texts(model: str, prompts: Sequence[str], max_tokens: int) -> Texts:
    """Greedy answers to chats of one message."""
    # The engine runs in this process, which is a fork.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, dtype="float32", max_model_len=512, enforce_eager=True)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    # One at a time, as the deployment of the test gets them.
    texts = [llm.chat(chat, sampling, use_tqdm=False)[0].outputs[0].text for chat in chats]
    return Texts(texts)
