"""A simulated engine: steps that compute prompts and generate, with the real step budget, in virtual time.

Steps without prompts have one duration between two changes of the answers. So they pass together, and the work of the
simulation grows with the requests and not with the tokens.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from headrace_common.time_model.model import TimeModel
from headrace_engine.step_budget import (
    AnswerPace,
    Answers,
    NextPrompt,
    TokenBounds,
    prompt_budget,
    turns,
)
from headrace_planner.settings import WorkerProfile
from headrace_simulator.job import Job

# The context grows with every step, and so does the duration of the next.
_STEPS_MAX: Final = 256
_FIRST, _LAST = 0, 1


@dataclass(slots=True, eq=False)
class EnginePrompt:
    """A prompt in computation. `computed` is called at the end of its last step.

    That step makes the first token of `answer`, which runs here from then on.
    """

    missing_tokens: int
    prior_tokens: int
    bounds: TokenBounds
    arrival_s: float
    computed: Callable[[], None]
    answer: Job | None = None

    def add_part(self, tokens: int) -> None:
        """A step has computed so many."""
        self.prior_tokens += tokens
        self.missing_tokens -= tokens


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps of one duration that run since `begun_s`. Only a single one computes prompts."""

    begun_s: float
    step_s: float
    count: int
    parts: list[tuple[EnginePrompt, int]]
    timer: asyncio.TimerHandle


class SimulatedEngine:
    """Prompts are computed in the order of `turns`, or of arrival as in plain vLLM without `orders_prompts`.

    `on_ended` is called with each complete answer. Requests join at the end of a step. `tpot_s` bounds the mean time
    per output token of each answer, if it is not 0.
    """

    def __init__(
        self,
        profile: WorkerProfile,
        tpot_s: float,
        on_ended: Callable[[Job], None],
        *,
        orders_prompts: bool = True,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._times = TimeModel(profile.steps)
        self._tokens_max = profile.max_num_batched_tokens
        self._tpot_s = tpot_s
        self._orders_prompts = orders_prompts
        self._on_ended = on_ended
        self._prompts: list[EnginePrompt] = []
        self._joining: list[Job] = []
        self._running = 0
        self._paces: dict[Job, tuple[AnswerPace, int]] = {}
        """Of each answer, and the steps before its first token."""
        self._step_count = 0
        # The sum over running answers of the prompt less the steps at the start: context = this + running x steps.
        self._context_base = 0
        # What happens after so many steps, by number of the request.
        self._marks: list[tuple[int, int, int, Job]] = []
        self._steps: _Steps | None = None
        self._ending = False

    @property
    def waiting_prompts(self) -> int:
        """Prompts beside the one that is computed next."""
        return max(0, len(self._prompts) - 1)

    def add_prompt(self, prompt: EnginePrompt) -> None:
        """Computes a prompt."""
        if not prompt.missing_tokens:
            prompt.computed()
            if prompt.answer is not None:
                self.add_answer(prompt.answer)
            return
        self._prompts.append(prompt)
        self._joined()

    def add_answer(self, job: Job) -> None:
        """Generates an answer. Its prompt is complete."""
        self._joining.append(job)
        self._joined()

    def _joined(self) -> None:
        """Ends the steps that run together after the present one, or begins one."""
        if self._ending:
            return
        steps = self._steps
        if steps is None:
            self._begin()
            return
        done = int((self._loop.time() - steps.begun_s) / steps.step_s)
        if done + 1 < steps.count:
            steps.timer.cancel()
            end_s = steps.begun_s + (done + 1) * steps.step_s
            timer = self._loop.call_at(end_s, self._end)
            self._steps = replace(steps, count=done + 1, timer=timer)

    def _begin(self) -> None:
        for job in self._joining:
            self._run(job, self._step_count - job.has_first_token)
        self._joining.clear()
        self._steps = None
        if not self._running and not self._prompts:
            return
        now_s = self._loop.time()
        parts = self._parts(now_s) if self._prompts else []
        step_s = self._step_s(parts)
        count = 1
        if not self._prompts:
            count = min(_STEPS_MAX, self._marks[0][0] - self._step_count)
        timer = self._loop.call_at(now_s + count * step_s, self._end)
        self._steps = _Steps(now_s, step_s, count, parts, timer)

    def _run(self, job: Job, before: int) -> None:
        """An answer runs, `before` steps before its first token."""
        self._running += 1
        self._context_base += job.prompt_tokens - before
        number = job.request.number
        if job.has_first_token:
            self._keep_pace(job, before)
        else:
            heapq.heappush(self._marks, (before + 1, number, _FIRST, job))
        heapq.heappush(self._marks, (before + job.answer_tokens, number, _LAST, job))

    def _keep_pace(self, job: Job, before: int) -> None:
        if self._tpot_s:
            self._paces[job] = AnswerPace(self._tpot_s, self._loop.time(), 1), before

    def _end(self) -> None:
        steps = self._steps
        assert steps is not None
        self._step_count += steps.count
        self._ending = True
        for prompt, tokens in steps.parts:
            prompt.add_part(tokens)
            if not prompt.missing_tokens:
                self._prompts.remove(prompt)
                prompt.computed()
                if prompt.answer is not None:
                    self._run(prompt.answer, self._step_count - 1)
        self._pass_marks()
        self._ending = False
        self._begin()

    def _pass_marks(self) -> None:
        now_s = self._loop.time()
        while self._marks and self._marks[0][0] <= self._step_count:
            step_count, _, kind, job = heapq.heappop(self._marks)
            if kind == _FIRST:
                job.made_first_token(now_s)
                self._keep_pace(job, self._step_count - 1)
                continue
            self._running -= 1
            self._context_base -= job.prompt_tokens - (step_count - job.answer_tokens)
            self._paces.pop(job, None)
            job.made_last_token(now_s)
            self._on_ended(job)

    @property
    def _context_tokens(self) -> int:
        return self._context_base + self._running * self._step_count

    def _parts(self, now_s: float) -> list[tuple[EnginePrompt, int]]:
        """The prompt tokens of the next step."""
        answers = None
        if self._paces:
            paces = self._paces.values()
            due_s = min(pace.due_s(self._step_count - before) for pace, before in paces)
            answers = Answers(self._running, self._context_tokens, due_s, self._tpot_s)
        prompts = [
            NextPrompt(one.bounds, one.missing_tokens, one.prior_tokens, one.arrival_s)
            for one in self._prompts
        ]
        if self._orders_prompts:
            order = turns(now_s, self._times.steps, answers, prompts)
            self._prompts = [self._prompts[index] for index in order]
            prompts = [prompts[index] for index in order]
        budget = max(1, self._tokens_max - self._running)
        paced = prompt_budget(now_s, self._times.steps, answers, prompts[0])
        if paced is not None:
            budget = min(budget, paced)
        parts = []
        for prompt in self._prompts:
            tokens = min(budget, prompt.missing_tokens)
            if tokens > 0:
                parts.append((prompt, tokens))
                budget -= tokens
        return parts

    def _step_s(self, parts: list[tuple[EnginePrompt, int]]) -> float:
        tokens = sum(count for _, count in parts)
        attended = sum(count * (prompt.prior_tokens + count / 2) for prompt, count in parts)
        # As of one prompt with as many pairs of tokens.
        prior = attended / tokens - tokens / 2 if tokens else 0.0
        step_s = self._times.step_s(tokens, self._running, self._context_tokens, prior)
        assert step_s is not None, "a profile knows the times of steps"
        return max(1e-6, step_s)
