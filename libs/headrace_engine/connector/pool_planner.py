"""Plans what an engine's requests fetch from a remote pool, and what is stored there. Uses no vLLM types."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Protocol

from headrace_engine.connector.step_plan import PoolMove, StepPlan
from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.tiers import LowerTiers, PoolBlocks, TierChange, TierPlan

UNPUBLISHED_MAX: Final = 256
"""Blocks that are being stored in the pool. Further ones are not stored."""
PUBLISH_TIMEOUT_S: Final = 10.0
IDLE_STEPS_S: Final = 1.0
"""How long an engine without requests makes steps for a move. A frozen store so delays no shutdown for longer."""
ANNOUNCED_MAX: Final = 65_536
_BATCH_BLOCKS: Final = 32
FETCH_BLOCKS_MAX: Final = 512


class PoolLookup(Protocol):
    """Asks the store which blocks it has."""

    def find(self, prefixes: Sequence[int], timeout_s: float) -> Future[int] | None:
        """See BlockLookup.find."""


@dataclass(frozen=True, slots=True)
class PoolUse:
    """The ranks of an engine, and whether it stores blocks in the pool. A request waits `timeout_s` at most."""

    rank_count: int = 1
    publishes: bool = False
    timeout_s: float = 1.0


@dataclass(slots=True)
class _Move:
    """A move under way. `missing`: ranks that have not ended. `whole`: first blocks that are whole on all others."""

    blocks: PoolBlocks
    missing: int
    whole: int
    fetch: _Fetch | None = None

    def rank_ended(self, whole: int) -> bool:
        """Whether all ranks have ended."""
        self.whole = min(self.whole, whole)
        self.missing -= 1
        return self.missing == 0


@dataclass(slots=True)
class _Fetch:
    """A request's blocks, which are looked up, then fetched, until `due_s`."""

    prefixes: Sequence[int]
    found: Future[int]
    due_s: float
    moving: bool = False
    ended: bool = False

    def begin(self) -> None:
        self.moving = True

    def end(self) -> None:
        self.ended = True


