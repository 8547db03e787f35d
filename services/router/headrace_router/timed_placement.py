"""Placement among workers of both roles: where a prompt is computed, and which worker generates. Pure.

The cost of a choice is in seconds, which this request or others lose:

    time to the first token
    + 0.15 x what the request takes from other work: the time by which its answer makes steps longer, over the whole
      answer, and what a hand-over costs both workers
    + by how much its tokens would be late in all
    + twice by how much its first token would be late

Time of others counts less than the request's own, because others need it only where they have to wait. An answer that
joins others costs little of it, and one on a worker without answers costs the fixed part of every step. So answers
gather on few workers, and the others compute prompts, where hand-overs cost little beside that. When prompts would
wait, they are computed wherever steps have time to spare.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.inference.v1 import bounds_pb2, inference_pb2
from headrace_common.durations import duration_from_seconds
from headrace_kv.layout import WorkerRef
from headrace_router.workers.table import Flags, LoadTable, Numbers, TimeColumns, Worker

Rows = NDArray[np.intp]
LOCAL: Final = "local prefill"
REMOTE: Final = "remote prefill"
OTHER_PREFILL: Final = "other prefill worker"
OTHER_DECODE: Final = "other decode worker"
"""How another way differs from the one that was taken."""
_KEPT: Final = 0.97
"""Of the bound on the time per output token, as the engines keep it."""
_FIRST_KEPT: Final = 0.85
"""Of the bound on the time to first token: predictions are not exact."""
_LATE_WEIGHT: Final = 2.0
_OTHERS_WEIGHT: Final = 0.15
"""Of the time that a request takes from others. In a model of steps, 0.05 to 0.25 suited most loads."""
MESSAGES_S: Final = 0.02
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
class OtherDecision:
    """A decision that was not made. `kind`: how it differs.

    `first_s` is its predicted time to first token. With `after_prompt`, the same worker computes the prompt. Then
    `first_s` counts from the end of computing, after a local prefill from the first token.
    """

    kind: str
    worker: Worker
    prefill: WorkerRef
    first_s: float
    after_prompt: bool

    def estimate_s(self, prompt_s: float) -> float:
        """Its time to first token. `prompt_s` is the observed time of what `first_s` counts from."""
        return self.first_s + prompt_s if self.after_prompt else self.first_s


@dataclass(frozen=True, slots=True)
class RemotePrefills:
    """The times of prompts that one worker computes for another one.

    `computed_s` is until a worker has computed and sent it, infinite where it may not. The other columns are of the
    worker that generates: `step_s` as in TimedCosts, and the bytes that it lacks.
    """

    computed_s: Numbers
    handovers: Numbers
    step_s: Numbers
    missing_bytes: Numbers

    def first_s(self, prefill_rows: Rows | slice, rows: Rows | int) -> Numbers:
        """The time to first token of pairs of different workers. Infinite where nothing is missing."""
        fixed_s, byte_s = self.handovers[:, prefill_rows]
        found_s = self.computed_s[prefill_rows] + MESSAGES_S + self.step_s[rows]
        found_s += fixed_s + byte_s * self.missing_bytes[rows]
        found: Numbers = np.where(self.missing_bytes[rows] > 0, found_s, np.inf)
        return found


@dataclass(frozen=True, slots=True)
class TimedCosts:
    """The cheapest way on each generating worker. Arrays have shape [worker].

    `prefill_row` is the row of the worker that computes the prompt. `first_s` is the predicted time to first token from
    now, and `step_s` the time of a step with the answer.
    """

    cost_s: Numbers
    prefill_row: Rows
    first_s: Numbers
    step_s: Numbers
    local_s: Numbers
    """`first_s` with a local prefill. Infinite where that is not allowed."""
    remote: RemotePrefills
    started_s: Numbers
    """What a step with prompts takes beside them. Infinite where answers run: their slack is not known."""
    joined_s: Numbers
    """Until an answer joins the steps of a worker. Infinite beside prompts: their steps may be long."""

    def others(self, table: LoadTable, row: int, fit: Flags) -> tuple[OtherDecision, ...]:
        """The best decision of each kind other than the cheapest one on worker `row`, which was made.

        Answers may be generated on the workers in `fit`. Decisions without a good prediction are left out.
        """
        taken = int(self.prefill_row[row])
        # What this worker computes will be observed.
        started_s = self.started_s.copy()
        started_s[taken] = 0.0
        own = self.prefill_row == np.arange(len(fit))
        away_s = self.first_s + np.where(own, 0.0, self.joined_s) + started_s[self.prefill_row]
        away_s[~fit] = away_s[row] = np.inf
        here_s = self.remote.first_s(slice(None), row) + self.joined_s[row] + started_s
        here_s[[taken, row]] = np.inf
        prompt_s = float((self.local_s if taken == row else self.remote.computed_s)[taken])
        away, prefill = int(away_s.argmin()), int(here_s.argmin())
        ways = [
            (OTHER_DECODE, away, int(self.prefill_row[away]), float(away_s[away])),
            (REMOTE if taken == row else OTHER_PREFILL, row, prefill, float(here_s[prefill])),
        ]
        if taken != row:
            ways.append((LOCAL, row, row, float(self.local_s[row] + started_s[row])))
        return tuple(
            OtherDecision(
                kind=kind,
                worker=table.workers[at],
                prefill=table.workers[by].ref,
                first_s=first_s - prompt_s if by == taken else first_s,
                after_prompt=by == taken,
            )
            for kind, at, by, first_s in ways
            if math.isfinite(first_s)
        )


def timed_costs(
    table: LoadTable,
    missing: Numbers,
    needed_tokens: int,
    targets: TokenTargets,
    *,
    usable: Flags,
    computing: Flags,
    handing_over: Flags | None,
    placement: inference_pb2.PrefillPlacement.ValueType,
    now_s: float | None = None,
) -> TimedCosts | None:
    """The costs of the workers in `usable`. None where the times of one of them are not known.

    `missing` has the prompt tokens that each worker lacks, of `needed_tokens`. `computing`: those that compute prompts
    for others. `handing_over`: those that leave this prompt to another worker, as long as one computes prompts. None:
    none do.
    """
    columns = table.times
    if not columns.known[usable].all():
        return None
    fixed, prompt, token, attended, sent, answer, context = columns.steps
    held = table.held_tokens
    requests = table.requests
    # An answer's context is at most what is reserved for it.
    with_others = fixed + answer * requests + context * held
    step_s = with_others + answer + context * missing
    now_step_s = np.where(requests > 0, with_others, 0.0)
    tpot_s = targets.tpot_s or 0.0
    tpot: Numbers = np.where(tpot_s > 0, tpot_s, _DEFAULT_TPOT_STEPS * (fixed + answer))
    # What answers leave of a worker's time. Those that wait for their prompts will run beside this one.
    share = np.clip(1.0 - now_step_s / (_KEPT * tpot), _SHARE_MIN, 1.0)
    alone_s = prompt + token * missing + attended * missing * (needed_tokens - missing / 2)
    alone_s += _waiting_s(columns, share, time.monotonic() if now_s is None else now_s)
    # The answers that run now end, and then the prompts have all of the time.
    ended_s = alone_s + now_step_s * targets.answer_tokens
    compute_s = np.where(missing > 0, np.minimum(alone_s / share, ended_s), 0.0)

    rows: Rows = np.arange(len(table))
    local_s: Numbers = compute_s + step_s
    others_s: Numbers = (step_s - now_step_s) * targets.answer_tokens
    sent_s = sent * missing
    computed_s = np.full(len(table), np.inf)
    if placement != inference_pb2.PREFILL_PLACEMENT_LOCAL:
        computed_s = np.where(usable & computing, compute_s + sent_s, np.inf)
    remote = RemotePrefills(computed_s, columns.handovers, step_s, table.token_bytes * missing)
    best = _computing_rows(computed_s)
    remote_s = np.where(best != rows, remote.first_s(best, rows), np.inf)
    forced: bool | Flags = placement == inference_pb2.PREFILL_PLACEMENT_REMOTE
    if handing_over is not None:
        forced = handing_over | forced
    local_s = np.where(forced & np.isfinite(remote_s), np.inf, local_s)
    chosen = remote_s < local_s
    first_s = np.minimum(remote_s, local_s)
    # Sending takes the time of one worker, and receiving about as much of the other one.
    others_s = np.where(chosen, others_s + 2.0 * sent_s[best], others_s)
    prefill_row: Rows = np.where(chosen, best, rows)
    late_s = np.maximum(0.0, step_s - _KEPT * tpot) * targets.answer_tokens
    cost_s = first_s + _OTHERS_WEIGHT * others_s + late_s
    if targets.ttft_s is not None:
        allowed_s = _FIRST_KEPT * targets.ttft_s - targets.elapsed_s
        cost_s = cost_s + _LATE_WEIGHT * np.maximum(0.0, first_s - allowed_s)
    started_s = np.where(now_step_s > 0, np.inf, fixed)
    return TimedCosts(
        cost_s=cost_s,
        prefill_row=prefill_row,
        first_s=first_s,
        step_s=step_s,
        local_s=local_s,
        remote=remote,
        started_s=np.where(missing > 0, started_s, now_step_s / 2),
        joined_s=np.where(columns.prompts[0] > 0, np.inf, now_step_s / 2),
    )


def _waiting_s(columns: TimeColumns, share: Numbers, now_s: float) -> Numbers:
    """Time of each worker for the prompts that it has, without answers. The first one has had its turn for a while."""
    _, _, token, attended, *_ = columns.steps
    tokens, attended_tokens, head, head_attended, head_start_s = columns.prompts
    done_s = np.minimum(
        token * head + attended * head_attended, np.maximum(0.0, now_s - head_start_s) * share
    )
    waiting_s: Numbers = token * tokens + attended * attended_tokens - done_s
    return waiting_s


def _computing_rows(computed_s: Numbers) -> Rows:
    """For each worker, the other one that would compute the prompt first. Its own row where there is no other."""
    order = np.argsort(computed_s)[:2]
    best = np.full(len(computed_s), order[0])
    if len(order) > 1:
        best[order[0]] = order[1]
    return best
