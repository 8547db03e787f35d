"""The credit of every worker, against plain loops over the workers."""

from __future__ import annotations

from typing import Final

from hypothesis import example, given
from hypothesis import strategies as st

from headrace_engine.prefix_event_log import PrefixEventLog
from headrace_kv.layout import KvLayout, WorkerRef
from headrace_kv.prefix.events import Tier
from headrace_kv.prefix.hashing import prefix_hasher
from headrace_router.prefix_cache.cached_prompts import REMOTE_SHARE, CachedPrompts, TierPrices
from headrace_router.prefix_cache.index import ApplyResult
from headrace_router.workers.table import LoadTable, Worker

KEY: Final = 5
BLOCK_TOKENS: Final = 4
PROMPT_BLOCKS: Final = 90
PROMPT: Final = tuple(range(BLOCK_TOKENS * PROMPT_BLOCKS + 3))
LAYOUT = KvLayout.attention(
    model="m",
    dtype="float32",
    layer_count=2,
    kv_head_count=2,
    block_tokens=BLOCK_TOKENS,
    parts={"kv": 16},
)
Depths = tuple[int, ...]
"""Blocks that a worker holds in KV memory, and further ones in each slower tier."""


def ref_of(number: int) -> WorkerRef:
    return WorkerRef(f"w{number:03}", "i")


def filled(held: list[Depths], prices: TierPrices) -> CachedPrompts:
    """Every worker announces its part of the prompt, tier by tier."""
    cached = CachedPrompts(lambda: KEY, prices)
    index = cached.model_index("m", BLOCK_TOKENS).index
    hashes = prefix_hasher(KEY, "m", BLOCK_TOKENS).hashes(PROMPT)
    for number, blocks in enumerate(held):
        # The set of a tier has the blocks of faster ones as well.
        tiers = [tier for tier in Tier if tier is not Tier.REMOTE or blocks[-1]]
        log = PrefixEventLog("i", tuple(tiers))
        events = log.snapshot()
        for tier, count in zip(Tier, blocks, strict=True):
            if count:
                events += log.stored(None, hashes[: sum(blocks[: tier - 1]) + count], tier)
        index.add_worker(ref_of(number))
        assert all(index.apply(ref_of(number), one) is ApplyResult.APPLIED for one in events)
    return cached


def credit_of(depths: Depths, deepest_remote: int, shares: list[float], *, pooled: bool) -> float:
    """The tokens of one worker, block by block."""
    device, host, disk, _ = depths
    tokens = float(device * BLOCK_TOKENS)
    tokens += shares[0] * host * BLOCK_TOKENS + shares[1] * disk * BLOCK_TOKENS
    if pooled:
        beyond = max(0, deepest_remote - device - host - disk)
        tokens += REMOTE_SHARE * beyond * BLOCK_TOKENS
    return tokens


def reaching(depths: Depths) -> Depths:
    """No worker holds more blocks than the prompt has."""
    left, found = PROMPT_BLOCKS, []
    for blocks in depths:
        found.append(min(left, blocks))
        left -= found[-1]
    return tuple(found)


device_only = st.tuples(st.integers(0, PROMPT_BLOCKS), st.just(0), st.just(0), st.just(0))
in_tiers = st.tuples(*[st.integers(0, PROMPT_BLOCKS // 2)] * 4).map(reaching)


@example(held=[(depth, 0, 0, 0) for depth in range(PROMPT_BLOCKS)])
@example(held=[(0, 0, 0, 0), (0, 2, 0, 0)])
@given(
    held=st.lists(device_only, min_size=1, max_size=60) | st.lists(in_tiers, min_size=1),
)
def test_the_credit_is_that_of_a_loop_over_the_workers(held: list[Depths]) -> None:
    prices = TierPrices(lambda model: 1 / 64)
    for number in range(0, len(held), 3):
        prices.measured(ref_of(number), Tier.HOST, number % 5 / 64)
    cached = filled(held, prices)
    # The last worker of the table is in no index.
    refs = [ref_of(number) for number in range(len(held) + 1)]
    table = LoadTable(Worker(ref, "a:1", "m", 4_096, 9, LAYOUT) for ref in refs)
    depths = [*held, (0, 0, 0, 0)]
    remote = max(sum(blocks) if blocks[3] else 0 for blocks in depths)
    shares = prices.shares("m", BLOCK_TOKENS, refs).T.tolist()
    credit = [
        credit_of(blocks, remote, share, pooled=number < len(held))
        for number, (blocks, share) in enumerate(zip(depths, shares, strict=True))
    ]
    tokens = cached.cached_tokens(table, PROMPT, "")
    assert tokens.tolist() == credit
    own = [
        int(credit_of(blocks, 0, share, pooled=False))
        for blocks, share in zip(depths, shares, strict=True)
    ]
    own_tokens = cached.cached_tokens(table, PROMPT, "", pooled=False)
    assert own_tokens.astype(int).tolist() == own
    asked = frozenset(refs[::2])
    assert cached.cached_refs("m", PROMPT, "", asked) == {
        ref: one for ref, one in zip(refs, own, strict=True) if ref in asked and one
    }


def test_a_worker_that_joins_between_two_lookups_of_a_prompt_holds_nothing() -> None:
    cached = filled([(5, 0, 0, 0)], TierPrices(lambda model: 0.0))
    index = cached.model_index("m", BLOCK_TOKENS).index
    held = {ref_of(0): 5 * BLOCK_TOKENS}
    assert cached.cached_refs("m", PROMPT, "", frozenset({ref_of(0)})) == held
    index.add_worker(ref_of(1))
    both = frozenset({ref_of(0), ref_of(1)})
    assert cached.cached_refs("m", PROMPT, "", both) == held
    table = LoadTable(Worker(ref, "a:1", "m", 4_096, 9, LAYOUT) for ref in sorted(both))
    assert cached.cached_tokens(table, PROMPT, "").tolist() == [5 * BLOCK_TOKENS, 0]
