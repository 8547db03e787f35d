"""A job: states that move between engines with different numbers of ranks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from tests.vllm.hybrids import mend_rotation
from tests.vllm.pair import GREEDY, Answer, prompt_of, reset, running_pair

LENGTHS = (33, 170, 500)
SAMPLING = replace(GREEDY, max_tokens=8, logprobs=2)


@dataclass(slots=True)
class Compared:
    """A prompt's tokens by the decode engine alone, and by both engines.

    By token: `differences` of its log probability, and by how much it was more probable than the next one (`leads`).
    """

    plain: list[int]
    split: list[int]
    differences: list[float]
    leads: list[float]


@dataclass(slots=True)
class StateResult:
    """By prompt. `together`: the tokens of both engines side by side. `heads`: of the layout's states."""

    prompts: list[Compared] = field(default_factory=list)
    together: list[list[int]] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)


async def measure(model: str, prefill_ranks: int, decode_ranks: int, dtype: str) -> StateResult:
    """Answers prompts alone, and then on both engines. Decode checks the digests of all that it receives."""
    mend_rotation()
    changes: dict[str, dict[str, object]] = {
        role: {
            "model": model,
            "dtype": dtype,
            "tensor_parallel_size": ranks,
            # Decode checks digests, for which it needs 32 MiB on each rank.
            "num_gpu_blocks_override": 2048,
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
            plain = await pair.plain(prompt, SAMPLING)
            await reset(pair.decode)
            split = await pair.split(prompt, SAMPLING)
            await pair.reset()
            result.prompts.append(_compared(plain, split))
            assert split.summary is not None
            result.received.append(split.summary.payload_bytes)
        together = await asyncio.gather(*(pair.split(one, SAMPLING) for one in prompts))
        result.together = [answer.token_ids for answer in together]
    return result


def _compared(plain: Answer, split: Answer) -> Compared:
    leads = []
    for one in plain.logprobs:
        (_, first), (_, second) = sorted(one.alternatives, key=lambda found: -found[1])[:2]
        leads.append(first - second)
    differences = [
        abs(one.logprob - other.logprob)
        for one, other in zip(plain.logprobs, split.logprobs, strict=True)
    ]
    return Compared(plain.token_ids, split.token_ids, differences, leads)
