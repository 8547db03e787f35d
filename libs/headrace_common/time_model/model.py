"""The time of a worker's steps and hand-overs: a learner beside the engine, and what it reports to others."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from operator import attrgetter, mul
from statistics import median_low
from typing import Final, TypeVar

from headrace.worker.v1 import time_model_pb2
from headrace_common.tasks import Recent
from headrace_common.time_model.fit import OnlineFit

_LOG = logging.getLogger(__name__)
# Of any value. Sums of products of larger ones may overflow.
_POSSIBLE_MAX: Final = 1e12
_STEPS_MIN: Final = 5
"""Steps with prompts, or with answers, before which the time of such a step is unknown."""
_HANDOVERS_MIN: Final = 3
_LINKS_MAX: Final = 64
_LEARNED_EVERY_S: Final = 2e-2
_ALL_LEARNED: Final = 50
_PROMPT, _ANSWERS, _BOTH = range(3)


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of an engine computes.

    `prompt_tokens` are computed in it, and `attended_tokens` sums over them the tokens before each. The KV of
    `sent_tokens` of them goes to another worker. `running` answers get a token each, and `context_tokens` is the sum of
    the tokens before these.
    """

    prompt_tokens: int = 0
    attended_tokens: float = 0.0
    running: int = 0
    context_tokens: int = 0
    sent_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Those of prompts, and one for each answer."""
        return self.prompt_tokens + self.running


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The parts of a step's time, and how many steps with prompts and with answers they are from.

    See StepTimes in time_model.proto.
    """

    fixed_s: float = 0.0
    prompt_s: float = 0.0
    s_per_prompt_token: float = 0.0
    s_per_attended_token: float = 0.0
    s_per_answer: float = 0.0
    s_per_context_token: float = 0.0
    prompt_steps: int = 0
    answer_steps: int = 0
    error_p50: float = 0.0
    error_p90: float = 0.0
    s_per_sent_token: float = 0.0

    @property
    def knows_prompts(self) -> bool:
        """Whether enough steps with prompts were seen."""
        return self.prompt_steps >= _STEPS_MIN

    @property
    def knows_answers(self) -> bool:
        """Whether enough steps with answers were seen."""
        return self.answer_steps >= _STEPS_MIN


NO_STEPS: Final = StepTimes()


@dataclass(frozen=True, slots=True)
class HandoverTimes:
    """What a hand-over takes after the end of computing, from `count` hand-overs."""

    fixed_s: float = 0.0
    s_per_byte: float = 0.0
    count: int = 0
    error_p50: float = 0.0
    error_p90: float = 0.0


NO_HANDOVERS: Final = HandoverTimes()
Times = TypeVar("Times", StepTimes, HandoverTimes)


@dataclass(frozen=True, slots=True)
class TimeModel:
    """What is known of one worker's times. `links` has the hand-overs to one destination, `handovers` those to all."""

    steps: StepTimes = NO_STEPS
    handovers: HandoverTimes = NO_HANDOVERS
    links: Mapping[str, HandoverTimes] = field(default_factory=dict)

    def with_links_of(self, older: TimeModel) -> TimeModel:
        """This model, beside it the last links of an older one of the same worker."""
        links = {link: times for link, times in older.links.items() if link not in self.links}
        links |= self.links
        return replace(self, links=dict(tuple(links.items())[-_LINKS_MAX:]))

    def step_s(
        self,
        prompt_tokens: float,
        running: float = 0,
        context_tokens: float = 0,
        prior_tokens: float = 0,
    ) -> float | None:
        """Seconds of a step. None while too few steps with prompts, or with answers, were seen.

        It computes `prompt_tokens` of one prompt, after `prior_tokens` of it, and a token of each of `running` answers.
        These have `context_tokens` in all.
        """
        steps = self.steps
        if (prompt_tokens and not steps.knows_prompts) or (running and not steps.knows_answers):
            return None
        step_s = steps.fixed_s
        if prompt_tokens:
            attended = prompt_tokens * (prior_tokens + prompt_tokens / 2)
            step_s += steps.prompt_s + steps.s_per_prompt_token * prompt_tokens
            step_s += steps.s_per_attended_token * attended
        return step_s + steps.s_per_answer * running + steps.s_per_context_token * context_tokens

    def handover_s(self, payload_bytes: float, link: str = "") -> float | None:
        """Seconds from the end of computing to the end of the last write. None while too few were seen.

        A link without enough hand-overs of its own has the time of all.
        """
        for times in (self.links.get(link), self.handovers):
            if times is not None and times.count >= _HANDOVERS_MIN:
                return times.fixed_s + times.s_per_byte * payload_bytes
        return None


USUAL_STEP: Final = (1.0, 1.0, 1_024.0, 524_288.0, 1.0, 1_024.0, 0.0)
"""How often a usual step has each part of StepTimes, in the order of its fields without counts and errors."""
FAR: Final = 8.0
"""A worker far from the median has no vote: its usual step takes so many times as long, or so small a part of it."""
_USUAL_BYTES: Final = 1e6


def mean_model(models: Collection[TimeModel]) -> TimeModel:
    """The mean of each part over several workers, without links. Hand-overs only of workers that have had enough.

    A worker far from the median counts for nothing: no single worker decides what the others are taken for.
    """
    handovers = [one.handovers for one in models if one.handovers.count >= _HANDOVERS_MIN]
    handovers_s = [one.fixed_s + one.s_per_byte * _USUAL_BYTES for one in handovers]
    steps = [one.steps for one in models]
    steps_s = [sum(map(mul, USUAL_STEP, _STEP_PARTS(one))) for one in steps]
    return TimeModel(
        _mean(NO_STEPS, _without_far(steps, steps_s)),
        _mean(NO_HANDOVERS, _without_far(handovers, handovers_s)),
    )


