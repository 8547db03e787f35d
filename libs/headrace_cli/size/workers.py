"""How many prefill and decode workers a load needs. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from headrace_common.errors import ConfigError
from headrace_kv.layout.time_model import transfer_s

PLANNED_SHARE: Final = 0.8
"""Share of its speed that a worker is planned to use. The rest is for bursts."""
_PARTS: Final = 3
_NUMBER_MAX: Final = 1e9

Limit = Literal["compute", "link"]
"""What a worker of the count uses most of: its computing, or its link."""


@dataclass(frozen=True, slots=True)
class Load:
    """A mean load: requests per second, and the tokens of each prompt and each answer."""

    requests_per_s: float
    prompt_tokens: float
    answer_tokens: float


@dataclass(frozen=True, slots=True)
class WorkerSpeeds:
    """Tokens per second that one prefill worker computes and that one decode worker generates, and each one's link."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    gbit_per_s: float


@dataclass(frozen=True, slots=True)
class WorkerCount:
    """The least count of workers of one role. `share` is what each of them uses of its limit, at most PLANNED_SHARE."""

    role: Literal["prefill", "decode"]
    count: int
    limit: Limit
    share: float


def parse_load(text: str) -> Load:
    """A load from "RATE,PROMPT,ANSWER". Raises ConfigError."""
    try:
        numbers = [float(part) for part in text.split(",", _PARTS)]
    except ValueError:
        numbers = []
    if len(numbers) != _PARTS or not all(0 < number <= _NUMBER_MAX for number in numbers):
        raise ConfigError(
            "--load: give requests per second, prompt tokens and answer tokens, such as 20,2000,300"
        )
    return Load(*numbers)


def worker_counts(
    load: Load, token_bytes: int, speeds: WorkerSpeeds
) -> tuple[WorkerCount, WorkerCount]:
    """The prefill workers and the decode workers. All KV of prompts is taken to be computed and transferred.

    Without prefix hits this is what a load needs, so it is too much for a load with them.
    """
    prompt_tokens_per_s = load.requests_per_s * load.prompt_tokens
    # Seconds of one link, in each second.
    link = prompt_tokens_per_s * transfer_s(token_bytes, speeds.gbit_per_s)
    prefill: dict[Limit, float] = {
        "compute": prompt_tokens_per_s / speeds.prefill_tokens_per_s,
        "link": link,
    }
    decode: dict[Limit, float] = {
        "compute": load.requests_per_s * load.answer_tokens / speeds.decode_tokens_per_s,
        "link": link,
    }
    return _count("prefill", prefill), _count("decode", decode)


def _count(role: Literal["prefill", "decode"], used: Mapping[Limit, float]) -> WorkerCount:
    """`used`: how many workers would be busy all the time."""
    limit = max(used, key=lambda one: used[one])
    # Of a count that only the rounding of numbers raises, a billionth is dropped.
    count = max(1, math.ceil(used[limit] / PLANNED_SHARE - 1e-9))
    return WorkerCount(role, count, limit, used[limit] / count)
