"""A job: answers of vLLM alone, without Headrace."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class GreedyTokens:
    """The tokens of the answer to each prompt."""

    tokens: list[list[int]]


def engine_of(model: str, **settings: Any) -> Any:
    """vLLM's engine in this process, which is a fork."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM

    return LLM(**{"model": model, "dtype": "float32", "enforce_eager": True} | settings)


def greedy(
    llm: Any, prompts: list[list[int]], max_tokens: list[int], adapter: Any = None
) -> list[list[int]]:
    """Tokens of the answers, one at a time."""
    from vllm import SamplingParams

    found = []
    for prompt, count in zip(prompts, max_tokens, strict=True):
        sampling = SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        (output,) = llm.generate(
            {"prompt_token_ids": prompt}, sampling, lora_request=adapter, use_tqdm=False
        )
        found.append(list(output.outputs[0].token_ids))
    return found


async def greedy_tokens(
    model: str,
    prompts: list[list[int]],
    max_tokens: list[int],
    mends_rotation: bool = False,
    engine: dict[str, Any] | None = None,
) -> GreedyTokens:
    """`mends_rotation`: of a model with latent attention, see mend_rotation. `engine`: further arguments of vLLM."""
    settings: dict[str, Any] = {"max_model_len": 2048, "skip_tokenizer_init": True}
    if mends_rotation:
        mend_rotation()
        # vLLM's choice on processors with AMX has bfloat16 only.
        settings["attention_backend"] = "CPU_MLA"
    return GreedyTokens(greedy(engine_of(model, **settings | (engine or {})), prompts, max_tokens))


async def adapter_tokens(
    model: str, dtype: str, folders: dict[str, str], prompts: list[list[int]], max_tokens: list[int]
) -> AdapterTokens:
    """Of an engine that is started for these adapters, by name."""
    # On processors, the last one stays empty.
    settings = {"max_model_len": 512, "enable_lora": True, "max_loras": len(folders) + 1}
    llm = engine_of(model, dtype=dtype, **settings)
    from vllm.lora.request import LoRARequest

    found = {"": greedy(llm, prompts, max_tokens)}
    for number, (name, folder) in enumerate(folders.items(), 1):
        found[name] = greedy(llm, prompts, max_tokens, LoRARequest(name, number, folder))
    return AdapterTokens(found)


async def chat_texts(model: str, prompts: Sequence[str], max_tokens: int) -> Texts:
    """Greedy answers to chats of one message, and prompt_logprobs=2 of the messages."""
    llm = engine_of(model, max_model_len=512)
    from vllm import SamplingParams

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