_STEP_PARTS: Final = attrgetter(*StepTimes.__match_args__[:6], "s_per_sent_token")


def _without_far(several: Sequence[Times], usual_s: Sequence[float]) -> Sequence[Times]:
    middle_s = median_low(usual_s) if several else 0.0
    if not middle_s:
        return several
    least_s, most_s = middle_s / FAR, middle_s * FAR
    return [one for one, s in zip(several, usual_s, strict=True) if least_s <= s <= most_s]


def _mean(zero: Times, several: Sequence[Times]) -> Times:
    if not several:
        return zero
    names = zero.__match_args__
    columns = zip(*map(attrgetter(*names), several), strict=True)
    # Counts stay whole numbers.
    means = (type(column[0])(sum(column) / len(several)) for column in columns)
    return replace(zero, **dict(zip(names, means, strict=True)))


class StepLearner:
    """Learns from the steps of one engine, in at most some 0.2 % of their time. One thread owns it."""

    def __init__(self) -> None:
        self.times = NO_STEPS
        """What it has learned. Other threads may read it."""
        self._fit = OnlineFit(7, kind_count=3, known_count=_STEPS_MIN)
        self._skipped_s = 0.0

    def observe(self, step: Step, seconds: float) -> None:
        """A step has ended. Steps without tokens do not count."""
        kind = _ANSWERS if not step.prompt_tokens else _BOTH if step.running else _PROMPT
        if not step.prompt_tokens and not step.running:
            return
        self._skipped_s += seconds
        if self._skipped_s < _LEARNED_EVERY_S and self._fit.counts[kind] >= _ALL_LEARNED:
            return
        self._skipped_s = 0.0
        self._fit.observe(
            # What the steps leave open, such as prompts of one length, goes to the first that explains it. So times
            # beyond what was seen grow with the tokens.
            (
                1.0,
                float(step.prompt_tokens),
                step.attended_tokens,
                float(step.sent_tokens),
                1.0 if step.prompt_tokens else 0.0,
                float(step.running),
                float(step.context_tokens),
            ),
            seconds,
            kind,
        )
        fixed, token, prior, sent, prompt, answer, context = self._fit.coefficients
        prompts, answers, both = self._fit.counts
        parts = fixed, prompt, token, prior, answer, context
        self.times = StepTimes(*parts, prompts + both, answers + both, *self._fit.error(), sent)


_handover_fit = partial(OnlineFit, 2, known_count=_HANDOVERS_MIN)


class HandoverLearner:
    """Learns from the hand-overs of one worker. One event loop owns it."""

    def __init__(self) -> None:
        self._all = _handover_fit()
        self._links: Recent[str, OnlineFit] = Recent(_LINKS_MAX)

    def observe(self, payload_bytes: int, seconds: float, link: str = "") -> None:
        """A hand-over has ended so long after the end of computing."""
        if payload_bytes <= 0:
            return
        own = self._links[link] = self._links.get(link) or _handover_fit()
        for fit in (self._all, own):
            fit.observe((1.0, float(payload_bytes)), seconds)

    @property
    def times(self) -> HandoverTimes:
        """The hand-overs over all links."""
        return _handover_times(self._all)

    def links_to(self, link: str) -> dict[str, HandoverTimes]:
        """The hand-overs over one of the last links, by its name. Empty for others."""
        fit = self._links.get(link)
        return {} if fit is None else {link: _handover_times(fit)}


def _handover_times(fit: OnlineFit) -> HandoverTimes:
    fixed_s, s_per_byte = fit.coefficients
    return HandoverTimes(fixed_s, s_per_byte, fit.counts[0], *fit.error())


def step_times_to_proto(times: StepTimes) -> time_model_pb2.StepTimes:
    return time_model_pb2.StepTimes(**asdict(times))


def step_times_from_proto(message: time_model_pb2.StepTimes) -> StepTimes:
    return StepTimes(*attrgetter(*StepTimes.__match_args__)(message))


def time_model_to_proto(model: TimeModel) -> time_model_pb2.TimeModel:
    return time_model_pb2.TimeModel(**asdict(model))


def time_model_from_proto(message: time_model_pb2.TimeModel, worker: str) -> TimeModel:
    """What `worker` has learned: nothing if a value of its report is not possible, which is logged once."""
    links = {link: _handovers_from_proto(times) for link, times in message.links.items()}
    steps, handovers = (
        step_times_from_proto(message.steps),
        _handovers_from_proto(message.handovers),
    )
    impossible = impossible_part(steps, handovers, *links.values())
    if impossible:
        _log_impossible(worker, impossible)
        return TimeModel()
    return TimeModel(steps, handovers, links)


def impossible_part(*several: StepTimes | HandoverTimes) -> str:
    """The name of a value that is negative, not a number, or too large to compute with. Empty without one."""
    values = ((name, getattr(one, name)) for one in several for name in one.__match_args__)
    return next((name for name, value in values if not 0 <= value < _POSSIBLE_MAX), "")


@lru_cache(maxsize=4_096)
def _log_impossible(worker: str, name: str) -> None:
    """Once for each worker and name."""
    _LOG.warning(
        "%s reports an impossible %s: times of other workers replace its own", worker, name
    )


def _handovers_from_proto(message: time_model_pb2.HandoverTimes) -> HandoverTimes:
    return HandoverTimes(*attrgetter(*HandoverTimes.__match_args__)(message))
