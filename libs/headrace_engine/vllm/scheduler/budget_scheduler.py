"""vLLM's schedulers, with requests in the first step after their KV, and an order and budget of prompts in a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from headrace_common.time_model.model import NO_STEPS, StepTimes
from headrace_engine.step_budget import (
    NO_BOUNDS,
    AnswerPace,
    Answers,
    NextPrompt,
    TokenBounds,
    prompt_budget,
    turns,
)
from headrace_engine.vllm.settings import BOUNDS_KEY, waits_for_kv

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class _StepBudget(Scheduler):
    """Before each step, puts the prompts in order, and sets how many tokens vLLM may schedule. Answers come first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most_tokens: int = self.max_num_scheduled_tokens
        self._longest_part: int = self.scheduler_config.long_prefill_token_threshold
        self._paces: dict[str, AnswerPace] = {}
        self._overtaking = ""
        """The waiting prompt for which begun ones were put off last."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._add_received()
        prompts = self._prompts()
        if not prompts:
            return self._schedule_within(None, throttle_prefills)
        now_s = time.monotonic()
        answers = self._answers(now_s)
        times: StepTimes = getattr(self.connector, "step_times", NO_STEPS)
        followed = [_prompt_of(one, now_s) for one in prompts]
        order = turns(now_s, times, answers, followed)
        joining = sum(map(self._has_kv, self.kv_holding_waiting))
        put_off = self._put_in_order([prompts[index] for index in order], joining > 0)
        budget = prompt_budget(now_s, times, answers, followed[order[0]])
        try:
            return self._schedule_within(budget, throttle_prefills, joining)
        finally:
            self.running += put_off
            self.scheduler_config.long_prefill_token_threshold = self._longest_part

    def _schedule_within(
        self, budget: int | None, throttle_prefills: bool, joining: int = 0
    ) -> SchedulerOutput:
        """A step with at most `budget` prompt tokens, if it has a limit, and places for `joining` answers."""
        # They begin with places for drafts.
        begins = 1 + self.num_spec_tokens
        answers = sum(_next_tokens(one) for one in self.running if not one.is_prefill_chunk)
        tokens = self._most_tokens
        if budget is not None:
            # One more lets vLLM look at requests that wait for their KV.
            tokens = min(tokens, answers + len(self.kv_holding_waiting) * begins + max(1, budget))
        self.max_num_scheduled_tokens = tokens
        if joining:
            # vLLM computes a begun prompt first, with all tokens that are left. Answers have the same limit.
            part = max(begins, tokens - answers - joining * begins)
            most = min(filter(None, (part, self._longest_part)))
            self.scheduler_config.long_prefill_token_threshold = most
        if budget or budget is None:
            return super().schedule(throttle_prefills)
        # vLLM's own way to leave out prompts, unless many wait.
        self.prefill_capacity_bound = False
        return super().schedule(throttle_prefills=True)

    def _add_received(self) -> None:
        """Lets requests run in this step. vLLM alone learns of their KV from the results of a step."""
        received: list[str] = getattr(self.connector, "take_received", list)()
        if received:
            self._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving=set(received)))

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._paces.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        getattr(self.connector, "request_left", _ignore)(request)
        super()._preempt_request(request, *args, **kwargs)

    def _has_kv(self, request: Request) -> bool:
        """Whether the KV of a request that waits has come."""
        is_received = request.request_id in self.finished_recving_kv_req_ids
        return is_received or request.status == RequestStatus.WAITING

    def _put_in_order(self, prompts: Sequence[Request], leaves_room: bool) -> list[Request]:
        """Puts answers before the prompts, and these in this order. Returns begun ones that this step leaves out.

        vLLM computes those that run before any that waits. `leaves_room`: only one of them runs.
        """
        turn_of = {one.request_id: turn for turn, one in enumerate(prompts)}
        self.running.sort(key=lambda one: turn_of.get(one.request_id, -1))
        begun = [one for one in self.running if one.request_id in turn_of]
        has_room = sum(self.get_request_counts()) <= self.max_num_running_reqs
        if leaves_room and has_room and len(begun) > 1:
            del self.running[1 - len(begun) :]
            return begun[1:]
        waiting = [one for one in prompts if one not in begun]
        if not waiting or not isinstance(self.waiting, deque):
            return []
        # Those that wait for KV need blocks, and no compute.
        others = [one for one in self.waiting if one.request_id not in turn_of]
        self.waiting.clear()
        self.waiting.extend([*others, *waiting])
        first = waiting[0].request_id
        later = [one for one in self.running if turn_of.get(one.request_id, -1) > turn_of[first]]
        # One that cannot run yet must not put off others again.
        room = self.max_num_running_reqs - len(self.running) - len(self.waiting)
        if not later or room < 0 or first == self._overtaking:
            return []
        self._overtaking = first
        del self.running[-len(later) :]
        return later

    def _answers(self, now_s: float) -> Answers | None:
        """None where no running answer has a bound."""
        due: list[tuple[float, float]] = []
        running = context = 0
        for request in self.running:
            if request.is_prefill_chunk:
                continue
            running += 1
            context += request.num_computed_tokens
            pace = self._paces.get(request.request_id)
            if pace is None:
                bound_s = _bounds_of(request).tpot_s
                if not bound_s:
                    continue
                pace = AnswerPace(bound_s, now_s, request.num_output_tokens)
                self._paces[request.request_id] = pace
            due.append((pace.due_s(request.num_output_tokens), pace.tpot_s))
        if not due:
            return None
        first_s, tightest_s = map(min, zip(*due, strict=True))
        return Answers(running, context, first_s, tightest_s)

    def _prompts(self) -> list[Request]:
        """In the order in which vLLM would compute them."""
        waiting = (one for one in self.waiting if not waits_for_kv(one.kv_transfer_params))
        return [*filter(_is_prompt, self.running), *waiting]


class BudgetScheduler(_StepBudget):
    """For engines that plan a step when the one before has ended."""


class BudgetAsyncScheduler(_StepBudget, AsyncScheduler):
    """For engines that plan a step while another one is computed."""


def _ignore(request: Request) -> None:
    """For a connector that is not ours."""


def _bounds_of(request: Request) -> TokenBounds:
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    given = extra.get(BOUNDS_KEY)
    return TokenBounds(*given) if given else NO_BOUNDS


def _is_prompt(request: Request) -> bool:
    return bool(request.is_prefill_chunk)


def _next_tokens(request: Request) -> int:
    # Steps under way have computed tokens that are not known yet.
    known = request.num_tokens_with_spec + request.num_output_placeholders
    return max(1, int(known - request.num_computed_tokens))


def _prompt_of(request: Request, now_s: float) -> NextPrompt:
    computed = int(request.num_computed_tokens)
    missing = int(request.num_tokens) - computed
    if request.num_output_tokens:
        # An answer that vLLM has stopped for want of blocks goes on first.
        return NextPrompt(NO_BOUNDS, missing, computed)
    arrival_s = now_s - (time.time() - request.arrival_time)
    return NextPrompt(_bounds_of(request), missing, computed, arrival_s)
