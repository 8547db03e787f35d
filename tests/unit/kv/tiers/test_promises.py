"""Promises that blocks of lower tiers stay, with a clock that the test sets."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.blocks import CachedBlock
from headrace_kv.tiers.promises import PROMISES_MAX, KeepTerms, Kept, Promises
from headrace_kv.tiers.tiers import LowerTiers
from tests.set_clock import SetClock

BLOCK = 16


class Rig:
    """Tiers with promises. `store` offers prefixes from KV memory."""

    def __init__(self, host: int = 40, disk: int = 0, share: float = 0.5) -> None:
        counts = {Tier.HOST: host} | ({Tier.DISK: disk} if disk else {})
        self.tiers = LowerTiers(counts)
        self.clock = SetClock()
        self.promises = Promises(self.tiers, BLOCK, share, self.clock)

    def store(self, *prefixes: int) -> None:
        self.promises.expire()
        self.tiers.store([CachedBlock(prefix, 0) for prefix in prefixes])

    def keep(self, name: str, *prefixes: int, owner: str = "a", seconds: float = 60.0) -> Kept:
        self.store(*prefixes)
        return self.promises.keep(KeepTerms(name, owner, seconds), prefixes)

    def found(self, *prefixes: int) -> int:
        hit = self.tiers.hold(prefixes)
        self.tiers.release(hit)
        return len(hit)

    def press(self, first: int = 1_000, count: int = 100) -> None:
        """Other prompts, one block each, more than the tiers have blocks."""
        for prefix in range(first, first + count):
            self.store(prefix)


def test_an_owner_neither_finds_nor_ends_the_promise_of_another() -> None:
    rig = Rig()
    rig.keep("r", 1)
    assert rig.promises.renew(KeepTerms("r", "b", 0.0)) is None
    assert rig.promises.renew(KeepTerms("other", "a", 0.0)) is None
    rig.press()
    assert rig.found(1) == 1


def test_what_does_not_fit_is_not_promised() -> None:
    # 20 blocks are for promises, and an owner has as many as are free.
    rig = Rig(host=40, share=0.5)
    assert rig.keep("a", *range(1, 31)).tokens == 10 * BLOCK
    assert rig.keep("a too", *range(101, 111)) == Kept()
    assert rig.keep("b", *range(201, 231), owner="b").tokens == 5 * BLOCK
    assert rig.keep("c", *range(301, 331), owner="c").tokens == 2 * BLOCK
    assert rig.promises.counts().blocks == {Tier.HOST: 17}
    rig.promises.renew(KeepTerms("a", "a", 0.0))
    assert rig.keep("b too", *range(401, 431), owner="b").tokens == 4 * BLOCK


def test_without_a_share_or_tiers_nothing_is_promised() -> None:
    assert Rig(share=0.0).keep("r", 1, 2) == Kept()
    promises = Promises(LowerTiers({}), BLOCK)
    assert promises.keep(KeepTerms("r", "a", 60.0), [1, 2]) == Kept()
    assert promises.counts().promises == 0


def test_a_promise_with_lost_blocks_is_broken_and_others_are_not() -> None:
    rig = Rig()
    rig.keep("short", 1, 2)
    rig.keep("long", 1, 2, 3)
    rig.keep("other", 7, owner="b")
    ((_, block),) = rig.tiers.hold([1, 2, 3]).blocks[2:]
    rig.tiers.drop(Tier.HOST, [block])
    rig.promises.blocks_lost()
    assert rig.promises.counts().broken == 1
    assert rig.promises.renew(KeepTerms("long", "a", 60.0)) is None
    assert rig.promises.renew(KeepTerms("short", "a", 60.0)) is not None
    assert rig.promises.renew(KeepTerms("other", "b", 60.0)) is not None
    # Its blocks can be promised again.
    assert rig.keep("again", 1, 2, 3).tokens == 3 * BLOCK


def test_promises_are_bounded_in_number() -> None:
    rig = Rig()
    for number in range(PROMISES_MAX):
        rig.keep(str(number), 1)
    assert rig.promises.counts().promises == PROMISES_MAX // 2
    assert rig.keep("more", 1, owner="b").tokens == BLOCK


class PromisesMachine(RuleBasedStateMachine):
    """Turns of conversations, renewals, time and pressure, beside a list of what was promised."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(host=30, disk=20)
        self.due: dict[str, tuple[str, tuple[int, ...], float]] = {}
        self.next = 10_000

    @rule(
        conversation=st.integers(0, 5),
        turns=st.integers(1, 6),
        seconds=st.integers(1, 50),
        owner=st.sampled_from("ab"),
    )
    def keep(self, conversation: int, turns: int, seconds: int, owner: str) -> None:
        base = 100 * (conversation + 1)
        prefixes = tuple(range(base, base + turns))
        name = f"{conversation}.{turns}.{owner}"
        kept = self.rig.keep(name, *prefixes, owner=owner, seconds=seconds)
        assert kept.seconds == (seconds if kept.tokens else 0)
        self.due.pop(name, None)
        if kept.tokens:
            whole = prefixes[: kept.tokens // BLOCK]
            self.due[name] = owner, whole, self.rig.clock.now_s + seconds

    @rule(seconds=st.integers(0, 30), name=st.integers(0, 30))
    def renew(self, seconds: int, name: int) -> None:
        """Sets a later or an earlier end, or ends it."""
        if not self.due:
            return
        chosen = sorted(self.due)[name % len(self.due)]
        owner, prefixes, _ = self.due[chosen]
        terms = KeepTerms(chosen, owner, seconds)
        kept = self.rig.promises.renew(terms)
        assert kept is not None
        assert kept.tokens == (len(prefixes) * BLOCK if seconds else 0)
        self.due[chosen] = owner, prefixes, self.rig.clock.now_s + seconds
        self._drop_due()
        if not seconds:
            assert self.rig.promises.renew(terms) is None

    @rule(seconds=st.integers(1, 20))
    def wait(self, seconds: int) -> None:
        self.rig.clock.now_s += seconds
        self._drop_due()

    @rule(count=st.integers(1, 60))
    def press(self, count: int) -> None:
        self.rig.press(self.next, count)
        self.next += count

    @rule()
    def press_out(self) -> None:
        """What is not promised is evicted."""
        self.press(100)
        kept = {prefix for _, prefixes, _ in self.due.values() for prefix in prefixes}
        bases = range(100, 700, 100)
        found = {one for base in bases for one in range(base, base + 6) if self.rig.found(one)}
        assert found == kept

    def _drop_due(self) -> None:
        now_s = self.rig.clock.now_s
        self.due = {name: one for name, one in self.due.items() if one[2] > now_s}

    @invariant()
    def promises_are_kept_and_bounded(self) -> None:
        for _, prefixes, _ in self.due.values():
            assert self.rig.found(*prefixes) == len(prefixes)
        self.rig.promises.expire()
        counts = self.rig.promises.counts()
        assert counts.promises == len(self.due)
        assert counts.broken == 0
        assert counts.blocks.get(Tier.HOST, 0) <= 15
        assert counts.blocks.get(Tier.DISK, 0) <= 10
        # Blocks that an owner holds for several promises count once.
        held = {(owner, prefix) for owner, prefixes, _ in self.due.values() for prefix in prefixes}
        assert sum(counts.blocks.values()) == len(held)


TestPromises = PromisesMachine.TestCase
TestPromises.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
