"""What a choice of workers costs a request and others, in seconds. Pure: columns over the workers.

Where workers of both roles are alone, the cost has a worker that computes the prompt for each that may generate:

    time to the first token
    + 0.15 x what the request takes from other work: the time by which its answer makes steps longer, over the whole
      answer, and what a hand-over costs both workers
    + by how much its tokens would be late in all
    + twice by how much its first token would be late

Time of others counts less than the request's own, because others need it only where they have to wait. An answer that
joins others costs little of it, and one on a worker without answers costs the fixed part of every step. So answers
gather on few workers, and the others compute prompts, where hand-overs cost little beside that. When prompts would
wait, they are computed wherever steps have time to spare.

Else the workers that generate can do nothing better, so answers spread. Policy decides which prompts go to the prefill
queue, and the cost has the whole answer:

    time to the first token
    + the steps of the answer
    + what it adds to the steps of each answer that runs there, and at least a price of the tokens that are held there
    + by how much its tokens, and twice by how much its first token would be late

Times that a worker has not learned have a prior: TimeColumns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.inference.v1 import bounds_pb2
from headrace_common.durations import duration_from_seconds
from headrace_common.time_model.model import TimeModel
from headrace_kv.layout import KvLayout, WorkerRef
from headrace_router.workers.table import (
    DEFAULT_TPOT_STEPS,
    NO_TIMES,
    TOKEN_ROW,
    Flags,
    LoadTable,
    Numbers,
    Worker,
)

Rows = NDArray[np.intp]
_Bound: TypeAlias = float | Numbers | None
_Column: TypeAlias = Numbers | Sequence[float]
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
_HELD_SHARE: Final = 0.25
"""Of the time to compute a token: what a held one takes from others at least. See docs/adr/0001-overlap-weight.md."""
MESSAGES_S: Final = 0.02
"""Of a hand-over, beside its writes: the queue, the opening of the transfer, and its last acknowledgement."""
_WAIT_MAX_S: Final = 3_600.0
"""Of the prefill queue: a full one has an infinite wait."""
_SHARE_MIN: Final = 0.05
DIVIDED_MIN_S: Final = 0.1
"""The least time to first token of a prompt that is worth the messages of two workers."""


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


@dataclass(slots=True)
class Asked:
    """What a request asks of each worker: `missing` has the prompt tokens that it lacks, of `needed_tokens`.

    `missing_weight` is a factor on the time of these in costs, and not in times. `early_first`: whether the first token
    waits for no hand-over. It must not be changed.
    """

    missing: Numbers
    needed_tokens: int
    targets: TokenTargets
    missing_weight: float = 1.0
    early_first: bool = False
    before: Numbers = field(init=False)
    """The mean number of tokens before each missing one."""
    lacks: Flags = field(init=False)
    """Whether a worker lacks tokens."""

    def __post_init__(self) -> None:
        self.before = self.needed_tokens - self.missing / 2
        self.lacks = self.missing > 0

    def late_s(self, first_s: Numbers, step_s: Numbers, tpot_s: _Bound) -> Numbers | float:
        """What late tokens cost, where steps have this bound."""
        targets = self.targets
        late_s: Numbers | float = 0.0
        if tpot_s is not None:
            late_s = np.maximum(0.0, step_s - _KEPT * tpot_s) * targets.answer_tokens
        if targets.ttft_s is not None:
            allowed_s = _FIRST_KEPT * targets.ttft_s - targets.elapsed_s
            late_s = late_s + _LATE_WEIGHT * np.maximum(0.0, first_s - allowed_s)
        return late_s


@dataclass(frozen=True, slots=True)
class PairCosts:
    """What the policy for pairs of places makes of each worker of the table. Columns have shape [worker].

    `allowed`: whether a pulling prefill worker may hand KV over to it. `extra` is the cost of a token that is handed
    over from the best of them, relative to computing it.
    """

    allowed: Flags
    extra: Numbers


@dataclass(slots=True)
class Candidates:
    """The workers at one moment. It must not be changed.

    `cached_tokens` has shape [worker]: the cached prompt tokens of each worker of the table, with slower tiers counted
    for less. It is None when nothing is known. `prefill` gives the pulling prefill workers by layout fingerprint, and
    `prefill_times` what the mean one has learned. `queue_wait_s` is how long a prompt would wait for one. `pairs` is
    None without a policy for pairs of places.
    """

    decode: LoadTable
    cached_tokens: Numbers | None = None
    prefill: Mapping[KvLayout, frozenset[WorkerRef]] = field(default_factory=dict)
    queue_wait_s: float = 0.0
    pairs: PairCosts | None = None
    prefill_times: TimeModel = NO_TIMES


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
class Costs:
    """The cheapest way on each generating worker. Arrays have shape [worker].

    `first_s` is the predicted time to first token from now, and `step_s` the time of a step with the answer.
    `prefill_row` is the row of the worker that computes the prompt, -1 where the queue decides.
    """

    cost_s: Numbers
    first_s: Numbers
    step_s: Numbers
    prefill_row: Rows


@dataclass(frozen=True, slots=True)
class CostsOfBoth(Costs):
    """Those among workers of both roles, with what other decisions need."""

    local_s: Numbers
    """`first_s` with a local prefill. Infinite where that is not allowed."""
    computed_s: Numbers
    """Until a worker has computed and sent the prompt for another one. Infinite where it may not."""
    started_s: Numbers
    """What a step with prompts takes beside them. Infinite where answers run: their slack is not known."""
    joined_s: Numbers
    """Until an answer joins the steps of a worker. Infinite beside prompts: their steps may be long."""

    def others(
        self, table: LoadTable, asked: Asked, row: int, fit: Flags
    ) -> tuple[OtherDecision, ...]:
        """The best decision of each kind other than the cheapest one on worker `row`, which was made.

        Answers may be generated on the workers in `fit`. Decisions without a good prediction are left out.
        """
        taken = int(self.prefill_row[row])
        # What this worker computes will be observed.
        started_s = self.started_s.copy()
        started_s[taken] = 0.0
        own = self.prefill_row == table.rows
        joined_s = np.where(own | asked.early_first, 0.0, self.joined_s)
        away_s = self.first_s + joined_s + started_s[self.prefill_row]
        away_s[~fit] = away_s[row] = np.inf
        early = asked.early_first and asked.missing[row] > 0
        handed_over_s = _handed_over_s(table, asked.missing, self.step_s, slice(None), row)
        after_s = MESSAGES_S if early else handed_over_s + self.joined_s[row]
        here_s = self.computed_s + after_s + started_s
        here_s[[taken, row]] = np.inf
        prompt_s = float((self.local_s if taken == row else self.computed_s)[taken])
        away, prefill = int(away_s.argmin()), int(here_s.argmin())
        ways = [
            (OTHER_DECODE, away, int(self.prefill_row[away]), float(away_s[away])),
            (REMOTE if taken == row else OTHER_PREFILL, row, prefill, float(here_s[prefill])),
            (LOCAL, row, row, float(self.local_s[row] + started_s[row])),
        ]
        return tuple(
            OtherDecision(
                kind=kind,
                worker=table.workers[at],
                prefill=table.workers[by].ref,
                first_s=first_s - prompt_s if by == taken else first_s,
                after_prompt=by == taken,
            )
            for kind, at, by, first_s in ways
            if math.isfinite(first_s) and (at, by) != (row, taken)
        )


def costs_of_both(
    candidates: Candidates, asked: Asked, computing: Flags, forced: bool | Flags
) -> CostsOfBoth:
    """The costs of workers of both roles.

    `computing`: those that compute this prompt for others. `forced`: those that leave it to another worker, as long as
    one computes it.
    """
    table, missing, targets = candidates.decode, asked.missing, asked.targets
    fixed, _, _, _, answer, _, sent = table.times.steps
    now_step_s, added_s = _steps_s(table, table.times.steps, missing)
    step_s = now_step_s + added_s
    now_step_s = np.where(table.requests > 0, now_step_s, 0.0)
    tpot_s: float | Numbers = targets.tpot_s or DEFAULT_TPOT_STEPS * (fixed + answer)
    missing_s = _missing_s(table, asked)
    compute_s = _computed_s(table, asked, missing_s, now_step_s, tpot_s)

    local_s: Numbers = compute_s + step_s
    others_s: Numbers = (step_s - now_step_s) * targets.answer_tokens
    sent_s = sent * missing
    computed_s = np.where(computing, compute_s + sent_s, np.inf)
    # For each worker, the other one that would compute the prompt first. Its own row where there is no other.
    order = np.argsort(computed_s)[:2]
    best = np.full(len(table.workers), order[0])
    best[order[0]] = order[-1]
    # The answer goes on after the hand-over, whichever worker makes its first token.
    remote_s = computed_s[best] + _handed_over_s(table, missing, step_s, best, table.rows)
    remote_s = np.where(best != table.rows, remote_s, np.inf)
    local_s = np.where(forced & np.isfinite(remote_s), np.inf, local_s)
    chosen = remote_s < local_s
    begun_s = np.minimum(remote_s, local_s)
    first_s = np.where(chosen & asked.early_first, computed_s[best] + MESSAGES_S, begun_s)
    # Sending takes the time of one worker, and receiving about as much of the other one.
    others_s = np.where(chosen, others_s + 2.0 * sent_s[best], others_s)
    prefill_row: Rows = np.where(chosen, best, table.rows)
    cost_s = begun_s + _OTHERS_WEIGHT * others_s + asked.late_s(first_s, step_s, tpot_s)
    if asked.missing_weight != 1.0:
        cost_s += (asked.missing_weight - 1.0) * missing_s[prefill_row]
    started_s = np.where(asked.lacks, np.where(now_step_s > 0, np.inf, fixed), now_step_s / 2)
    joined_s = np.where(table.times.prompts[0] > 0, np.inf, now_step_s / 2)
    return CostsOfBoth(
        cost_s, first_s, step_s, prefill_row, local_s, computed_s, started_s, joined_s
    )


def best_parts(
    times: tuple[_Column, _Column],
    cached_tokens: tuple[int, int],
    end_token: int,
    step_tokens: int,
    layout: KvLayout,
    gain: float,
    *,
    parts_max: int = 2,
    undivided_s: float | None = None,
) -> tuple[tuple[int, ...], float] | None:
    """The best parts of a prompt below `end_token` that two workers compute in turn, and when they have done so.

    A part is the end of its tokens, and the last part is left out. `times`: columns of TimeColumns of both. The first
    worker begins, and its first part has as many steps as needed. Each other part is one step at most. It begins with
    the first layer of the step before, and its worker has the parts before that one. None where that is not earlier
    than `undivided_s` by the share `gain`, by default than the first worker alone.
    """
    block_tokens, start = layout.block_tokens, max(cached_tokens)
    least = max(start, end_token - 1 - step_tokens)
    lasts = np.arange(-(-(least + 1) // block_tokens) * block_tokens, end_token, block_tokens)
    if not (step_tokens and len(lasts)):
        return None
    if undivided_s is None:
        undivided_s = float(_parts_s(times[0], cached_tokens[0], end_token, step_tokens)[0])
    steps = -(-(end_token - start) // step_tokens)
    best: tuple[tuple[int, ...], float] = (), math.inf
    for count in {min(parts_max, max(2, one)) for one in (2, steps, steps + steps % 2)}:
        # Equal parts, of which only the first may be longer than a step.
        number = np.arange(1, count)[:, None]
        equal = start + (lasts - start) * number // (count - 1)
        longest = max(1, step_tokens // block_tokens) * block_tokens
        ends = np.maximum(equal, lasts - (count - 1 - number) * longest)
        ends = ends // block_tokens * block_tokens
        begun_s = _in_turn_s(times, cached_tokens[0], (*ends, end_token), step_tokens, layout)
        begun_s[np.diff(ends, axis=0, prepend=start).min(axis=0) <= 0] = np.inf
        at = int(begun_s.argmin())
        if begun_s[at] < best[1]:
            best = tuple(map(int, ends[:, at])), float(begun_s[at])
    late = undivided_s < DIVIDED_MIN_S or best[1] > (1.0 - gain) * undivided_s
    return None if late else best


def _in_turn_s(
    times: tuple[_Column, _Column],
    start: int,
    ends: Sequence[int | Rows],
    step_tokens: int,
    layout: KvLayout,
) -> Numbers:
    """When two workers have computed the parts of a prompt from `start` on, see `best_parts`."""
    ended_s, last_s = _parts_s(times[0], start, ends[0], step_tokens)
    begun_s, free_s = ended_s - last_s, np.zeros_like(ended_s)
    token_bytes = layout.token_bytes / layout.layer_count
    for number, (sent_from, begin, end) in enumerate(zip((0, *ends), ends, ends[1:], strict=False)):
        sender, worker = times[number % 2], times[1 - number % 2]
        sent_s = sender[-2] + sender[-1] * token_bytes * (begin - sent_from) + MESSAGES_S
        own_s, _ = _parts_s(worker, begin, end, step_tokens)
        # A worker reserves blocks for the part before once it is free.
        begun_s = np.maximum(begun_s, free_s) + sent_s
        free_s, ended_s = ended_s, np.maximum(begun_s + own_s, ended_s + sent_s)
    return ended_s


def _parts_s(
    times: _Column, start: int | Rows, end: int | Rows, step_tokens: int
) -> tuple[Numbers, Numbers]:
    """How long a worker with these times computes tokens [start, end) of a prompt, and the last of its steps."""
    fixed, prompt, token, attended, _, _, sent, *_ = times
    count = np.asarray(end - start, np.float64)
    steps = np.ceil(count / step_tokens)
    tail = count - (steps - 1) * step_tokens
    all_s = steps * (fixed + prompt) + (token + sent + attended * (start + count / 2)) * count
    tail_s = fixed + prompt + (token + sent + attended * (end - tail / 2)) * tail
    return all_s, tail_s


def alone_s(table: LoadTable, asked: Asked, row: int) -> float:
    """How long a worker computes and sends what it lacks of the prompt, beside nothing else."""
    sent_s = table.times.steps[-1, row] * asked.missing[row]
    return float(_missing_s(table, asked)[row] + sent_s)


def costs_of_pools(candidates: Candidates, asked: Asked, remote: Flags | None) -> Costs:
    """The costs of workers that generate, where the prompts of those in `remote` go to the queue. None: of none."""
    table, targets = candidates.decode, asked.targets
    # Workers of a kind learn different times in the same steps. That must not gather answers.
    now_step_s, added_s = _steps_s(table, table.times.mean_steps, asked.needed_tokens)
    step_s = now_step_s + added_s
    remote_count = 0 if remote is None else np.count_nonzero(remote)
    if not remote_count:
        remote = None
    if remote is not None and remote_count == len(remote):
        missing_s, prompt_s = _queued_s(candidates, asked)
    else:
        missing_s = _missing_s(table, asked)
        prompt_s = _computed_s(table, asked, missing_s, now_step_s, targets.tpot_s)
        if remote is not None:
            queued = _queued_s(candidates, asked)
            prompt_s = np.where(remote, queued[1], prompt_s)
            if asked.missing_weight != 1.0:
                missing_s = np.where(remote, queued[0], missing_s)
    begun_s = first_s = prompt_s + step_s
    if asked.early_first and remote is not None:
        first_s = np.where(remote, prompt_s - _handover_s(candidates, asked), begun_s)
    # What others lose: time in each step, or room for the prefixes that they will need.
    held_s = (_HELD_SHARE * table.times.mean_steps[TOKEN_ROW]) * table.held_tokens
    others_s = np.maximum((targets.answer_tokens * added_s) * table.requests, held_s)
    cost_s = begun_s + targets.answer_tokens * step_s + others_s
    if targets.ttft_s is not None or targets.tpot_s is not None:
        cost_s += asked.late_s(first_s, step_s, targets.tpot_s)
    if asked.missing_weight != 1.0:
        cost_s += (asked.missing_weight - 1.0) * missing_s
    prefill_row = table.rows if remote is None else np.where(remote, -1, table.rows)
    return Costs(cost_s, first_s, step_s, prefill_row)


def _steps_s(
    table: LoadTable, steps: list[float] | Numbers, tokens: float | Numbers
) -> tuple[Numbers, float | Numbers]:
    """The times of a step with the running answers, and of what one after `tokens` adds. Contexts are what is held."""
    fixed, _, _, _, answer, context, _ = steps
    now_s: Numbers = fixed + answer * table.requests + context * table.held_tokens
    return now_s, answer + context * tokens


def _missing_s(table: LoadTable, asked: Asked) -> Numbers:
    """How long each worker alone computes what it lacks of the prompt."""
    _, prompt, token, attended, *_ = table.times.steps
    missing = asked.missing
    return np.where(asked.lacks, prompt + (token + attended * asked.before) * missing, 0.0)


def _computed_s(
    table: LoadTable, asked: Asked, missing_s: Numbers, now_step_s: Numbers, tpot_s: _Bound
) -> Numbers:
    """Until each worker has computed what it lacks, after its other prompts and beside its answers.

    Without a bound on their steps, answers leave it all of the time.
    """
    answers_s: Numbers | float = 0.0
    share: Numbers | float = 1.0
    if tpot_s is not None:
        answers_s = np.where(table.requests > 0, now_step_s, 0.0)
        # What they leave of a worker's time. Those that wait for their prompts will run beside this one.
        share = np.maximum(_SHARE_MIN, 1.0 - answers_s / (_KEPT * tpot_s))
    alone_s = missing_s
    if table.times.with_prompts:
        _, _, token, attended, *_ = table.times.steps
        tokens, attended_tokens, head, head_attended, head_start_s = table.times.prompts
        # The first one has had its turn for a while.
        done_s = np.maximum(0.0, time.monotonic() - head_start_s) * share
        done_s = np.minimum(token * head + attended * head_attended, done_s)
        alone_s = missing_s + (token * tokens + attended * attended_tokens - done_s)
    if tpot_s is not None:
        # The answers that run now end, and then the prompts have all of the time.
        ended_s = alone_s + answers_s * asked.targets.answer_tokens
        alone_s = np.minimum(alone_s / share, ended_s)
    return np.where(asked.lacks, alone_s, 0.0)


def _queued_s(candidates: Candidates, asked: Asked) -> tuple[Numbers, Numbers]:
    """How long the queue takes for what a worker lacks, without and with its wait. Unknown times are that worker's."""
    steps = candidates.prefill_times.steps
    if steps.knows_prompts:
        token_s = steps.s_per_prompt_token + steps.s_per_attended_token * asked.before
        compute_s = steps.fixed_s + steps.prompt_s + token_s * asked.missing
    else:
        compute_s = _missing_s(candidates.decode, asked)
    if candidates.pairs is not None:
        compute_s = compute_s * (1.0 + candidates.pairs.extra)
    queued_s: Numbers = compute_s + (_handover_s(candidates, asked) + MESSAGES_S)
    return queued_s, queued_s + min(_WAIT_MAX_S, candidates.queue_wait_s)


def _handover_s(candidates: Candidates, asked: Asked) -> Numbers:
    """How long prefill workers hand over what each worker lacks."""
    times = candidates.prefill_times.handovers
    return times.fixed_s + times.s_per_byte * candidates.decode.token_bytes * asked.missing


def _handed_over_s(
    table: LoadTable, missing: Numbers, step_s: Numbers, by: Rows | slice, rows: Rows | int
) -> Numbers:
    """From the end of computing on workers `by` until others generate. Infinite where nothing is missing."""
    fixed_s, byte_s = table.times.handovers[:, by]
    found_s = fixed_s + byte_s * (table.token_bytes[rows] * missing[rows])
    found: Numbers = np.where(missing[rows] > 0, found_s + MESSAGES_S + step_s[rows], np.inf)
    return found
