"""Observations for the planner's tests."""

from __future__ import annotations

from headrace_planner.observation import DecodeLoad, Interval, LoadSample, RequestStatistics
from headrace_planner.settings import DecodePoint, PrefillPoint, WorkerProfile

PROFILE = WorkerProfile(
    prefill=(
        PrefillPoint(prompt_tokens=1000, ttft_s=0.1),
        PrefillPoint(prompt_tokens=2000, ttft_s=0.3),
    ),
    decode=(
        DecodePoint(kv_usage=0.2, context_tokens=1000, itl_s=0.01, tokens_per_s=400),
        DecodePoint(kv_usage=0.8, context_tokens=1000, itl_s=0.04, tokens_per_s=1000),
        DecodePoint(kv_usage=0.5, context_tokens=4000, itl_s=0.08, tokens_per_s=300),
    ),
)


def sample(
    *, prefill: int = 2, queued: int = 0, loads: tuple[float, ...] = (0.7, 0.7), waiting: int = 0
) -> LoadSample:
    return LoadSample(prefill, queued, tuple(DecodeLoad(load, waiting) for load in loads))


def pool_sample(*, queued: int = 0, loads: tuple[float, ...] = (0.7, 0.7)) -> LoadSample:
    """Workers of both roles."""
    decode = tuple(DecodeLoad(load) for load in loads)
    return LoadSample(0, queued, decode, both_workers=len(loads))


def interval(*samples: LoadSample, requests: RequestStatistics | None = None) -> Interval:
    return Interval(0.0, 30.0, samples or (sample(),), requests)


def requests(
    count: int = 30,
    *,
    prompt_tokens: float = 1000.0,
    answer_tokens: float = 100.0,
    ttft_s: float = 0.1,
    itl_s: float = 0.01,
    cached_share: float = 0.0,
) -> RequestStatistics:
    return RequestStatistics(
        count, prompt_tokens, answer_tokens, ttft_s, itl_s, answer_tokens * itl_s, cached_share
    )
