"""A job: hand-overs, aborts and preemptions, on engines that plan steps ahead or do not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from headrace_engine.interface import Sampling
from tests.vllm.pair import CHUNK_TOKENS, GREEDY, Answer, Pair, prompt_of, running_pair
from tests.waiting import until

BLOCK_COUNT = 64
CONTEXT_TOKENS = 1600
LENGTHS = (2, 33, 128, CHUNK_TOKENS, 2 * CHUNK_TOKENS + 100)
SEEDED = Sampling(
    temperature=0.9,
    top_k=50,
    presence_penalty=0.7,
    repetition_penalty=1.3,
    seed=1234,
    max_tokens=16,
)
LONG = replace(GREEDY, max_tokens=250)


@dataclass(slots=True)
class Mode:
    """Answers by what was done, and the blocks in use at the end. `scheduler`: vLLM's choice."""

    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    left_blocks: list[int] = field(default_factory=list)
    scheduler: list[str] = field(default_factory=list)


async def answers(
    model: str, prefill_args: str, decode_args: str, runs: Sequence[str] = ()
) -> Mode:
    """The named runs of RUNS, or all of them, one after the other."""
    changes: dict[str, object] = {
        "model": model,
        "num_gpu_blocks_override": BLOCK_COUNT,
        "max_model_len": CONTEXT_TOKENS,
    }
    prefill, decode = ({**changes, "engine_args": one} for one in (prefill_args, decode_args))
    async with running_pair(prefill=prefill, decode=decode) as pair:
        mode = Mode()
        for name in runs or RUNS:
            mode.answers[name] = [answer.token_ids for answer in await RUNS[name](pair)]
            await pair.reset()
        mode.left_blocks = await pair.left_blocks()
        for engine in (pair.prefill, pair.decode):
            assert engine._llm is not None
            scheduler = engine._llm.vllm_config.scheduler_config
            mode.scheduler.append(scheduler.get_scheduler_cls().__name__)
        return mode


async def alone(pair: Pair) -> list[Answer]:
    """Prompts that decode computes itself."""
    return [await pair.plain(prompt_of(length), GREEDY) for length in LENGTHS]


async def handed_over(pair: Pair) -> list[Answer]:
    return [await pair.split(prompt_of(length), GREEDY) for length in LENGTHS]


async def after_first_tokens(pair: Pair) -> list[Answer]:
    """The first token comes from prefill, from its hidden state, or was generated before."""
    prompt = prompt_of(300)
    answers = []
    for sampling in (GREEDY, SEEDED):
        for late in (False, True):
            answers.append(await pair.split_after_first(prompt, sampling, late=late))
            answers.append(await pair.split_from_hidden_state(prompt, sampling, late=late))
            await pair.reset()
        generated = answers[-1].token_ids[:5]
        answers.append(await pair.split(prompt, sampling, generated))
        answers.append(await pair.plain(prompt, sampling, generated))
        await pair.reset()
    return answers


async def stopped(pair: Pair) -> list[Answer]:
    """Prompts side by side, and each answer ends while a step ahead still computes it."""
    prompts = [prompt_of(100 + 30 * number, number) for number in range(4)]
    stops = [(await pair.plain(prompt)).token_ids[5] for prompt in prompts]
    await pair.reset()
    samplings = [replace(GREEDY, stop_token_ids=(stop,)) for stop in stops]
    answers = await asyncio.gather(
        *(pair.split(prompt, one) for prompt, one in zip(prompts, samplings, strict=True))
    )
    assert all(answer.end is not None and answer.end.stopped for answer in answers)
    return answers


async def beside_aborts(pair: Pair) -> list[Answer]:
    """Requests end in the middle of a step, and others receive KV into their blocks."""
    answers = []
    for number in range(4):
        victims = [
            asyncio.create_task(run(prompt_of(700 + number, kind), LONG))
            for kind, run in enumerate((pair.plain, pair.split))
        ]
        await until(lambda: pair.decode.load.running_requests > 0)
        await asyncio.sleep(0.01 * number)
        for victim in victims:
            victim.cancel()
        answers.append(await pair.split(prompt_of(1200, number)))
        for victim in victims:
            with suppress(asyncio.CancelledError):
                await victim
        await pair.release_all()
    return answers


async def preempted(pair: Pair) -> list[Answer]:
    """Answers that need more blocks than there are, some of which were handed over."""
    prompts = [prompt_of(500, number) for number in range(3)]
    runs = (pair.plain, pair.split, pair.split)
    return await asyncio.gather(
        *(run(prompt, LONG) for run, prompt in zip(runs, prompts, strict=True))
    )


RUNS = {
    "alone": alone,
    "handed over": handed_over,
    "after first tokens": after_first_tokens,
    "stopped": stopped,
    "beside aborts": beside_aborts,
    "preempted": preempted,
}
