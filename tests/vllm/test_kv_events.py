"""vLLM's KV events as announcements with the block hashes of routers."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from headrace_engine.interface import EngineUsage, Released, Sampling
from headrace_engine.vllm.engine import VllmEngine
from headrace_kv.messages import Reservation
from headrace_kv.prefix.events import unpack_hashes
from headrace_kv.prefix.hashing import PrefixHasher
from tests.decoding import decoded
from tests.vllm.conftest import ON_PAIR
from tests.vllm.pair import BLOCK_TOKENS, Pair
from tests.waiting import until

pytestmark = ON_PAIR


async def announced(engine: VllmEngine) -> set[int]:
    found: set[int] = set()
    with engine.prefix_events.subscribe(0) as subscription:
        async for message in subscription.messages(1.0):
            if message.WhichOneof("event") != "snapshot":
                break
            found.update(unpack_hashes(message.snapshot.hashes))
    return found


async def until_announced(engine: VllmEngine, right: Callable[[set[int]], bool]) -> None:
    async def is_right() -> bool:
        return right(await announced(engine))

    await until(is_right)


def hasher_of(engine: VllmEngine) -> PrefixHasher:
    events = engine.prefix_events
    assert events is not None
    if events.hasher is None:
        events.set_hash_key(4711, "m")
    assert events.hasher is not None
    return events.hasher


async def test_both_engines_announce_their_cached_blocks(pair: Pair) -> None:
    random = Random(1)
    hasher = hasher_of(pair.decode)
    assert hasher_of(pair.prefill).root == hasher.root
    await pair.reset()
    prompt = [random.randrange(3, 500) for _ in range(5 * BLOCK_TOKENS + 3)]
    answer = await pair.split(prompt)
    await until_announced(pair.prefill, lambda found: found == set(hasher.hashes(prompt[:-1])))
    # The last token of an answer has no KV.
    whole = hasher.hashes([*prompt, *answer.token_ids][:-1])
    await until_announced(pair.decode, lambda found: found == set(whole))
    longer = [*prompt, *(random.randrange(3, 500) for _ in range(6 * BLOCK_TOKENS))]
    await pair.plain(longer)
    await until_announced(pair.decode, lambda found: found >= {*whole, *hasher.hashes(longer)})
    # Both announce it although no request follows.
    for engine in (pair.prefill, pair.decode):
        await until(engine.reset_prefix_cache)
        await until_announced(engine, lambda found: not found)


async def test_only_requests_with_an_equal_salt_share_blocks(pair: Pair) -> None:
    random = Random(3)
    hasher = hasher_of(pair.decode)
    hasher_of(pair.prefill)
    await pair.reset()
    # More than a hash chunk, in several steps of both engines.
    prompt = [random.randrange(3, 500) for _ in range(11 * BLOCK_TOKENS + 1)]
    whole = 11 * BLOCK_TOKENS
    answers: set[tuple[int, ...]] = set()
    cached = []
    for salt in ("aa", "bb", "", "aa", "bb", ""):
        # A longer prompt, so that prefill has something to compute.
        longer = [*prompt, *(random.randrange(3, 500) for _ in range(BLOCK_TOKENS))]
        answer = await pair.split(longer, cache_salt=salt)
        assert answer.end is not None
        assert answer.prefill is not None
        cached.append((answer.end.cached_tokens, answer.prefill.cached_tokens))
        plain = await pair.plain(prompt, cache_salt=salt)
        assert plain.end is not None
        assert plain.end.cached_tokens == whole
        answers.add(tuple(plain.token_ids))
    assert cached == [(0, 0)] * 3 + [(whole, whole)] * 3
    assert len(answers) == 1
    names = {salt: hasher.hashes(prompt, hasher.root_of(salt)) for salt in ("aa", "bb", "")}
    assert len({name for chain in names.values() for name in chain}) == 3 * 11
    for engine in (pair.prefill, pair.decode):
        for chain in names.values():
            await until_announced(engine, set(chain).issubset)
        assert not set(hasher.hashes(prompt, hasher.root_of("cc"))) & await announced(engine)


async def test_a_cache_in_use_is_not_reset(pair: Pair) -> None:
    work = pair.work(range(3, 100))
    events = decoded(pair.decode, work)
    assert isinstance(await anext(events), Reservation)
    await until(lambda: pair.decode.usage() == EngineUsage(0, 1, 3))
    assert not await pair.decode.reset_prefix_cache()
    await events.aclose()
    pair.decode.transfer_event(Released(work.transfer_id))
    await until(lambda: pair.decode.usage() == EngineUsage(0, 0, 0))
    assert await pair.decode.reset_prefix_cache()


async def test_the_announced_prefix_is_what_vllm_reuses(pair: Pair) -> None:
    """Also when vLLM evicts blocks."""
    random = Random(2)
    hasher = hasher_of(pair.decode)
    await pair.reset()
    beginnings = [[random.randrange(3, 500) for _ in range(12 * BLOCK_TOKENS)] for _ in range(8)]
    reused = 0
    for _ in range(20):
        beginning = random.choice(beginnings)
        prompt = beginning[: random.randrange(1, len(beginning))]
        prompt += [random.randrange(3, 500) for _ in range(random.randrange(1, 4 * BLOCK_TOKENS))]
        found = await announced(pair.decode)
        known = hasher.hashes(prompt[:-1])
        depth = next((n for n, name in enumerate(known) if name not in found), len(known))
        answer = await pair.plain(prompt, Sampling(temperature=0.0, max_tokens=1))
        assert answer.end is not None
        assert answer.end.cached_tokens == depth * BLOCK_TOKENS
        reused += depth
        await until_announced(pair.decode, set(hasher.hashes(prompt)).issubset)
    assert reused > 20
