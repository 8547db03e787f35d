"""Computes blocks of some handed-over prompts again, while the worker is idle."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple

from opentelemetry.trace import Span

from headrace_common.tasks import end_task
from headrace_decode.attempt import DecodeAttempt
from headrace_engine.interface import BlockErrors, DecodeWork, Engine, ReceivedBlock
from headrace_kv.layout import WorkerRef
from headrace_kv.messages import Reservation
from headrace_kv.receive.verification import CorruptSenderTracker

LEARNED_COMPARISONS: Final = 8
_MARGIN: Final = 4.0
"""Times the largest difference of the comparisons that were learned from."""


class _Bounds(NamedTuple):
    """Of a tolerance: nothing below the first is a fault, and nothing above the second is learned."""

    least: float
    most: float


_BOUNDS: Final = {
    "float32": _Bounds(0.001, 0.02),
    "float16": _Bounds(0.01, 0.1),
    "bfloat16": _Bounds(0.05, 0.15),
}
_QUANTIZED: Final = _Bounds(0.1, 0.25)
"""One value of a pair may be rounded up and the other one down."""


@dataclass(frozen=True, slots=True, order=True)
class Difference:
    """The first layer that differs by more than its tolerance, and its head that differs most."""

    layer: int
    head: int
    error: float
    tolerance: float

    def __str__(self) -> str:
        return f"layer {self.layer}, head {self.head} differ by {self.error:.2g}, more than {self.tolerance:.2g}"


class PairTolerance:
    """The tolerance of each layer, for one pair of workers.

    The first comparisons are held against the bound of the type. A pair with a fault at its start exceeds it, so the
    fault is not learned.
    """

    def __init__(self, dtype: str) -> None:
        """`dtype`: the layout's name of the type of KV."""
        self._bounds = _BOUNDS.get(dtype, _QUANTIZED)
        self._largest: dict[int, float] = {}
        self._comparisons = 0

    @property
    def learned(self) -> bool:
        """Whether it has seen enough comparisons."""
        return self._comparisons >= LEARNED_COMPARISONS

    def difference(self, errors: BlockErrors) -> Difference | None:
        """None where every head is within its tolerance."""
        found: dict[int, Difference] = {}
        for (layer, head), error in errors.items():
            one = Difference(layer, head, error, self._tolerance(layer))
            if error > one.tolerance and (layer not in found or error > found[layer].error):
                found[layer] = one
        return found[min(found)] if found else None

    def learn(self, errors: BlockErrors) -> None:
        """A comparison without a difference. Later ones change nothing."""
        if self.learned:
            return
        self._comparisons += 1
        for (layer, _), error in errors.items():
            self._largest[layer] = max(error, self._largest.get(layer, 0.0))

    def _tolerance(self, layer: int) -> float:
        least, most = self._bounds
        if not self.learned:
            return most
        return min(most, max(least, _MARGIN * self._largest.get(layer, most)))


_LOG = logging.getLogger(__name__)

