"""Whether a prefix is fetched from a decode worker or computed. Pure."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from headrace_kv.layout.layout import WorkerRef

_LINKS_MAX: Final = 1_024
_SPEED_KEPT_S: Final = 60.0
"""After this time a speed counts no longer, so that it is measured again."""
_PAUSE_S: Final = 30.0
"""How long nothing is fetched from a decode worker after a failure."""
_NEW_SHARE: Final = 0.5


@dataclass(slots=True)
class _Speed:
    """A mean of measurements in which later ones count more."""

    s_per_token: float
    measured_s: float

    def add(self, s_per_token: float, now_s: float) -> None:
        self.s_per_token += _NEW_SHARE * (s_per_token - self.s_per_token)
        self.measured_s = now_s


class FetchPolicy:
    """Fetches prefixes of `min_tokens` and more, where fetching was faster than computing.

    The time of a fetch counts from its decision to the arrival of its last layer. Speeds that are not known yet, or no
    longer, decide nothing.
    """

    def __init__(self, min_tokens: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.min_tokens = min_tokens
        self._clock_s = clock_s
        self._compute: _Speed | None = None
        self._links: OrderedDict[WorkerRef, _Speed] = OrderedDict()
        self._paused_until_s: OrderedDict[WorkerRef, float] = OrderedDict()

    def prefers_fetch(self, decode: WorkerRef, token_count: int) -> bool:
        """Whether to fetch so many tokens from this decode worker."""
        return token_count >= self.min_tokens and self._may_fetch(decode)

    def _may_fetch(self, decode: WorkerRef) -> bool:
        if self._clock_s() < self._paused_until_s.get(decode, 0.0):
            return False
        link, compute = self._known(self._links.get(decode)), self._known(self._compute)
        return link is None or compute is None or link < compute

    def fetched(self, decode: WorkerRef, token_count: int, seconds: float) -> None:
        """Tokens have come from a decode worker."""
        s_per_token = seconds / max(1, token_count)
        known = self._links.get(decode)
        if self._known(known) is None or known is None:
            self._links[decode] = _Speed(s_per_token, self._clock_s())
        else:
            known.add(s_per_token, self._clock_s())
        self._links.move_to_end(decode)
        if len(self._links) > _LINKS_MAX:
            self._links.popitem(last=False)

    def failed(self, decode: WorkerRef) -> None:
        """A fetch from a decode worker has failed."""
        self._paused_until_s[decode] = self._clock_s() + _PAUSE_S
        self._paused_until_s.move_to_end(decode)
        if len(self._paused_until_s) > _LINKS_MAX:
            self._paused_until_s.popitem(last=False)

    def computed(self, token_count: int, seconds: float) -> None:
        """This worker has computed tokens of a prompt, beside others."""
        if token_count <= 0:
            return
        s_per_token = seconds / token_count
        if self._known(self._compute) is None or self._compute is None:
            self._compute = _Speed(s_per_token, self._clock_s())
        else:
            self._compute.add(s_per_token, self._clock_s())

    def _known(self, speed: _Speed | None) -> float | None:
        if speed is None or self._clock_s() - speed.measured_s > _SPEED_KEPT_S:
            return None
        return speed.s_per_token
