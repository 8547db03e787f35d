"""A worker's measured speed. Pure.

It has the time to first token by prompt length, and the time between tokens by KV usage and context length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace_common.config import NonNegativeCount, NonNegativeSeconds, PositiveSeconds

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_POINTS_MAX = 10_000
_MEASURED_CHARACTERS_MAX = 4_000


class _Point(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PrefillPoint(_Point):
    """The time to first token of one prompt on an idle prefill worker."""

    prompt_tokens: _Positive
    ttft_s: PositiveSeconds


class DecodePoint(_Point):
    """A decode worker at one KV usage and mean context length."""

    kv_usage: Annotated[float, Field(ge=0, le=1)]
    context_tokens: _Positive
    itl_s: PositiveSeconds
    tokens_per_s: _Positive

    @property
    def requests(self) -> float:
        """The requests that make tokens at the same time."""
        return self.tokens_per_s * self.itl_s


class TransferTime(_Point):
    """The time to hand the KV cache of a prompt over, apart from computing it."""

    fixed_s: NonNegativeSeconds = 0.0
    s_per_token: NonNegativeSeconds = 0.0


class WorkerProfile(_Point):
    """Measured points of one prefill worker and one decode worker.

    The simulator also needs the size of a worker: the tokens that its KV memory holds and the most requests of a decode
    worker. Both are 0 where they are unknown. `measured` says what was measured.
    """

    prefill: Annotated[tuple[PrefillPoint, ...], Field(min_length=1, max_length=_POINTS_MAX)]
    decode: Annotated[tuple[DecodePoint, ...], Field(min_length=1, max_length=_POINTS_MAX)]
    kv_tokens: NonNegativeCount = 0
    max_num_seqs: NonNegativeCount = 0
    transfer: TransferTime = TransferTime()
    host_load_s_per_token: NonNegativeSeconds = 0.0
    measured: Annotated[str, Field(max_length=_MEASURED_CHARACTERS_MAX)] = ""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        lengths = [point.prompt_tokens for point in self.prefill]
        if sorted(set(lengths)) != lengths:
            raise ValueError("write the points of prefill in increasing order of prompt_tokens")
        return self

    def ttft_s(self, prompt_tokens: float) -> float:
        """Time to first token on an idle prefill worker, linear between the points.

        Below the first point it is that of the first, and beyond the last it grows with the length.
        """
        lengths = [point.prompt_tokens for point in self.prefill]
        times = [point.ttft_s for point in self.prefill]
        if prompt_tokens >= lengths[-1]:
            return times[-1] * prompt_tokens / lengths[-1]
        return _between(lengths, times, prompt_tokens)

    def expected_itl_s(self, kv_usage: float, context_tokens: float) -> float:
        """Time between tokens at this usage, from the points with the nearest context length."""
        points = self._points_near(context_tokens)
        usages = [point.kv_usage for point in points]
        return _between(usages, [point.itl_s for point in points], kv_usage)

    def step_s(self, requests: float, context_tokens: float) -> float:
        """Time of a decode step of so many requests with this mean context.

        It is linear between the numbers of requests and between the context lengths that were measured. It goes on in
        a line beyond the most requests, and is that of the nearest context beyond the others.
        """
        contexts = sorted({point.context_tokens for point in self.decode})
        times = [self._step_at(requests, context) for context in contexts]
        return _between(contexts, times, context_tokens)

    def _step_at(self, requests: float, context_tokens: float) -> float:
        """The same at a context length that was measured."""
        points = sorted(
            (point for point in self.decode if point.context_tokens == context_tokens),
            key=lambda point: point.requests,
        )
        last = points[-1]
        if requests > last.requests and len(points) > 1:
            before = points[-2]
            slope = (last.itl_s - before.itl_s) / max(1e-9, last.requests - before.requests)
            return last.itl_s + max(0.0, slope) * (requests - last.requests)
        return _between(
            [point.requests for point in points], [point.itl_s for point in points], requests
        )

    def best_decode(self, itl_s: float, context_tokens: float) -> DecodePoint:
        """The load with the most tokens per second that reaches `itl_s`, on the lines between measured points.

        It has the nearest context length. When no point reaches `itl_s`, the fastest one is returned.
        """
        points = self._points_near(context_tokens)
        reaching = [point for point in points if point.itl_s <= itl_s]
        if not reaching:
            return min(points, key=lambda point: point.itl_s)
        between = [
            _point_with(itl_s, before, after)
            for before, after in pairwise(points)
            if before.itl_s < itl_s < after.itl_s
        ]
        return max((*reaching, *between), key=lambda point: point.tokens_per_s)

    def _points_near(self, context_tokens: float) -> list[DecodePoint]:
        """The points of the context length next to this one, by usage."""
        nearest = min(
            (point.context_tokens for point in self.decode),
            key=lambda length: (abs(length - context_tokens), length),
        )
        points = [point for point in self.decode if point.context_tokens == nearest]
        return sorted(points, key=lambda point: point.kv_usage)


def _point_with(itl_s: float, before: DecodePoint, after: DecodePoint) -> DecodePoint:
    """The point with this time between tokens on the line between two points."""
    share = (itl_s - before.itl_s) / (after.itl_s - before.itl_s)
    return DecodePoint(
        kv_usage=before.kv_usage + share * (after.kv_usage - before.kv_usage),
        context_tokens=before.context_tokens,
        itl_s=itl_s,
        tokens_per_s=before.tokens_per_s + share * (after.tokens_per_s - before.tokens_per_s),
    )


def _between(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear interpolation. Outside of the points it is the value of the nearest one."""
    index = bisect_left(xs, x)
    if index == 0:
        return ys[0]
    if index == len(xs):
        return ys[-1]
    share = (x - xs[index - 1]) / (xs[index] - xs[index - 1])
    return ys[index - 1] + share * (ys[index] - ys[index - 1])
