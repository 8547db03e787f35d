"""A profile and requests for the simulator's tests."""

from __future__ import annotations

from headrace_common.callers.priority import Priority
from headrace_common.time_model.model import HandoverTimes, StepTimes
from headrace_planner.settings import WorkerProfile
from headrace_simulator.trace import TraceRequest

PROFILE = WorkerProfile(
    steps=StepTimes(
        fixed_s=0.018,
        s_per_prompt_token=0.001,
        s_per_answer=0.002,
        prompt_steps=100,
        answer_steps=100,
    ),
    kv_tokens=32_000,
    kv_bytes_per_token=1_000,
    max_num_seqs=16,
)
"""A prompt token takes 1 ms, and a step with an answer 20 ms and 2 ms more for each further answer."""

SLOW_LINK = PROFILE.model_copy(
    update={"handovers": HandoverTimes(fixed_s=0.5, s_per_byte=2e-6, count=9)}
)


def request(
    number: int = 0,
    arrival_s: float = 0.0,
    prompt_tokens: int = 1000,
    answer_tokens: int = 10,
    ids: tuple[int, ...] = (),
    priority: Priority = Priority.NORMAL,
) -> TraceRequest:
    return TraceRequest(number, arrival_s, prompt_tokens, answer_tokens, ids, priority)
