"""When KV is fetched from another worker instead of being computed. Pure, but for a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from headrace_common.tasks import Recent
from headrace_common.time_model.model import HandoverLearner, HandoverTimes, StepTimes, TimeModel

DEFAULT_GAIN: Final = 0.2
_LINKS_MAX: Final = 1_024
_PAUSE_S: Final = 30.0
_MEASURED_AGAIN_S: Final = 300.0
_MIN_TOKENS: Final = 64
# Before anything is learned: a slow network's round trips, and its bytes at 1 GB/s.
_PRIOR: Final = HandoverTimes(fixed_s=0.02, s_per_byte=1e-9)


@dataclass(eq=False, slots=True)
class FetchRule:
    """KV is fetched where that saves at least the share `gain` of the time to compute its tokens. 0: always, 1: never.

    After a failure, nothing is fetched over that link for 30 s. A link that is too slow is measured again after five
    minutes. One event loop owns it.
    """

    gain: float = DEFAULT_GAIN
    clock_s: Callable[[], float] = time.monotonic
    _fetches: HandoverLearner = field(default_factory=HandoverLearner, init=False)
    _retry_s: Recent[str, float] = field(default_factory=partial(Recent, _LINKS_MAX), init=False)
    _slow_s: Recent[str, float] = field(default_factory=partial(Recent, _LINKS_MAX), init=False)

    @property
    def min_tokens(self) -> int:
        """Fewer are computed."""
        return _MIN_TOKENS if self.gain else 1

    def may_fetch(self, link: str, token_count: int) -> bool:
        """Whether so many tokens may be worth it."""
        paused = self.gain >= 1.0 or self.clock_s() < self._retry_s.get(link, 0.0)
        return token_count >= self.min_tokens and not paused

    def prefers_fetch(
        self, link: str, start_token: int, end_token: int, payload_bytes: float, steps: StepTimes
    ) -> bool:
        """Whether to fetch the KV of these tokens of a prompt. Not while the time to compute them is unknown."""
        count = end_token - start_token
        if not (self.gain and self.may_fetch(link, count)):
            return self.may_fetch(link, count)
        times = TimeModel(steps, self._fetches.times, self._fetches.links_to(link))
        # A step has its fixed part for the tokens after these anyway.
        step_s, least_s = (times.step_s(one, prior_tokens=start_token) for one in (count, 1))
        if step_s is None or least_s is None:
            return False
        fetch_s = times.handover_s(payload_bytes, link)
        if fetch_s is None:
            fetch_s = _PRIOR.fixed_s + _PRIOR.s_per_byte * payload_bytes
        if fetch_s <= (1.0 - self.gain) * (step_s - least_s):
            return True
        now_s = self.clock_s()
        if now_s < self._slow_s.setdefault(link, now_s) + _MEASURED_AGAIN_S:
            return False
        del self._slow_s[link]
        return True

    def fetched(self, link: str, payload_bytes: int, seconds: float) -> None:
        """KV has come over a link, so long after the decision."""
        self._fetches.observe(payload_bytes, seconds, link)

    def failed(self, link: str) -> None:
        """A fetch has failed."""
        self._retry_s[link] = self.clock_s() + _PAUSE_S
