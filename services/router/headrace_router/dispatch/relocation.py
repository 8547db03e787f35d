"""Which running answer should move to another decode worker, and where. Pure.

Plans have the number of the answer, and the row of the worker that takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from headrace_common.registry.adapters import Adapter
from headrace_router.workers.table import Flags, LoadTable, Numbers

_KEPT: Final = 0.9
"""Of each bound, after a move. So a worker that takes an answer is far from giving one."""
_GIVERS_MAX: Final = 16
"""Of the workers with late steps, those for which a plan looks for room. Each costs a look at all workers."""


class RunningAnswer(NamedTuple):
    """An answer on the worker of `row`, which has so many tokens of prompt and answer.

    `tpot_s` is its bound on the time per output token, infinite without one. `movable`: whether it may move now.
    """

    row: int
    tokens: int
    tpot_s: float
    movable: bool = True
    adapter: Adapter | None = None


def may_be_late(table: LoadTable, tpot_s: float) -> bool:
    """Whether steps of a worker may take longer than `tpot_s`. Cheap beside the plans."""
    return bool((table.times.step_s(table.requests, table.held_tokens) > tpot_s).any())


def late_answer(
    table: LoadTable, answers: Sequence[RunningAnswer], tpot_s: float
) -> tuple[int, int] | None:
    """An answer on a worker with steps beyond the bound of an answer, where another worker has room.

    By the times that the workers have learned, all of its steps take at most 0.9 of every bound afterwards. `tpot_s`
    is the bound of answers that are not among these. Only the latest workers with movable answers are looked at.
    """
    bounds_s, own = _bounds_s(table, answers, tpot_s), np.zeros(len(table.workers))
    for one in answers:
        own[one.row] += one.tokens
    # What is held has the growth too. Of other routers' answers nothing else is known.
    tokens = np.where(table.external_requests > 0, table.held_tokens, own)
    step_s = table.times.step_s(table.requests, tokens)
    gives = table.reachable & ~table.draining & table.times.answers_known
    shortest: dict[int, int] = {}
    for index, one in enumerate(answers):
        if one.movable and one.tokens < answers[shortest.setdefault(one.row, index)].tokens:
            shortest[one.row] = index
    rows = np.array([*shortest], np.intp)
    late_s = np.where(gives & np.isfinite(bounds_s), step_s - bounds_s, 0.0)[rows]
    latest = np.argsort(-late_s)[: min(_GIVERS_MAX, np.count_nonzero(late_s > 0))]
    for row in rows[latest]:
        index = shortest[row]
        one = answers[index]
        room = table.roomy(1, one.tokens, np.minimum(bounds_s, one.tpot_s), _KEPT)
        room &= _takers(table, one)
        if room.any():
            return index, int(np.where(room, step_s, np.inf).argmin())
    return None


def gathered_answer(
    table: LoadTable, answers: Sequence[RunningAnswer], tpot_s: float, fill: float
) -> tuple[int, int] | None:
    """An answer of the worker with the fewest ones, where the fullest other one has room for all of them.

    That is filled up to 0.9 of `fill`, and new answers up to `fill`.
    """
    busy = (table.requests > 0) & table.reachable & ~table.draining
    count = np.where(busy, table.requests, np.inf)
    # The last one of equals gives, the first one takes.
    source = len(count) - 1 - int(count[::-1].argmin())
    index = _shortest(answers, source)
    if index is None:
        return None
    bounds_s = _bounds_s(table, answers, tpot_s)
    bound_s = np.minimum(bounds_s, bounds_s[source])
    room = table.roomy(count[source], table.held_tokens[source], bound_s, _KEPT * fill)
    room &= busy & _takers(table, answers[index])
    return (index, int(np.where(room, table.requests, -1).argmax())) if room.any() else None


def _bounds_s(table: LoadTable, answers: Sequence[RunningAnswer], tpot_s: float) -> Numbers:
    """The tightest bound of the answers of each worker."""
    bounds_s = np.full(len(table.workers), tpot_s)
    for one in answers:
        bounds_s[one.row] = min(bounds_s[one.row], one.tpot_s)
    return bounds_s


def _shortest(answers: Sequence[RunningAnswer], row: int) -> int | None:
    """The answer of a worker with the least KV to send."""
    found = (index for index, one in enumerate(answers) if one.row == row and one.movable)
    return min(found, key=lambda index: answers[index].tokens, default=None)


def _takers(table: LoadTable, one: RunningAnswer) -> Flags:
    """The other workers that can have the KV of an answer, and have learned how long their steps are."""
    others: Flags = (table.layout_of == table.layout_of[one.row]) & (table.rows != one.row)
    return others & table.serving(one.adapter) & table.times.answers_known
