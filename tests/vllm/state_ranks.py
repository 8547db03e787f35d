"""A job: states that move between engines with different numbers of ranks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from tests.vllm.hybrids import mend_rotation
from tests.vllm.pair import GREEDY, Answer, prompt_of, reset, running_pair

LENGTHS = (33, 170, 500)
SAMPLING = replace(GREEDY, max_tokens=8, logprobs=1)


@dataclass(slots=True)
class StateResult:
    """By prompt: tokens of the decode engine alone, and of both.

    `together`: the same side by side. `heads`: of the layout's states. `differences`: the largest one of log
    probabilities, by prompt.
    """

    plain: list[list[int]] = field(default_factory=list)
    split: list[list[int]] = field(default_factory=list)
    together: list[list[int]] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)


async def measure(
    model: str, prefill_ranks: int, decode_ranks: int, dtype: str, max_tokens: int
) -> StateResult:
    """Answers prompts alone, and then on both engines. Decode checks the digests of all that it receives."""
    mend_rotation()
    sampling = replace(SAMPLING, max_tokens=max_tokens)
    changes: dict[str, dict[str, object]] = {
        role: {
            "model": model,
            "dtype": dtype,
            "tensor_parallel_size": ranks,
            "num_gpu_blocks_override": 96,
            "max_model_len": 1024,
        }
        for role, ranks in (("prefill", prefill_ranks), ("decode", decode_ranks))
    }
    result = StateResult()
    async with running_pair(digests=True, **changes) as pair:
        layout = pair.decode.descriptor.layout
        result.heads = [group.head_count for group in layout.groups if group.kind == "state"]
        prompts = [prompt_of(length, seed=12) for length in LENGTHS]
        for prompt in prompts:
            plain = await pair.plain(prompt, sampling)
            await reset(pair.decode)
            split = await pair.split(prompt, sampling)
            await pair.reset()
            result.plain.append(plain.token_ids)
            result.split.append(split.token_ids)
            result.differences.append(_difference(plain, split))
            assert split.summary is not None
            result.received.append(split.summary.payload_bytes)
        together = await asyncio.gather(*(pair.split(one, sampling) for one in prompts))
        result.together = [answer.token_ids for answer in together]
    return result


def _difference(plain: Answer, split: Answer) -> float:
    pairs = zip(plain.logprobs, split.logprobs, strict=False)
    return max(abs(one.logprob - other.logprob) for one, other in pairs)
