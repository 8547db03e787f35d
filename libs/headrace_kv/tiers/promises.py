"""Promises that the KV of a prompt and its answer stays in the tiers below KV memory for a time. Pure."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from headrace_common.callers.priority import Priority
from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.tiers import LowerTiers, TierHit

PROMISES_MAX: Final = 4_096
PROMISED_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True)
class KeepTerms:
    """The KV of request `name` shall stay for `seconds`. `owner` is equal for all requests of a tenant."""

    name: str
    owner: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Kept:
    """The first `tokens` of a prompt and its answer stay for `seconds`. `tier` is the slowest that has some of them."""

    tokens: int = 0
    tier: Tier = Tier.DEVICE
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PromiseCounts:
    """Promises in force, the blocks of each tier that they hold, and the promises until now that have lost their KV."""

    promises: int = 0
    blocks: Mapping[Tier, int] = field(default_factory=dict)
    broken: int = 0


NO_PROMISES: Final = PromiseCounts()


class _Held:
    """A block that promises of one owner hold. It is used by promises that end with it, and by held blocks after it."""

    __slots__ = ("_users", "parent", "place", "slowest")

    def __init__(self, place: tuple[Tier, int], parent: int | None, slowest: Tier) -> None:
        self.place = place
        self.parent = parent
        self.slowest = slowest
        self._users = 0

    def use(self) -> None:
        self._users += 1

    def end_use(self) -> bool:
        """Whether it has no user any more."""
        self._users -= 1
        return not self._users


class _Promise:
    """The blocks up to that of prefix `last` are held until `until_s`."""

    def __init__(self, owner: str, last: int, kept: Kept, until_s: float) -> None:
        self.owner = owner
        self.last = last
        self._kept = kept
        self.until_s = until_s

    def renew(self, seconds: float, until_s: float) -> Kept:
        self.until_s = until_s
        if seconds <= 0:
            return Kept()
        return Kept(self._kept.tokens, self._kept.tier, seconds)


class _Owner:
    """What the promises of one owner hold."""

    def __init__(self) -> None:
        self.blocks: dict[int, _Held] = {}
        self.counts: Counter[Tier] = Counter()
        self.promises = 0

    def promised(self, last: int) -> None:
        self.promises += 1
        self.blocks[last].use()

    def promise_ended(self) -> None:
        self.promises -= 1

    def add(self, prefix: int, place: tuple[Tier, int], parent: int | None) -> None:
        slowest = place[0]
        self.counts[slowest] += 1
        if parent is not None:
            before = self.blocks[parent]
            before.use()
            slowest = max(slowest, before.slowest)
        self.blocks[prefix] = _Held(place, parent, slowest)

    def end_use(self, last: int) -> TierHit:
        """Ends the use of a block. Returns the blocks that nothing uses any more, parents first."""
        unused: list[tuple[Tier, int]] = []
        prefix: int | None = last
        while prefix is not None and (held := self.blocks[prefix]).end_use():
            del self.blocks[prefix]
            unused.append(held.place)
            self.counts[held.place[0]] -= 1
            prefix = held.parent
        return TierHit(tuple(reversed(unused)))

    def is_intact(self, last: int, tiers: LowerTiers) -> bool:
        """Whether the tiers have the blocks up to `last` still."""
        prefix: int | None = last
        while prefix is not None:
            held = self.blocks[prefix]
            if not tiers.has(prefix, *held.place):
                return False
            prefix = held.parent
        return True


class Promises:
    """Holds blocks of `tiers` until their time has passed, so that they are not evicted.

    Promises hold at most `share` of the blocks of a tier. An owner may hold as many of these as are free still, so
    another owner has room. Promises that have ended are found by the next call of `expire` or `keep`.

    The owner of `tiers` calls the methods, except `renew` and `counts`, which any thread may call.
    """

    def __init__(
        self,
        tiers: LowerTiers,
        block_tokens: int,
        share: float = PROMISED_SHARE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tiers = tiers
        self._block_tokens = block_tokens
        self._bounds = {tier: int(share * count) for tier, count in tiers.sizes.items()}
        self._clock = clock
        self._owners: dict[str, _Owner] = {}
        self._held: Counter[Tier] = Counter()
        self._promises: dict[str, _Promise] = {}
        self._broken = 0
        self._due_s = math.inf
        """No promise ends before it."""
        self._lock = threading.Lock()

    def keep(self, terms: KeepTerms, prefixes: Sequence[int]) -> Kept:
        """Promises the longest run of consecutive `prefixes` that the tiers have and that there is room for."""
        with self._lock:
            self._expire()
            self._end(terms.name)
            owner = self._owners.setdefault(terms.owner, _Owner())
            last, count = self._hold(owner, prefixes)
            if last is None:
                self._forget_empty(terms.owner)
                return Kept()
            owner.promised(last)
            kept = Kept(count * self._block_tokens, owner.blocks[last].slowest, terms.seconds)
            until_s = self._clock() + terms.seconds
            self._promises[terms.name] = _Promise(terms.owner, last, kept, until_s)
            self._due_s = min(self._due_s, until_s)
            return kept

    def renew(self, terms: KeepTerms) -> Kept | None:
        """Lets a promise hold for `terms.seconds` from now on; 0 ends it. None when its owner has no such promise."""
        with self._lock:
            promise, now_s = self._promises.get(terms.name), self._clock()
            if promise is None or promise.owner != terms.owner or promise.until_s <= now_s:
                return None
            until_s = now_s + max(0.0, terms.seconds)
            self._due_s = min(self._due_s, until_s)
            return promise.renew(terms.seconds, until_s)

    def expire(self) -> None:
        """Releases the blocks of promises that have ended."""
        if self._due_s <= self._clock():
            with self._lock:
                self._expire()

    def blocks_lost(self) -> None:
        """The tiers have lost blocks: ends the promises that hold such blocks."""
        with self._lock:
            for name, promise in tuple(self._promises.items()):
                if not self._owners[promise.owner].is_intact(promise.last, self._tiers):
                    self._broken += 1
                    self._end(name)

    def end_all(self) -> None:
        """Ends all promises: the tiers are about to be emptied."""
        with self._lock:
            self._expire()
            self._broken += len(self._promises)
            for name in tuple(self._promises):
                self._end(name)

    def counts(self) -> PromiseCounts:
        """Promises that have ended count until the next `expire`."""
        with self._lock:
            held = {tier: self._held[tier] for tier in self._bounds}
            return PromiseCounts(len(self._promises), held, self._broken)

    def _hold(self, owner: _Owner, prefixes: Sequence[int]) -> tuple[int | None, int]:
        """The last prefix of the run that the owner holds now, and the number of its blocks."""
        if owner.promises + 1 > PROMISES_MAX - len(self._promises) - 1:
            return None, 0
        # Its blocks have their parents.
        count = next((at for at, one in enumerate(prefixes) if one not in owner.blocks), None)
        if count is None:
            count = len(prefixes)
        last = prefixes[count - 1] if count else None
        hit = self._tiers.hold(prefixes[count:], Priority.LOW)
        fitting = 0
        for prefix, place in zip(prefixes[count:], hit.blocks, strict=False):
            if not self._has_room(owner, place[0]):
                break
            owner.add(prefix, place, last)
            self._held[place[0]] += 1
            last, fitting = prefix, fitting + 1
        self._tiers.release(TierHit(hit.blocks[fitting:]))
        return last, count + fitting

    def _has_room(self, owner: _Owner, tier: Tier) -> bool:
        return owner.counts[tier] + 1 <= self._bounds[tier] - self._held[tier] - 1

    def _expire(self) -> None:
        now_s = self._clock()
        if now_s < self._due_s:
            return
        for name, promise in tuple(self._promises.items()):
            if promise.until_s <= now_s:
                self._end(name)
        self._due_s = min((one.until_s for one in self._promises.values()), default=math.inf)

    def _end(self, name: str) -> None:
        promise = self._promises.pop(name, None)
        if promise is None:
            return
        owner = self._owners[promise.owner]
        owner.promise_ended()
        unused = owner.end_use(promise.last)
        self._held.subtract(tier for tier, _ in unused.blocks)
        self._tiers.release(unused)
        self._forget_empty(promise.owner)

    def _forget_empty(self, name: str) -> None:
        if not self._owners[name].promises:
            del self._owners[name]
