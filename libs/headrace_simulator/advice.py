"""Which workers to start for a load: the ways that are tried, what was simulated of each, and the choice. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import attrgetter
from typing import Any, Final

from headrace_common.errors import ConfigError
from headrace_simulator.settings import SimulationSettings, Way
from headrace_simulator.trace import BLOCK_TOKENS, TOKENS_MAX, TraceRequest

GOOD_SHARE: Final = 0.9
"""The share of requests that must keep both bounds."""
REQUESTS_MAX: Final = 600
"""Requests of the load that are replayed: those in a row that arrive fastest."""
_SPLITS_MAX: Final = 15
_PREFIXES: Final = 8
PLAIN, POOLS, BOTH = "plain engines", "prefill and decode", "both roles"


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers of `ranks` devices each. `both` has no pools, and are plain engines where `is_plain`."""

    ranks: int
    prefill: int = 0
    decode: int = 0
    both: int = 0
    is_plain: bool = False

    @property
    def kind(self) -> str:
        """PLAIN, POOLS or BOTH."""
        return PLAIN if self.is_plain else BOTH if self.both else POOLS

    @property
    def devices(self) -> int:
        """Those of all workers."""
        return self.ranks * (self.prefill + self.decode + self.both)

    @property
    def label(self) -> str:
        """For people."""
        if self.both:
            return f"{self.both} {'plain' if self.is_plain else 'of both roles'}"
        return f"{self.prefill} prefill, {self.decode} decode"

    def settings(self, ttft_s: float, tpot_s: float) -> SimulationSettings:
        """The simulation of these workers."""
        return SimulationSettings(
            prefill_workers=self.prefill,
            decode_workers=max(1, self.decode),
            both_workers=self.both,
            way=Way.PLAIN if self.is_plain else Way.KV_AWARE,
            ttft_s=ttft_s,
            itl_s=tpot_s,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """A fleet, and the result of its simulation as SimulationResult has it."""

    fleet: Fleet
    result: Mapping[str, Any]

    @property
    def share(self) -> float:
        """That of requests within both bounds."""
        return float(self.result["attainment"])

    @property
    def is_good(self) -> bool:
        """Whether enough requests keep the bounds."""
        return self.share >= GOOD_SHARE

    @property
    def rank(self) -> tuple[float, ...]:
        """The best is the smallest: good ones by devices, of equals plain engines first; all others by their shares."""
        devices, is_split = self.fleet.devices, not self.fleet.is_plain
        if self.is_good:
            return (0, devices, is_split, -self.share)
        return (1, -self.share, devices, is_split)


def fleets_of(ranks: int, workers: int) -> list[Fleet]:
    """The ways to use so many workers: plain engines, splits in two pools (of up to 16 workers all), and both roles."""
    splits = [
        Fleet(ranks, prefill, workers - prefill)
        for prefill in range(1, workers, 1 + max(0, workers - 2) // _SPLITS_MAX)
    ]
    plain = Fleet(ranks, both=workers, is_plain=True)
    return [plain, *splits, *([Fleet(ranks, both=workers)] if workers > 1 else [])]


@dataclass(eq=False, slots=True)
class Search:
    """Looks for the fewest devices. `outcomes` has all that `simulate` has made of fleets with so many ranks."""

    simulate: Callable[[int, Sequence[Fleet]], Sequence[Mapping[str, Any]]]
    outcomes: dict[Fleet, Outcome] = field(default_factory=dict)

    def run(self, workers_max: Mapping[int, int]) -> Outcome:
        """The best fleet. `workers_max`: the most workers, by their ranks. More workers are never worse."""
        for ranks, most in workers_max.items():
            low, high = 0, most
            if not self._meets(ranks, most):
                continue
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if self._meets(ranks, middle) else (middle, high)
        return min(self.outcomes.values(), key=attrgetter("rank"))

    def _meets(self, ranks: int, workers: int) -> bool:
        fleets = fleets_of(ranks, workers)
        found = list(map(Outcome, fleets, self.simulate(ranks, fleets)))
        self.outcomes.update((one.fleet, one) for one in found)
        return any(one.is_good for one in found)


def reason(best: Outcome, outcomes: Iterable[Outcome]) -> str:
    """Why, in a sentence or two."""
    plain = [one for one in outcomes if one.fleet.is_plain]
    if not best.is_good:
        return f"No way keeps the bounds with these devices: {_what_is_late(best)}."
    if best.fleet.is_plain:
        return "Do not disaggregate: plain engines keep the bounds with as few devices as any other way."
    needed = min((one.fleet.devices for one in plain if one.is_good), default=0)
    more = f"need {needed} devices" if needed else "do not with all devices either"
    equal = [one for one in plain if one.fleet.devices == best.fleet.devices]
    if not equal:
        return f"Plain engines do not keep the bounds with as many devices. They {more}."
    near = max(equal, key=lambda one: one.share)
    kept = f"plain engines keep both bounds for {near.share:.0%} of the requests"
    return f"With as many devices, {kept}: {_what_is_late(near)}. They {more}."


def _what_is_late(one: Outcome) -> str:
    late_first = one.result["ttft_attainment"] < one.result["itl_attainment"]
    return "prompts wait for others" if late_first else "prompts delay running answers"


@dataclass(frozen=True, slots=True)
class Spread:
    """Lengths in tokens: their mean and standard deviation. They are log-normal."""

    mean: float
    deviation: float = 0.0

    @classmethod
    def of(cls, option: str, text: str) -> Spread:
        """From "MEAN" or "MEAN,DEVIATION". Raises ConfigError."""
        parts = text.split(",")
        if len(parts) > 2 or not all(one.isdecimal() for one in parts) or not int(parts[0]):
            raise ConfigError(f"{option} {text}: give MEAN,DEVIATION in tokens, such as 4000,2000")
        return cls(*map(int, parts))

    def draw(self, numbers: random.Random) -> int:
        """One length."""
        variance = math.log1p((self.deviation / self.mean) ** 2)
        drawn = numbers.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))
        return max(1, round(min(TOKENS_MAX, drawn)))


def made_load(
    prompts: Spread, answers: Spread, rate: float, hit_share: float, *, count: int = REQUESTS_MAX
) -> list[TraceRequest]:
    """Poisson arrivals at `rate` a second. Each prompt begins as one of a few others for `hit_share` of its tokens."""
    numbers = random.Random(0)
    made: list[TraceRequest] = []
    arrivals = accumulate(numbers.expovariate(rate) for _ in range(count))
    for number, arrival_s in enumerate(arrivals):
        tokens = prompts.draw(numbers)
        shared = int(hit_share * tokens / BLOCK_TOKENS)
        first = numbers.randrange(_PREFIXES) << 20
        ids = tuple(range(first, first + shared))
        made.append(TraceRequest(number, arrival_s, tokens, answers.draw(numbers), ids))
    return made


def busiest(trace: Sequence[TraceRequest], rate: float = 0.0) -> list[TraceRequest]:
    """At most REQUESTS_MAX requests in a row that arrive fastest, from 0 s on; faster or slower with a `rate`."""
    last = min(len(trace), REQUESTS_MAX) - 1
    starts = range(len(trace) - last)
    start = min(starts, key=lambda one: trace[one + last].arrival_s - trace[one].arrival_s)
    zero_s, span_s = trace[start].arrival_s, trace[start + last].arrival_s - trace[start].arrival_s
    factor = last / rate / span_s if rate and span_s else 1.0
    return [
        replace(one, number=number, arrival_s=factor * (one.arrival_s - zero_s))
        for number, one in enumerate(trace[start : start + last + 1])
    ]
