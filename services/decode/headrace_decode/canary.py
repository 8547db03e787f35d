"""Computes blocks of some handed-over prompts again, while the worker is idle."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from random import Random
from typing import Final, NamedTuple

from opentelemetry.trace import Span

from headrace_common.tasks import BackgroundTasks, end_task
from headrace_decode.attempt import DecodeAttempt
from headrace_engine.interface import BlockErrors, DecodeWork, Engine, ReceivedBlock
from headrace_kv.checksum import is_digested
from headrace_kv.layout import WorkerRef
from headrace_kv.messages import Reservation
from headrace_kv.prefix.images import whole_images_end
from headrace_kv.receive.verification import CorruptSenderTracker, DigestChecks

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
REUSED_BLOCKS_MAX: Final = 2
"""The same, of the blocks that were cached before."""
_PAIRS_MAX: Final = 1024
NO_WORKER: Final = WorkerRef("", "")
_RESETS_MAX: Final = 20
_RESET_PAUSE_S: Final = 0.1
_SETTLE_S: Final = 0.05
"""A worker without requests is idle after this time."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A request that has its KV. `span` is that of its attempt. `numbers` are those of received blocks to compare.

    `digests`: what these held when they had arrived, which was at `arrived_s` by time.monotonic. With `changed`, all of
    them were written over since then.
    """

    work: DecodeWork
    reservation: Reservation
    prefill: WorkerRef
    span: Span
    numbers: tuple[int, ...]
    digests: Future[list[tuple[int, ...]]] | None = None
    arrived_s: float = -math.inf
    changed: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result for one request. No blocks were compared if none were cached any more, or the worker became busy.

    `prefill` has sent the blocks. With `overwritten`, it is the only worker that could have written into them since
    then, or NO_WORKER. `quarantined`: no more KV is accepted from it.
    """

    transfer_id: str
    prefill: WorkerRef
    span: Span
    start_unix_ns: int
    end_unix_ns: int
    block_count: int
    difference: Difference | None = None
    overwritten: bool = False
    quarantined: bool = False

    @property
    def outcome(self) -> str:
        """For metrics."""
        if self.quarantined:
            return "quarantined"
        if self.overwritten:
            return "overwritten"
        if self.difference is not None:
            return "different"
        return "same" if self.block_count else "dropped"


@dataclass(slots=True)
class _Pair:
    """`requests`: those that were handed over since the last comparison. `agreed`: whether that found no difference."""

    tolerance: PairTolerance
    requests: int = 0
    agreed: bool = False

    def compared(self, *, agreed: bool) -> None:
        """The latest comparison has ended."""
        self.requests, self.agreed = 0, agreed


def _differences(pair: _Pair, blocks: Mapping[int, BlockErrors]) -> list[tuple[Difference, int]]:
    """With the numbers of their blocks."""
    found = ((pair.tolerance.difference(errors), number) for number, errors in blocks.items())
    return [(one, number) for one, number in found if one is not None]


