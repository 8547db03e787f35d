"""The requests of a run, and when each is sent. Pure: equal seeds make equal plans."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from headrace_common.errors import ConfigError

REQUESTS_MAX: Final = 1_000_000
TOKENS_MAX: Final = 1_000_000
# Every vocabulary has these ids, and control tokens usually lie outside of them.
_TOKEN_IDS: Final = range(300, 1_300)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request. It has exactly one of `text`, `messages` of (role, content), and `token_ids`.

    `output_tokens`: tokens to generate; with `exact`, no more and no fewer. `start_s`: when to send it after the start
    of the run, or None for as soon as a place is free.
    """

    text: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    token_ids: tuple[int, ...] = ()
    output_tokens: int = 128
    exact: bool = True
    start_s: float | None = None


@dataclass(frozen=True, slots=True)
class RandomShape:
    """Random prompts. Lengths are uniform in `mean * (1 - range_ratio)` to `mean * (1 + range_ratio)` tokens.

    The first `prefix_tokens` of a prompt are those of one of `prefixes` groups, and come on top of its length.
    """

    input_tokens: int = 512
    output_tokens: int = 128
    range_ratio: float = 0.0
    prefix_tokens: int = 0
    prefixes: int = 1

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens"):
            if not 1 <= getattr(self, name) <= TOKENS_MAX:
                raise _wrong(name, f"must be from 1 to {TOKENS_MAX}")
        if not 0 <= self.prefix_tokens <= TOKENS_MAX:
            raise _wrong("prefix_tokens", f"must be from 0 to {TOKENS_MAX}")
        if not 0 <= self.range_ratio < 1:
            raise _wrong("range_ratio", "must be at least 0 and below 1")
        if self.prefixes < 1:
            raise _wrong("prefixes", "must be 1 or more")


def random_requests(shape: RandomShape, count: int, seed: int) -> list[PlannedRequest]:
    """`count` requests with random token ids. Servers of any model understand them."""
    numbers = random.Random(f"requests/{seed}")
    prefixes = [
        tuple(random_tokens(shape.prefix_tokens, f"prefix/{seed}/{number}"))
        for number in range(shape.prefixes)
    ]

    def length(mean: int) -> int:
        return max(1, round(mean * numbers.uniform(1 - shape.range_ratio, 1 + shape.range_ratio)))

    return [
        PlannedRequest(
            token_ids=prefixes[number % len(prefixes)]
            + tuple(random_tokens(length(shape.input_tokens), f"prompt/{seed}/{number}")),
            output_tokens=length(shape.output_tokens),
        )
        for number in range(count)
    ]


def random_tokens(count: int, seed: str) -> list[int]:
    """Token ids that depend on `seed` alone."""
    return random.Random(seed).choices(_TOKEN_IDS, k=count)


def at_rate(
    requests: Sequence[PlannedRequest], rate: float, burstiness: float, seed: int
) -> list[PlannedRequest]:
    """The requests at `rate` a second. Gaps are gamma distributed with the shape `burstiness`.

    A burstiness of 1 is a Poisson process, below 1 is burstier, and infinity has equal gaps (as in vllm bench serve).
    """
    if rate <= 0 or burstiness <= 0:
        raise _wrong("rate" if rate <= 0 else "burstiness", "must be above 0")
    return [
        replace(request, start_s=start_s)
        for request, start_s in zip(requests, _starts(rate, burstiness, seed), strict=False)
    ]


def _starts(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    numbers = random.Random(f"arrivals/{seed}")
    start_s = 0.0
    while True:
        yield start_s
        if burstiness == float("inf"):
            start_s += 1.0 / rate
        else:
            start_s += numbers.gammavariate(burstiness, 1.0 / (rate * burstiness))


def _wrong(field: str, detail: str) -> ConfigError:
    return ConfigError(f"{field} {detail}", metadata={"field": field})