_DIFFERENCES_MAX: Final = 2
BLOCKS_MAX: Final = 8
"""Of one prompt, drawn at random. Each of them is a step of the engine."""
_PAIRS_MAX: Final = 1024
_RESETS_MAX: Final = 20
_RESET_PAUSE_S: Final = 0.1
_SETTLE_S: Final = 0.05
"""A worker without requests is idle after this time."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A request that has ended. `span` is that of its attempt."""

    work: DecodeWork
    reservation: Reservation
    prefill: WorkerRef
    span: Span


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result for one request. No blocks were compared if none were cached any more, or the worker became busy.

    `quarantined`: the worker accepts no more KV from `prefill`.
    """

    transfer_id: str
    prefill: WorkerRef
    span: Span
    start_unix_ns: int
    end_unix_ns: int
    block_count: int
    difference: Difference | None = None
    quarantined: bool = False

    @property
    def outcome(self) -> str:
        """For metrics."""
        if self.quarantined:
            return "quarantined"
        if self.difference is not None:
            return "different"
        return "same" if self.block_count else "dropped"


@dataclass(slots=True)
class _Pair:
    """`requests`: those that were handed over since the last comparison."""

    tolerance: PairTolerance
    requests: int = 0


class Canary:
    """Rejects a prefill worker for a while after two requests with KV that this worker computes differently.

    One event loop owns it. Call `attempt_closed` for every attempt.
    """

    def __init__(
        self,
        engine: Engine,
        interval_requests: int,
        *,
        on_compared: Callable[[Comparison], None],
        random: Random | None = None,
    ) -> None:
        """Compares one of `interval_requests` of each prefill worker, and each of its first ones until its tolerance is
        learned.
        """
        group = engine.descriptor.layout.groups[0]
        self._engine = engine
        self._interval_requests = interval_requests
        self._block_tokens, self._dtype = group.block_tokens, group.parts[0].dtype
        self._on_compared = on_compared
        self._random = random or Random()
        self._is_idle: Callable[[], bool] = lambda: True
        self.corrupt_senders = CorruptSenderTracker(_DIFFERENCES_MAX)
        self._pairs: OrderedDict[WorkerRef, _Pair] = OrderedDict()
        # The latest request of each prefill worker that is due.
        self._due: dict[WorkerRef, _Candidate] = {}
        self._task: asyncio.Task[None] | None = None

    def watch(self, is_idle: Callable[[], bool]) -> None:
        """Sets how it finds out whether the worker has requests."""
        self._is_idle = is_idle

    def attempt_closed(self, attempt: DecodeAttempt) -> None:
        """An attempt has given back its resources. Prompts with images would have to be encoded: they do not count."""
        summary, reservation = attempt.summary, attempt.reservation
        if summary is not None and reservation is not None and not attempt.work.images:
            self._handed_over(_Candidate(attempt.work, reservation, summary.prefill, attempt.span))
        if self._due and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._compare_due(), name="canary")

    async def close(self) -> None:
        """Ends a comparison that runs."""
        self._due.clear()
        await end_task(self._task)

    def _handed_over(self, candidate: _Candidate) -> None:
        prefill = candidate.prefill
        if prefill in self.corrupt_senders.rejected or not self._whole_blocks(
            candidate.reservation
        ):
            return
        pair = self._pairs.setdefault(prefill, _Pair(PairTolerance(self._dtype)))
        self._pairs.move_to_end(prefill)
        if len(self._pairs) > _PAIRS_MAX:
            self._due.pop(self._pairs.popitem(last=False)[0], None)
        pair.requests += 1
        each = not pair.tolerance.learned or self.corrupt_senders.was_rejected(prefill)
        if each or pair.requests >= self._interval_requests:
            self._due[prefill] = candidate

    def _whole_blocks(self, reservation: Reservation) -> range:
        """The numbers of the prompt's blocks that were received as a whole."""
        size = self._block_tokens
        return range(-(-reservation.start_token // size), reservation.end_token // size)

    async def _compare_due(self) -> None:
        await asyncio.sleep(_SETTLE_S)
        while self._due and self._is_idle():
            candidate = self._due.pop(next(iter(self._due)))
            try:
                await self._compare(candidate)
            except Exception:  # noqa: BLE001 - the next one may work
                _LOG.exception("the KV of %s could not be compared", candidate.work.transfer_id)

    async def _compare(self, candidate: _Candidate) -> None:
        start_ns = time.time_ns()
        pair = self._pairs[candidate.prefill]
        blocks = await self._errors(candidate)
        found = [one for errors in blocks if (one := pair.tolerance.difference(errors))]
        first = min(found, default=None)
        if blocks:
            pair.requests = 0
        if first is not None:
            self._record(candidate, first)
            await self._empty_cache()
        else:
            for errors in blocks:
                pair.tolerance.learn(errors)
            if blocks:
                self.corrupt_senders.record_intact(candidate.prefill)
        self._on_compared(
            Comparison(
                transfer_id=candidate.work.transfer_id,
                prefill=candidate.prefill,
                span=candidate.span,
                start_unix_ns=start_ns,
                end_unix_ns=time.time_ns(),
                block_count=len(blocks),
                difference=first,
                quarantined=candidate.prefill in self.corrupt_senders.rejected,
            )
        )

    async def _errors(self, candidate: _Candidate) -> list[BlockErrors]:
        """Those of the blocks that could be compared. Ends early when the worker gets a request."""
        found: list[BlockErrors] = []
        work, reservation = candidate.work, candidate.reservation
        received = self._whole_blocks(reservation)
        for number in sorted(self._random.sample(received, min(BLOCKS_MAX, len(received)))):
            if not self._is_idle():
                break
            block = ReceivedBlock(
                reservation.block_ids[number - reservation.start_token // self._block_tokens],
                work.token_ids[: (number + 1) * self._block_tokens],
                work.cache_salt,
                work.adapter,
            )
            errors = await self._engine.compare_block(block)
            if errors is not None:
                found.append(errors)
        return found

    async def _empty_cache(self) -> None:
        """The prefix cache has the received blocks, and may have others of the same kind."""
        for _ in range(_RESETS_MAX):
            if await self._engine.reset_prefix_cache():
                return
            # A request has come.
            await asyncio.sleep(_RESET_PAUSE_S)
        _LOG.error("the prefix cache may have wrong KV: empty it with headrace reset-cache")

    def _record(self, candidate: _Candidate, difference: Difference) -> None:
        prefill = candidate.prefill
        _LOG.warning(
            "the KV of transfer %s from %s is not what this worker computes: %s",
            candidate.work.transfer_id,
            prefill,
            difference,
        )
        detail = f"its KV is not what this worker computes: {difference}"
        self.corrupt_senders.record(prefill, detail)
