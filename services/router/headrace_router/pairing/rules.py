"""The policy for pairs of places, and the measured time of hand-overs between them. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from headrace.registry.v1 import registry_pb2
from headrace_common.registry.place import Level, Place

_DEFAULT_FAR_WEIGHT: Final = 0.5
_PAIRS_MAX: Final = 4_096
_DECAY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class PairRules:
    """The part of the deployment's policy for pairs. See Policy in registry.proto."""

    level: Level = Level.NONE
    required: bool = False
    far_weight: float = _DEFAULT_FAR_WEIGHT

    @classmethod
    def from_proto(cls, policy: registry_pb2.Policy) -> PairRules:
        """Converts a policy. Absent fields get their defaults. A level of a later version counts as none."""
        known = policy.pair_level in registry_pb2.PairLevel.values()
        return cls(
            level=Level(policy.pair_level) if known else Level.NONE,
            required=policy.pair_rule == registry_pb2.PAIR_RULE_REQUIRE,
            far_weight=policy.far_weight if policy.HasField("far_weight") else _DEFAULT_FAR_WEIGHT,
        )

    def allow(self, prefill: Place | None, decode: Place | None) -> bool:
        """Whether KV may be handed over from one place to another, both at `level`."""
        return not self.required or self.level is Level.NONE or _is_same(prefill, decode)


@dataclass(slots=True)
class _Lag:
    """Seconds and tokens, with weights that decay."""

    tokens: float = 0.0
    lag_s: float = 0.0
    recorded_s: float = 0.0

    def record(self, tokens: int, lag_s: float, now_s: float) -> None:
        kept = math.exp(-max(0.0, now_s - self.recorded_s) / _DECAY_S) if self.tokens else 0.0
        self.tokens = kept * self.tokens + tokens
        self.lag_s = kept * self.lag_s + lag_s
        self.recorded_s = now_s

    @property
    def s_per_token(self) -> float:
        return self.lag_s / self.tokens if self.tokens else 0.0


class LinkTimes:
    """Measured lag of hand-overs by pair of places, in seconds a token.

    The lag is the time from the end of computing to the end of the last write: what a hand-over adds to the time to the
    first token. A pair without measurement has the mean of the measured pairs of its kind, within a place or between
    places.
    """

    def __init__(self, pairs_max: int = _PAIRS_MAX) -> None:
        self._pairs_max = pairs_max
        self._pairs: OrderedDict[tuple[Place | None, Place | None], _Lag] = OrderedDict()
        self._measured: dict[Place | None, set[Place | None]] = {}
        self._kinds = {True: _Lag(), False: _Lag()}

    def record(
        self,
        prefill: Place | None,
        decode: Place | None,
        *,
        tokens: int,
        lag_s: float,
        now_s: float,
    ) -> None:
        """A hand-over of `tokens` has ended."""
        if tokens <= 0:
            return
        pair = prefill, decode
        lag = self._pairs.pop(pair, None) or _Lag()
        self._pairs[pair] = lag
        self._measured.setdefault(decode, set()).add(prefill)
        if len(self._pairs) > self._pairs_max:
            (old_prefill, old_decode), _ = self._pairs.popitem(last=False)
            self._measured[old_decode].discard(old_prefill)
        lag.record(tokens, max(0.0, lag_s), now_s)
        self._kinds[_is_same(prefill, decode)].record(tokens, max(0.0, lag_s), now_s)

    def measured(self, decode: Place | None) -> Set[Place | None]:
        """The places of prefill workers with a measurement of their own for a decode worker's place."""
        return self._measured.get(decode, frozenset())

    def s_per_token(self, prefill: Place | None, decode: Place | None) -> float:
        """The lag of a token. 0 before the first measurement."""
        lag = self._pairs.get((prefill, decode))
        return (lag or self._kinds[_is_same(prefill, decode)]).s_per_token


def pair_cost(
    rules: PairRules,
    links: LinkTimes,
    compute_s_per_token: float,
    prefill: Place | None,
    decode: Place | None,
) -> float:
    """Cost of a token that is handed over, relative to computing it.

    It is the measured lag, plus `far_weight` between places. The lag counts 0 while `compute_s_per_token` is 0, which
    means unknown. Both places are at the level of the rules.
    """
    if rules.level is Level.NONE:
        return 0.0
    lag_s = links.s_per_token(prefill, decode)
    cost = lag_s / compute_s_per_token if compute_s_per_token > 0 else 0.0
    return cost if _is_same(prefill, decode) else cost + rules.far_weight


def cheapest_pair_cost(
    rules: PairRules,
    links: LinkTimes,
    compute_s_per_token: float,
    prefills: Set[Place | None],
    decode: Place | None,
) -> float | None:
    """The least cost of a hand-over to a place. None when the rules allow none."""
    special: set[Place | None] = {decode}
    if rules.required and rules.level is not Level.NONE:
        prefills = special & prefills if decode is not None else frozenset()
    # All others cost the same. Deployments may have hundreds of places.
    special |= links.measured(decode)
    compared = special & prefills
    other = next((one for one in prefills if one not in special), None)
    if len(compared) < len(prefills):
        compared.add(other)
    return min(
        (pair_cost(rules, links, compute_s_per_token, one, decode) for one in compared),
        default=None,
    )


def _is_same(prefill: Place | None, decode: Place | None) -> bool:
    """Unknown places are equal to none."""
    return prefill is not None and prefill == decode
