"""The cost of a worker that only generates while nothing is learned, with plain numbers."""

from __future__ import annotations

from headrace_router.costs import MESSAGES_S
from headrace_router.workers.table import GENERIC_STEPS, Load


def generic_cost_s(
    prompt_tokens: int,
    missing: float,
    load: Load,
    overlap_weight: float = 4.0,
    *,
    remote: bool = False,
) -> float:
    """Of `prompt_tokens` without the last, and one answer token. Operations are in the order of headrace_router.costs."""
    steps, missing_weight = GENERIC_STEPS, overlap_weight / 4
    now_s = steps.fixed_s + steps.s_per_context_token * load.held_tokens
    added_s = steps.s_per_context_token * prompt_tokens
    prompt_s = steps.s_per_prompt_token * missing
    if remote and missing:
        prompt_s += MESSAGES_S
    step_s = now_s + added_s
    cost_s = prompt_s + step_s + (step_s + load.requests * added_s)
    return cost_s + (missing_weight - 1.0) * prompt_s if missing_weight != 1.0 else cost_s