class PoolPlanner:
    """The scheduling thread calls it. Moves of blocks begin with the next step, and end with a later one.

    `carry_out` gets the copies that a fetch needs, and the changes of tiers.
    """

    def __init__(
        self,
        tiers: LowerTiers,
        use: PoolUse,
        carry_out: Callable[[TierPlan], None],
    ) -> None:
        self._tiers = tiers
        self._use = use
        self._carry_out = carry_out
        self._lookup: PoolLookup | None = None
        self._next_number = 1
        self._by_request: dict[str, _Fetch] = {}
        self._under_way: dict[int, _Move] = {}
        # Prefixes that are being stored.
        self._publishing: set[int] = set()
        self._moves: list[PoolMove] = []
        self._idle_steps_until_s = 0.0
        # Prefixes that this worker has stored, the least recently used first.
        self._published: OrderedDict[int, None] = OrderedDict()
        self._is_lost = threading.Event()

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits for the pool."""
        return any(not fetch.ended for fetch in self._by_request.values())

    @property
    def is_moving(self) -> bool:
        """Whether blocks have been on their way for a moment only. Only a further step reports their end."""
        return bool(self._under_way) and time.monotonic() < self._idle_steps_until_s

    @property
    def is_due(self) -> bool:
        """Whether the next step has something to do."""
        return bool(self._moves) or self._is_lost.is_set()

    def fetched(self, request_id: str) -> Collection[int]:
        """The blocks that were fetched for a request, if the pool had them."""
        fetch = self._by_request.get(request_id)
        return fetch.prefixes if fetch is not None and fetch.moving else ()

    def attach(self, lookup: PoolLookup) -> None:
        """The store can be asked from now on. Any thread may call it."""
        self._lookup = lookup

    def lost(self) -> None:
        """The store may have lost its blocks. Any thread may call it."""
        self._is_lost.set()

    def must_wait(self, request_id: str, prefixes: Sequence[int]) -> bool:
        """Whether blocks of the request are on their way. `prefixes` are those that no tier has, each time it asks.

        A request is looked up once.
        """
        fetch = self._by_request.get(request_id)
        if fetch is None:
            if self._lookup is None or not prefixes:
                return False
            wanted = prefixes[:FETCH_BLOCKS_MAX]
            found = self._lookup.find(wanted, self._use.timeout_s)
            if found is None:
                return False
            due_s = time.monotonic() + self._use.timeout_s
            fetch = self._by_request[request_id] = _Fetch(wanted, found, due_s)
        if fetch.ended:
            return False
        if not fetch.moving and fetch.found.done():
            self._begin(fetch, fetch.found.result())
        return not fetch.ended

    def request_finished(self, request_id: str) -> None:
        """The request asks no more. A fetch under way goes on."""
        self._by_request.pop(request_id, None)

    def offered(self, prefixes: Sequence[int], plan: TierPlan) -> None:
        """Publishes computed blocks that the fastest tier has, as far as the pool keeps up.

        `plan` has stored those that no tier had, perhaps because the pool has lost them too. Others are published
        unless this worker has stored them in the pool before.
        """
        if not self._use.publishes or self._lookup is None:
            return
        fastest = self._tiers.names[0]
        new = {
            prefix
            for change in plan.changes
            if change.stored and change.tier == fastest
            for prefix in change.prefixes
        }
        wanted = [
            prefix
            for prefix in prefixes
            if prefix not in self._publishing and (prefix in new or prefix not in self._published)
        ]
        for start in range(0, len(wanted), _BATCH_BLOCKS):
            if len(self._publishing) >= UNPUBLISHED_MAX:
                return
            blocks = self._tiers.hold_fastest(wanted[start : start + _BATCH_BLOCKS])
            if blocks:
                self._publishing.update(blocks.prefixes)
                self._move(blocks, PUBLISH_TIMEOUT_S)

    def used(self, prefixes: Sequence[int]) -> None:
        """A request has used these blocks, the first of its prompt first."""
        # A block is of use only with those before it, so the last one is withdrawn first.
        for prefix in reversed(prefixes):
            if prefix in self._published:
                self._published.move_to_end(prefix)

    def add_to(self, plan: StepPlan) -> None:
        """Adds the moves that begin with the next step, after its copies."""
        if self._is_lost.is_set():
            self._is_lost.clear()
            self._withdraw(len(self._published))
        plan.plan_moves(self._moves)
        self._moves = []

    def moves_ended(self, ended: Iterable[tuple[int, int]]) -> None:
        """Ranks have ended moves: (number of the move, blocks that were moved whole, from the first on)."""
        for number, whole in ended:
            move = self._under_way.get(number)
            if move is None or not move.rank_ended(whole):
                continue
            del self._under_way[number]
            if move.fetch is not None:
                self._carry_out(self._tiers.fetched(move.blocks, move.whole))
                move.fetch.end()
            else:
                self._end_publication(move)

    def _end_publication(self, move: _Move) -> None:
        self._publishing.difference_update(move.blocks.prefixes)
        self._tiers.release_fastest(move.blocks)
        kept = tuple(
            prefix for prefix in move.blocks.prefixes[: move.whole] if prefix not in self._published
        )
        if kept:
            self._published.update(dict.fromkeys(kept))
            self.used(kept)
            self._carry_out(TierPlan(changes=[TierChange(Tier.REMOTE, True, kept)]))
            self._withdraw(len(self._published) - ANNOUNCED_MAX)

    def _withdraw(self, count: int) -> None:
        """Announces no longer the `count` stored blocks that were not used for longest."""
        gone = tuple(self._published.popitem(last=False)[0] for _ in range(count))
        if gone:
            self._carry_out(TierPlan(changes=[TierChange(Tier.REMOTE, False, gone)]))

    def _begin(self, fetch: _Fetch, found: int) -> None:
        left_s = fetch.due_s - time.monotonic()
        if left_s <= 0:
            fetch.end()
            return
        blocks, plan = self._tiers.reserve(fetch.prefixes[:found])
        self._carry_out(plan)
        fetch.begin()
        if not blocks:
            fetch.end()
            return
        self._move(blocks, left_s, fetch)

    def _move(self, blocks: PoolBlocks, timeout_s: float, fetch: _Fetch | None = None) -> None:
        number = self._next_number
        self._next_number += 1
        self._idle_steps_until_s = time.monotonic() + IDLE_STEPS_S
        self._under_way[number] = _Move(blocks, self._use.rank_count, len(blocks), fetch)
        self._moves.append(
            PoolMove(number, fetch is not None, blocks.prefixes, blocks.block_ids, timeout_s)
        )
