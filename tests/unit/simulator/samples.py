"""A profile and requests for the simulator's tests."""

from __future__ import annotations

from headrace_common.callers.priority import Priority
from headrace_planner.settings import DecodePoint, PrefillPoint, TransferTime, WorkerProfile
from headrace_simulator.trace import TraceRequest

PROFILE = WorkerProfile(
    prefill=(
        PrefillPoint(prompt_tokens=1, ttft_s=0.001),
        PrefillPoint(prompt_tokens=10_000, ttft_s=10.0),
    ),
    decode=(
        DecodePoint(kv_usage=0.03, context_tokens=1000, itl_s=0.02, tokens_per_s=1 / 0.02),
        DecodePoint(kv_usage=0.5, context_tokens=1000, itl_s=0.05, tokens_per_s=16 / 0.05),
    ),
    kv_tokens=32_000,
    max_num_seqs=16,
)
"""A prompt token takes 1 ms, a decode step 20 ms and 2 ms more for each request after the first."""

SLOW_LINK = PROFILE.model_copy(update={"transfer": TransferTime(fixed_s=0.5, s_per_token=0.002)})


def request(
    number: int = 0,
    arrival_s: float = 0.0,
    prompt_tokens: int = 1000,
    answer_tokens: int = 10,
    ids: tuple[int, ...] = (),
    priority: Priority = Priority.NORMAL,
) -> TraceRequest:
    return TraceRequest(number, arrival_s, prompt_tokens, answer_tokens, ids, priority)