class Canary:
    """Rejects a prefill worker for a while after two requests with KV that this worker computes differently.

    One event loop owns it. Call `attempt_arrived` and `attempt_closed` for every attempt. With `checks`, a sender
    does not count as the cause where its blocks were written over after they had arrived.
    """

    def __init__(
        self,
        engine: Engine,
        interval_requests: int,
        *,
        on_compared: Callable[[Comparison], None],
        checks: DigestChecks | None = None,
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
        self._checks = checks
        self._random = random or Random()
        self._is_idle: Callable[[], bool] = lambda: True
        self._lease_holders: Callable[[float], Collection[WorkerRef]] = lambda since_s: ()
        self.corrupt_senders = CorruptSenderTracker(_DIFFERENCES_MAX)
        self._pairs: OrderedDict[WorkerRef, _Pair] = OrderedDict()
        self._resting: dict[str, _Candidate] = {}
        # The latest request of each prefill worker that is due.
        self._due: dict[WorkerRef, _Candidate] = {}
        self._task: asyncio.Task[None] | None = None
        self._rechecks = BackgroundTasks("a second check of a canary")

    def watch(
        self, is_idle: Callable[[], bool], lease_holders: Callable[[float], Collection[WorkerRef]]
    ) -> None:
        """Sets how it finds out whether the worker has requests. `lease_holders`: see Receiver."""
        self._is_idle, self._lease_holders = is_idle, lease_holders

    def attempt_arrived(self, attempt: DecodeAttempt) -> None:
        """The KV of an attempt has arrived. Digests of some blocks are taken in the share that `checks` has."""
        checks, name = self._checks, attempt.work.transfer_id
        if checks is None or (candidate := self._candidate(attempt)) is None:
            return
        if is_digested(checks.share, name, 0) or self._is_due(candidate.prefill, 1):
            digests = checks.digest_blocks(self._block_ids(candidate))
            self._resting[name] = replace(candidate, digests=digests, arrived_s=time.monotonic())

    def attempt_closed(self, attempt: DecodeAttempt) -> None:
        """An attempt has given back its resources."""
        rested = self._resting.pop(attempt.work.transfer_id, None)
        if rested is not None:
            self._rechecks.start(self._check_again(rested))
        elif (candidate := self._candidate(attempt)) is not None:
            self._handed_over(candidate)
        self._start()

    def _candidate(self, attempt: DecodeAttempt) -> _Candidate | None:
        """None where nothing was handed over."""
        summary, reservation, work = attempt.summary, attempt.reservation, attempt.work
        if summary is None or reservation is None:
            return None
        numbers = self._draw_received(work, reservation)
        return _Candidate(work, reservation, summary.prefill, attempt.span, numbers)

    def _start(self) -> None:
        if self._due and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._compare_due(), name="canary")

    async def close(self) -> None:
        """Ends a comparison that runs."""
        self._due.clear()
        await self._rechecks.wait()
        await end_task(self._task)

    def _pair(self, prefill: WorkerRef) -> _Pair:
        pair = self._pairs.setdefault(prefill, _Pair(PairTolerance(self._dtype)))
        self._pairs.move_to_end(prefill)
        if len(self._pairs) > _PAIRS_MAX:
            self._due.pop(self._pairs.popitem(last=False)[0], None)
        return pair

    def _is_due(self, prefill: WorkerRef, more: int = 0) -> bool:
        """Whether its latest request is due, after so many more."""
        pair = self._pair(prefill)
        each = not pair.tolerance.learned or self.corrupt_senders.was_rejected(prefill)
        return each or pair.requests + more >= self._interval_requests

    def _handed_over(self, candidate: _Candidate) -> None:
        """With digests, its blocks hold what has arrived."""
        prefill = candidate.prefill
        if prefill in self.corrupt_senders.rejected or not candidate.numbers:
            return
        self._pair(prefill).requests += 1
        if self._is_due(prefill) and (candidate.digests or self._checks is None):
            self._due[prefill] = candidate

    async def _check_again(self, candidate: _Candidate) -> None:
        """Blocks that have changed are compared at once: a request may use them next."""
        assert self._checks is not None
        assert candidate.digests is not None
        try:
            before = await asyncio.wrap_future(candidate.digests)
            now = await asyncio.wrap_future(self._checks.digest_blocks(self._block_ids(candidate)))
            found = zip(candidate.numbers, before, now, strict=True)
            changed = tuple(number for number, old, new in found if old != new)
            if changed:
                await self._compare(replace(candidate, numbers=changed, changed=True))
            else:
                self._handed_over(candidate)
                self._start()
        except Exception:  # noqa: BLE001 - the next one may work
            _LOG.exception("the KV of %s could not be checked", candidate.work.transfer_id)

    def _block_ids(self, candidate: _Candidate) -> list[int]:
        first = candidate.reservation.start_token // self._block_tokens
        return [candidate.reservation.block_ids[number - first] for number in candidate.numbers]

    def _draw_received(self, work: DecodeWork, reservation: Reservation) -> tuple[int, ...]:
        """The numbers of some of the prompt's blocks that were received as a whole."""
        size = self._block_tokens
        received = range(-(-reservation.start_token // size), reservation.end_token // size)
        return self._draw(work, received, BLOCKS_MAX)

    def _draw(self, work: DecodeWork, numbers: range, most: int) -> tuple[int, ...]:
        """Some blocks, without those that end within an image: a prompt cannot."""
        ends = {one: (one + 1) * self._block_tokens for one in numbers} if work.images else {}
        usable = [one for one, end in ends.items() if whole_images_end(end, work.images) == end]
        found = usable if work.images else numbers
        return tuple(sorted(self._random.sample(found, min(most, len(found)))))

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
        pair = self._pair(candidate.prefill)
        blocks = await self._errors(candidate)
        found = _differences(pair, blocks)
        if found:
            # Each of them is computed once more before it counts.
            blocks = await self._errors(candidate, [number for _, number in found])
            found = _differences(pair, blocks)
        difference, number = min(found, default=(None, -1))
        overwritten = candidate.changed or number not in candidate.numbers
        prefill = candidate.prefill
        if blocks:
            pair.compared(agreed=not found)
        if difference is not None:
            record = self._record_overwritten if overwritten else self._record
            prefill = record(candidate, difference)
            await self._empty_cache()
        elif not candidate.changed:
            for number in candidate.numbers:
                pair.tolerance.learn(blocks.get(number, {}))
            if blocks:
                self.corrupt_senders.record_intact(candidate.prefill)
        self._on_compared(
            Comparison(
                transfer_id=candidate.work.transfer_id,
                prefill=prefill,
                span=candidate.span,
                start_unix_ns=start_ns,
                end_unix_ns=time.time_ns(),
                block_count=len(blocks),
                difference=difference,
                overwritten=overwritten and difference is not None,
                quarantined=prefill in self.corrupt_senders.rejected,
            )
        )

    async def _errors(
        self, candidate: _Candidate, again: Sequence[int] = ()
    ) -> dict[int, BlockErrors]:
        """Those of the blocks that could be compared, by number. Ends early when the worker gets a request.

        `again`: these only, and to the end.
        """
        found: dict[int, BlockErrors] = {}
        work = candidate.work
        ids: dict[int, int | None] = dict(
            zip(candidate.numbers, self._block_ids(candidate), strict=True)
        )
        if again:
            ids = {number: ids.get(number) for number in again}
        elif not candidate.changed:
            reused = range(candidate.reservation.start_token // self._block_tokens)
            ids |= dict.fromkeys(self._draw(work, reused, REUSED_BLOCKS_MAX))
        for number, block_id in sorted(ids.items()):
            if not (again or candidate.changed or self._is_idle()):
                break
            end = (number + 1) * self._block_tokens
            images = tuple(one for one in work.images if one.start_token < end)
            block = ReceivedBlock(
                block_id, work.token_ids[:end], work.cache_salt, work.adapter, images
            )
            errors = await self._engine.compare_block(block)
            if errors is not None:
                found[number] = errors
        return found

    async def _empty_cache(self) -> None:
        """The prefix cache has the received blocks, and may have others of the same kind."""
        for _ in range(_RESETS_MAX):
            if await self._engine.reset_prefix_cache():
                return
            # A request has come.
            await asyncio.sleep(_RESET_PAUSE_S)
        _LOG.error("the prefix cache may have wrong KV: empty it with headrace reset-cache")

    def _record(self, candidate: _Candidate, difference: Difference) -> WorkerRef:
        name, prefill = candidate.work.transfer_id, candidate.prefill
        others = [ref for ref, pair in self._pairs.items() if pair.agreed and ref != prefill]
        sends = f" and {others[-1]} sends" if others else ""
        detail = f"its KV is not what this worker computes{sends}: {difference}"
        _LOG.warning("transfer %s from %s: %s", name, prefill, detail)
        self.corrupt_senders.record(prefill, detail)
        return prefill

    def _record_overwritten(self, candidate: _Candidate, difference: Difference) -> WorkerRef:
        """Counts against a worker only if no other one had a write lease meanwhile. Returns that worker."""
        # A reused block may be wrong since long before.
        what, since_s = (
            ("received", candidate.arrived_s) if candidate.changed else ("cached", -math.inf)
        )
        suspects = sorted(self._lease_holders(since_s), key=str)
        named = ", ".join(map(str, suspects[:8]))
        where = f"{what} blocks of the prompt of {candidate.work.transfer_id}"
        why = f"were written over, or never held what this worker computes: {difference}"
        _LOG.error("%s %s. Write leases since then, %d: %s", where, why, len(suspects), named)
        if len(suspects) != 1:
            return NO_WORKER
        self.corrupt_senders.record(suspects[0], f"{where} {why}")
        return suspects[0]
