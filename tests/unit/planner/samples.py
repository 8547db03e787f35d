"""Observations for the planner's tests."""

from __future__ import annotations

from headrace_common.time_model.model import StepTimes
from headrace_planner.observation import DecodeLoad, Interval, LoadSample, RequestStatistics
from headrace_planner.settings import WorkerProfile

PROFILE = WorkerProfile(
    steps=StepTimes(
        fixed_s=0.01,
        s_per_prompt_token=9e-5,
        s_per_answer=7.5e-4,
        prompt_steps=100,
        answer_steps=100,
    )
)
"""A prompt of 1,000 tokens takes 100 ms, and a step of 40 answers 40 ms."""


def sample(
    *, prefill: int = 2, queued: int = 0, loads: tuple[float, ...] = (0.7, 0.7), waiting: int = 0
) -> LoadSample:
    return LoadSample(prefill, queued, tuple(DecodeLoad(load, waiting) for load in loads))


def pool_sample(*, queued: int = 0, loads: tuple[float, ...] = (0.7, 0.7)) -> LoadSample:
    """Workers of both roles."""
    decode = tuple(DecodeLoad(load) for load in loads)
    return LoadSample(0, queued, decode, both_workers=len(loads))


def interval(
    *samples: LoadSample,
    requests: RequestStatistics | None = None,
    profile: WorkerProfile | None = None,
) -> Interval:
    return Interval(0.0, 30.0, samples or (sample(),), requests, profile)


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
