"""A job: answers of vLLM alone, without Headrace."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from tests.vllm.hybrids import mend_rotation


@dataclass(frozen=True, slots=True)
class Texts:
    """The answer to each prompt."""

    texts: list[str]
    prompt_logprobs: list[list[dict[str, list[float]] | None]]
    """For each prompt alone, without a chat: the tokens of each position by id, as [log probability, rank]."""


@dataclass(frozen=True, slots=True)
class AdapterTokens:
    """By adapter, the tokens of the answer to each prompt. The adapter "" is the model alone."""

    tokens: dict[str, list[list[int]]]


async def adapter_tokens(
    model: str, dtype: str, folders: dict[str, str], prompts: list[list[int]], max_tokens: int
) -> AdapterTokens:
    """Greedy answers of an engine that is started for these adapters, by name."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model=model,
        dtype=dtype,
        max_model_len=512,
        enforce_eager=True,
        enable_lora=True,
        # On processors, the last one stays empty.
        max_loras=len(folders) + 1,
    )
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    found: dict[str, list[list[int]]] = {}
    for number, (name, folder) in enumerate({"": "", **folders}.items()):
        request = LoRARequest(name, number, folder) if name else None
        found[name] = [
            list(
                llm.generate(
                    {"prompt_token_ids": prompt}, sampling, lora_request=request, use_tqdm=False
                )[0]
                .outputs[0]
                .token_ids
            )
            for prompt in prompts
        ]
    return AdapterTokens(found)


async def chat_texts(model: str, prompts: Sequence[str], max_tokens: int) -> Texts:
    """Greedy answers to chats of one message, and prompt_logprobs=2 of the messages."""
    # The engine runs in this process, which is a fork.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, dtype="float32", max_model_len=512, enforce_eager=True)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    # One at a time, as the deployment of the test gets them.
    texts = [llm.chat(chat, sampling, use_tqdm=False)[0].outputs[0].text for chat in chats]
    scoring = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    scored = [llm.generate(prompt, scoring, use_tqdm=False)[0] for prompt in prompts]
    rows = [
        [
            row and {str(token): [one.logprob, one.rank] for token, one in row.items()}
            for row in output.prompt_logprobs
        ]
        for output in scored
    ]
    return Texts(texts, rows)


@dataclass(frozen=True, slots=True)
class GreedyTokens:
    """The tokens of the answer to each prompt."""

    tokens: list[list[int]]


async def greedy_tokens(
    model: str, prompts: list[list[int]], max_tokens: int, mends_rotation: bool = False
) -> GreedyTokens:
    """Greedy answers. `mends_rotation`: of a model with latent attention, see mend_rotation."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams

    if mends_rotation:
        mend_rotation()
    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=2048,
        enforce_eager=True,
        attention_backend="CPU_MLA" if mends_rotation else None,
    )
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    found = [
        llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False) for prompt in prompts
    ]
    return GreedyTokens([list(outputs[0].outputs[0].token_ids) for outputs in found])
