"""A job: a model with trained weights, on engines of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from tests.vllm.pair import GREEDY, running_pair

LENGTHS = (33, 600)
SEEDED = replace(GREEDY, temperature=0.9, top_k=50, seed=5)


@dataclass(slots=True)
class Compared:
    """Answers of one engine alone, and of two by the way they share the work."""

    plain: list[list[int]] = field(default_factory=list)
    split: list[list[int]] = field(default_factory=list)
    after_first: list[list[int]] = field(default_factory=list)
    from_logits: list[list[int]] = field(default_factory=list)


async def compare(model: str) -> Compared:
    """Generates one answer after the other."""
    compared = Compared()
    change: dict[str, object] = {"model": model}
    numbers = random.Random(3)
    async with running_pair(prefill=change, decode=change) as pair:
        for length in LENGTHS:
            prompt = [numbers.randrange(100, 40_000) for _ in range(length)]
            compared.plain.append((await pair.plain(prompt, SEEDED)).token_ids)
            await pair.reset()
            for answers, run in (
                (compared.split, pair.split),
                (compared.after_first, pair.split_after_first),
                (compared.from_logits, pair.split_from_logits),
            ):
                answers.append((await run(prompt, SEEDED)).token_ids)
                await pair.reset()
    return compared
