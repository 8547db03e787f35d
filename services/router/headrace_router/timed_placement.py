"""Placement among workers of both roles: where a prompt is computed, and which worker generates. Pure.

The cost of a choice is in seconds, which this request or others lose:

    time to the first token
    + what the answer takes from other work: the time by which it makes steps longer, over the whole answer
    + by how much its tokens would be late in all
    + twice by how much its first token would be late

An answer that joins others costs little, and one on a worker without answers costs the fixed part of every step. So
answers gather on few workers, and the others compute prompts, as far as the bounds of the requests allow. When prompts
would wait, they are computed wherever steps have time to spare.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from headrace.inference.v1 import bounds_pb2, inference_pb2
from headrace_common.durations import duration_from_seconds
from headrace_router.workers.table import Flags, LoadTable, Numbers

_KEPT: Final = 0.97
"""Of the bound on the time per output token, as the engines keep it."""
_FIRST_KEPT: Final = 0.85
"""Of the bound on the time to first token: predictions are not exact."""
_LATE_WEIGHT: Final = 2.0
_MESSAGES_S: Final = 0.02
"""Of a hand-over, beside its writes: the queue, the opening of the transfer, and its last acknowledgement."""
_SHARE_MIN: Final = 0.05
_LENGTH_GAIN: Final = 0.05
_FIRST_LENGTH: Final = 128.0
_DEFAULT_TPOT_STEPS: Final = 4.0
"""Without a bound on the time per output token, steps may take this many times those of one answer."""


@dataclass(frozen=True, slots=True)
class TokenTargets:
    """When the tokens of a request should come. None: no bound. `elapsed_s` is the time since its arrival."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    elapsed_s: float = 0.0
    answer_tokens: float = 1.0
    """Tokens that the answer is expected to have."""

    def bounds(self, *, started: bool) -> bounds_pb2.TokenBounds | None:
        """For the workers. `started`: whether the first token has come. None without bounds."""
        bounds = bounds_pb2.TokenBounds()
        if self.ttft_s is not None and not started:
            left_s = max(0.0, self.ttft_s - self.elapsed_s)
            bounds.first_token_remaining.CopyFrom(duration_from_seconds(left_s))
            bounds.ttft_target.CopyFrom(duration_from_seconds(self.ttft_s))
        if self.tpot_s is not None:
            bounds.tpot_target.CopyFrom(duration_from_seconds(self.tpot_s))
        return bounds if bounds.ListFields() else None


NO_TARGETS: Final = TokenTargets()


class AnswerLengths:
    """The mean length of the answers of each model. Recent ones count more. One event loop owns it."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def ended(self, model: str, tokens: int) -> None:
        """An answer has ended after `tokens`."""
        mean = self._means.get(model, float(tokens))
        self._means[model] = mean + _LENGTH_GAIN * (tokens - mean)

    def expected(self, model: str, tokens_max: int) -> float:
        """Tokens that an answer of at most `tokens_max` is expected to have."""
        return max(1.0, min(self._means.get(model, _FIRST_LENGTH), tokens_max))


@dataclass(frozen=True, slots=True)
class TimedCosts:
    """The cheapest way on each generating worker. Arrays have shape [worker].

    `prefill_row` is the row of the worker that computes the prompt. `first_s` is the predicted time to first token from
    now, and `step_s` the time of a step with the answer.
    """

    cost_s: Numbers
    prefill_row: Numbers
    first_s: Numbers
    step_s: Numbers


def timed_costs(
    table: LoadTable,
    missing: Numbers,
    targets: TokenTargets,
    *,
    usable: Flags,
    computing: Flags,
    handing_over: Flags | None,
    placement: inference_pb2.PrefillPlacement.ValueType,
    now_s: float | None = None,
) -> TimedCosts | None:
    """The costs of the workers in `usable`. None where the times of one of them are not known.

    `missing` has the prompt tokens that each worker lacks. `computing`: those that compute prompts for others.
    `handing_over`: those that leave this prompt to another worker, as long as one computes prompts. None: none do.
    """
    columns = table.times
    if not columns.known[usable].all():
        return None
    fixed, prompt, token, answer, context = columns.steps
    tokens, head, head_start_s = columns.prompts
    held = table.held_tokens
    requests = table.requests
    # An answer's context is at most what is reserved for it.
    with_others = fixed + answer * requests + context * held
    step_s = with_others + answer + context * missing
    now_step_s = np.where(requests > 0, with_others, 0.0)
    tpot_s = targets.tpot_s or 0.0
    tpot: Numbers = np.where(tpot_s > 0, tpot_s, _DEFAULT_TPOT_STEPS * (fixed + answer))
    # What answers leave of a worker's time. Those that wait for their prompts will run beside this one.
    busy = now_step_s * (1.0 + columns.errors) / (_KEPT * tpot)
    share = np.clip(1.0 - busy, _SHARE_MIN, 1.0)
    elapsed_s = np.maximum(0.0, (time.monotonic() if now_s is None else now_s) - head_start_s)
    done = np.minimum(head, elapsed_s * share / np.maximum(token, 1e-9))
    work = np.where(tokens > 0, tokens - done, 0.0)
    alone_s = prompt + token * (work + missing)
    # The answers that run now end, and then the prompts have all of the time.
    ended_s = alone_s + now_step_s * targets.answer_tokens
    compute_s = np.where(missing > 0, np.minimum(alone_s / share, ended_s), 0.0)

    rows: Numbers = np.arange(len(table), dtype=np.float64)
    first_s: Numbers = compute_s + step_s
    prefill_row = rows
    if placement != inference_pb2.PREFILL_PLACEMENT_LOCAL:
        remote_s, remote_row = _remote(table, compute_s, missing, usable & computing, rows)
        remote_s += step_s
        forced: bool | Flags = placement == inference_pb2.PREFILL_PLACEMENT_REMOTE
        if handing_over is not None:
            forced = handing_over | forced
        chosen = (missing > 0) & np.isfinite(remote_s) & (forced | (remote_s < first_s))
        first_s = np.where(chosen, remote_s, first_s)
        prefill_row = np.where(chosen, remote_row, prefill_row)
    late_s = np.maximum(0.0, step_s - _KEPT * tpot) * targets.answer_tokens
    cost_s = first_s + (step_s - now_step_s) * targets.answer_tokens + late_s
    if targets.ttft_s is not None:
        allowed_s = _FIRST_KEPT * targets.ttft_s - targets.elapsed_s
        cost_s = cost_s + _LATE_WEIGHT * np.maximum(0.0, first_s - allowed_s)
    return TimedCosts(cost_s, prefill_row, first_s, step_s)


def _remote(
    table: LoadTable, compute_s: Numbers, missing: Numbers, computing: Flags, rows: Numbers
) -> tuple[Numbers, Numbers]:
    """For each worker, the earliest end of a hand-over from another one, and that one's row."""
    candidates = np.where(computing, compute_s, np.inf)
    order = np.argsort(candidates)[:2]
    best = np.full(len(table), order[0])
    if len(order) > 1:
        best[order[0]] = order[1]
    end_s: Numbers = candidates[best]
    fixed_s, byte_s = table.times.handovers[:, best]
    end_s = end_s + _MESSAGES_S + fixed_s + byte_s * table.token_bytes * missing
    return np.where(best == rows, np.inf, end_s), best.astype(np.float64)
