"""Measures vLLM's steps from the scheduler's hooks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace_common.time_model.model import Step, StepLearner, StepTimes

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class StepMeter:
    """Learns the time of steps. The scheduling thread calls `planned` and `ended`. Any thread may read `times`.

    A step that continues requests of the one before begins when that one ended, so that its time contains what the
    scheduler does between both. Another step begins when it was planned.
    """

    def __init__(self, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._clock_s = clock_s
        self._learner = StepLearner()
        # Steps without handled results, with their start. With pipeline stages there are several.
        self._planned: deque[tuple[Step, float]] = deque()
        self._end_s = 0.0

    @property
    def times(self) -> StepTimes:
        """What it has learned."""
        return self._learner.times

    def planned(self, output: SchedulerOutput) -> None:
        """A step is planned."""
        start_s = 0.0 if output.scheduled_cached_reqs.req_ids else self._clock_s()
        self._planned.append((step_of(output), start_s))

    def ended(self) -> None:
        """The results of the oldest planned step are handled."""
        if not self._planned:
            return
        step, start_s = self._planned.popleft()
        end_s = self._clock_s()
        self._learner.observe(step, end_s - max(start_s, self._end_s))
        self._end_s = end_s


def step_of(output: SchedulerOutput) -> Step:
    """A request with one token beside its drafts counts as an answer."""
    cached, new, tokens = (
        output.scheduled_cached_reqs,
        output.scheduled_new_reqs,
        output.num_scheduled_tokens,
    )
    context_tokens = sum(cached.num_computed_tokens)
    context_tokens += sum(request.num_computed_tokens for request in new)
    if output.total_num_scheduled_tokens == len(tokens):
        return Step(running=len(tokens), context_tokens=context_tokens)
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed.update((request.req_id, request.num_computed_tokens) for request in new)
    drafts = output.scheduled_spec_decode_tokens
    prompt_tokens, attended_tokens, running = 0, 0.0, 0
    for request_id, count in tokens.items():
        if count - len(drafts.get(request_id, ())) <= 1:
            running += 1
            continue
        before = computed[request_id]
        prompt_tokens += count
        attended_tokens += count * (before + count / 2)
        context_tokens -= before
    return Step(prompt_tokens, attended_tokens, running, context_tokens)
