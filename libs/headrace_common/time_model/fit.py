"""A linear fit of times with coefficients of at least 0, which is updated with every observation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from operator import add, mul
from typing import Final, NamedTuple

_KEPT: Final = 0.99
"""What an observation still counts after the next one of its kind: about 100 of a kind decide."""
_PASSES: Final = 2
_FIRST_PASSES: Final = 10
_FIRST_COUNT: Final = 50
_SECONDS_MIN: Final = 1e-6
# A residual beyond this multiple of the usual one counts as if it were at it.
_OUTLIER: Final = 3.0
_SPREAD_START: Final = 0.2
_SPREAD_MIN: Final = 0.02
_SPREAD_GAIN: Final = 0.1
_PACE_GAIN: Final = 0.2
_ERRORS_MAX: Final = 200


class FitError(NamedTuple):
    """Quantiles of the relative errors of the last predictions, each made before its observation. 0 without any."""

    p50: float = 0.0
    p90: float = 0.0


class OnlineFit:
    """Minimizes relative errors. Outliers count little, and old observations less with each new one of their kind.

    Kinds keep what one sort of observations has shown while only others come. The fit is by coordinate descent on the
    normal equations: what the observations leave open stays as it was. The pace follows the last few observations of
    all kinds: other work on the same processors slows all of them, for a while.
    """

    def __init__(self, feature_count: int, kind_count: int = 1, known_count: int = 1) -> None:
        """From `known_count` observations of a kind on, predictions count for the error."""
        self._known_count = known_count
        self._coefficients = [0.0] * feature_count
        self._log_pace = 0.0
        self.counts = [0] * kind_count
        """Observations of each kind."""
        zeros = [0.0] * feature_count
        self._squares = [[list(zeros) for _ in zeros] for _ in range(kind_count)]
        self._products = [list(zeros) for _ in range(kind_count)]
        self._square_sums = [list(zeros) for _ in zeros]
        self._product_sums = list(zeros)
        self._spread = _SPREAD_START
        self._errors: deque[float] = deque(maxlen=_ERRORS_MAX)

    def predict(self, features: Sequence[float]) -> float:
        """The seconds of an observation with these features."""
        return math.exp(self._log_pace) * self._usual(features)

    @property
    def coefficients(self) -> list[float]:
        """The seconds of a unit of each feature, at the present pace."""
        pace = math.exp(self._log_pace)
        return [pace * coefficient for coefficient in self._coefficients]

    def observe(self, features: Sequence[float], seconds: float, kind: int = 0) -> None:
        """An observation of a kind took so long."""
        seconds = max(_SECONDS_MIN, seconds)
        usual = self._usual(features) if self.counts[kind] else seconds
        if self.counts[kind] >= self._known_count:
            # The bound is that of time_model.proto.
            self._errors.append(min(1e6, abs(self.predict(features) - seconds) / seconds))
            self._follow_pace(seconds / max(_SECONDS_MIN, usual))
        self._add(features, seconds, kind, self._weight(usual, seconds))
        self.counts[kind] += 1
        self._descend(_PASSES if sum(self.counts) > _FIRST_COUNT else _FIRST_PASSES)

    def error(self) -> FitError:
        """The relative errors of the last predictions."""
        errors = sorted(self._errors) or [0.0]
        return FitError(errors[len(errors) // 2], errors[len(errors) * 9 // 10])

    def _usual(self, features: Sequence[float]) -> float:
        return float(sum(map(mul, self._coefficients, features)))

    def _follow_pace(self, ratio: float) -> None:
        bound = _OUTLIER * self._spread
        residual = math.log(ratio) - self._log_pace
        self._log_pace += _PACE_GAIN * min(bound, max(-bound, residual))

    def _weight(self, predicted: float, seconds: float) -> float:
        """Of relative residuals. Those far beyond the usual ones pull no more than one at the bound."""
        predicted = max(_SECONDS_MIN, predicted)
        residual = abs(seconds - predicted) / max(seconds, predicted)
        bound = _OUTLIER * self._spread
        self._spread += _SPREAD_GAIN * (min(residual, bound) - self._spread)
        self._spread = max(_SPREAD_MIN, self._spread)
        # A first prediction that was far too long is left soon, and a time near 0 does not decide.
        return bound / max(residual, bound) / (predicted * max(seconds, predicted / 4))

    def _add(self, features: Sequence[float], seconds: float, kind: int, weight: float) -> None:
        squares, products = self._squares[kind], self._products[kind]
        for index, feature in enumerate(features):
            row, scaled = squares[index], weight * feature
            if not feature and not row[index]:
                continue
            squares[index] = [
                _KEPT * square + scaled * other for square, other in zip(row, features, strict=True)
            ]
            products[index] = _KEPT * products[index] + scaled * seconds
            sums, product = squares[index], products[index]
            for other_kind, others in enumerate(self._squares):
                if other_kind != kind:
                    sums = list(map(add, sums, others[index]))
                    product += self._products[other_kind][index]
            self._square_sums[index], self._product_sums[index] = sums, product

    def _descend(self, passes: int) -> None:
        coefficients = self._coefficients
        rows = [
            (index, row, row[index], product)
            for index, (row, product) in enumerate(
                zip(self._square_sums, self._product_sums, strict=True)
            )
            if row[index] > 0.0
        ]
        for _ in range(passes):
            for index, row, square, product in rows:
                rest = product - sum(map(mul, row, coefficients))
                coefficients[index] = max(0.0, coefficients[index] + rest / square)
