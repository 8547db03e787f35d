"""vLLM's KV events, converted to prefix announcements."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, NamedTuple

import pytest

from headrace_engine.prefix_events import PrefixEventPublisher
from headrace_engine.vllm.service.kv_events import VllmPrefixes
from headrace_kv.layout import WorkerRef
from headrace_kv.prefix.events import Tier, unpack_hashes
from headrace_kv.prefix.hashing import prefix_hasher
from headrace_kv.prefix.images import content_hash, hashed_token_ids

BLOCK = 4
KEY = 77
HASHER = prefix_hasher(KEY, "m", BLOCK)
names = HASHER.hashes
SALTS = ("", "aa", "bb")


def vllm_hashes(tokens: list[int]) -> list[int]:
    """Stand-ins for vLLM's own hashes: any that differ between prefixes."""
    ends = range(BLOCK, len(tokens) + 1, BLOCK)
    return [hash((len(tokens[:end]), *tokens[:end])) & (1 << 64) - 1 for end in ends]


def stored(tokens: list[int], first: int, end: int, **changes: Any) -> dict[str, Any]:
    """The event of the prompt's blocks [first, end)."""
    hashes = vllm_hashes(tokens)
    return {
        "type": "BlockStored",
        "block_hashes": hashes[first:end],
        "parent_block_hash": hashes[first - 1] if first else None,
        "token_ids": tokens[first * BLOCK : end * BLOCK],
        "block_size": BLOCK,
        "medium": "GPU",
        "group_idx": 0,
    } | changes


def removed(*hashes: int, group: int = 0) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "group_idx": group}


class Rig:
    def __init__(self, *tiers: Tier) -> None:
        self.events = PrefixEventPublisher(
            WorkerRef("w", "1" * 16), BLOCK, flush_s=0.0, tiers=tiers or (Tier.DEVICE,)
        )
        self.prefixes = VllmPrefixes(self.events)

    async def announced(self, tier: Tier = Tier.DEVICE) -> set[int]:
        await asyncio.sleep(0.01)
        found: set[int] = set()
        with self.events.subscribe(0) as subscription:
            async for message in subscription.messages(1.0):
                if message.WhichOneof("event") != "snapshot":
                    break
                if int(message.tier) == tier:
                    found.update(unpack_hashes(message.snapshot.hashes))
        return found


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.events.set_hash_key(KEY, "m")
    return rig


@pytest.mark.parametrize("seed", range(5))
async def test_names_of_blocks_do_not_depend_on_how_events_group_them(rig: Rig, seed: int) -> None:
    random = Random(seed)
    base = [random.randrange(1 << 31) for _ in range(random.randrange(30, 100) * BLOCK)]
    fork = random.randrange(1, len(base) // BLOCK)
    other = base[: fork * BLOCK] + [random.randrange(1000) for _ in range(20 * BLOCK)]
    for tokens, start in ((base, 0), (other, fork)):
        first = start
        while first < len(tokens) // BLOCK:
            end = min(first + random.randrange(1, 12), len(tokens) // BLOCK)
            rig.prefixes.apply(stored(tokens, first, end))
            first = end
    assert await rig.announced() == {*names(base), *names(other)}


def salted(cache_salt: str, tokens: list[int], first: int, end: int) -> dict[str, Any]:
    """The same for a prompt with a salt: vLLM's hashes differ, and the first block's event has the salt."""
    event = stored(tokens, first, end)
    for name in ("block_hashes", "parent_block_hash"):
        hashes = event[name]
        if isinstance(hashes, list):
            event[name] = [hash((cache_salt, one)) for one in hashes]
        elif hashes is not None:
            event[name] = hash((cache_salt, hashes))
    extra = [None] * (end - first)
    return event | {"extra_keys": [[cache_salt], *extra[1:]] if cache_salt and not first else extra}


@pytest.mark.parametrize("seed", range(5))
async def test_blocks_with_a_salt_have_names_of_their_own(rig: Rig, seed: int) -> None:
    """Also in chunks that begin in an earlier event, and after a removal."""
    random = Random(seed)
    tokens = [random.randrange(1 << 31) for _ in range(random.randrange(10, 40) * BLOCK)]
    count = len(tokens) // BLOCK
    positions = dict.fromkeys(SALTS, 0)
    while any(first < count for first in positions.values()):
        cache_salt = random.choice([salt for salt in SALTS if positions[salt] < count])
        first = positions[cache_salt]
        end = positions[cache_salt] = min(first + random.randrange(1, 12), count)
        rig.prefixes.apply(salted(cache_salt, tokens, first, end))
    chains = {salt: names(tokens, HASHER.root_of(salt)) for salt in SALTS}
    assert await rig.announced() == {name for chain in chains.values() for name in chain}
    assert len({name for chain in chains.values() for name in chain}) == len(SALTS) * count
    gone = salted("aa", tokens, 2, count)["block_hashes"]
    rig.prefixes.apply(removed(*reversed(gone)))
    left = {*chains[""], *chains["aa"][:2], *chains["bb"]}
    assert await rig.announced() == left
    rig.prefixes.apply(salted("aa", tokens, 2, 5))
    assert await rig.announced() == left | set(chains["aa"][:5])


async def test_removal_from_the_end_and_storing_again(rig: Rig) -> None:
    tokens = list(range(20 * BLOCK))
    hashes = vllm_hashes(tokens)
    rig.prefixes.apply(stored(tokens, 0, 20))
    for block_hash in reversed(hashes[5:]):
        rig.prefixes.apply(removed(block_hash))
    assert await rig.announced() == set(names(tokens)[:5])
    rig.prefixes.apply(stored(tokens, 5, 20))
    assert await rig.announced() == set(names(tokens))
    rig.prefixes.apply({"type": "AllBlocksCleared"})
    assert await rig.announced() == set()
    rig.prefixes.apply(stored(tokens, 0, 1))
    assert await rig.announced() == set(names(tokens)[:1])


async def test_a_block_is_announced_until_its_last_copy_is_removed(rig: Rig) -> None:
    tokens = list(range(2 * BLOCK))
    last = vllm_hashes(tokens)[1]
    rig.prefixes.apply(stored(tokens, 0, 2))
    rig.prefixes.apply(stored(tokens, 0, 2))
    rig.prefixes.apply(removed(last))
    assert await rig.announced() == set(names(tokens))
    rig.prefixes.apply(removed(last))
    rig.prefixes.apply(removed(last))
    assert await rig.announced() == set(names(tokens)[:1])


async def test_blocks_that_depend_on_more_than_known_tokens_are_not_announced(rig: Rig) -> None:
    tokens = list(range(4 * BLOCK))
    rig.prefixes.apply(stored(tokens, 1, 2))
    for keys in (["adapter"], ["aa", "bb"], [b"aa"], [["aa", 0]]):
        rig.prefixes.apply(stored(tokens, 0, 1, extra_keys=[keys]))
    rig.prefixes.apply(stored(tokens, 0, 1, extra_keys=[["aa"]], lora_name="aa"))
    rig.prefixes.apply(stored(tokens, 0, 2, extra_keys=[None, ["aa"]]))
    rig.prefixes.apply(stored(tokens, 0, 1, group_idx=1))
    rig.prefixes.apply(stored(tokens, 0, 1, block_size=2 * BLOCK))
    rig.prefixes.apply(stored(tokens, 0, 2, token_ids=tokens[:BLOCK]))
    assert await rig.announced() == set()
    rig.prefixes.apply(stored(tokens, 0, 2, extra_keys=[None, None]))
    rig.prefixes.apply(removed(vllm_hashes(tokens)[0], group=1))
    assert await rig.announced() == set(names(tokens)[:2])


async def test_blocks_of_an_adapter_are_announced_under_its_salt(rig: Rig) -> None:
    tokens = list(range(4 * BLOCK))
    # vLLM adds the adapter's name to the keys of each block.
    keys = {"lora_name": "poet", "lora_id": 1}
    salted = [["poet", "aa"], ["poet"]]
    rig.prefixes.apply(stored(tokens, 0, 2, extra_keys=salted, **keys))
    rig.prefixes.apply(stored(tokens, 2, 3, extra_keys=[["poet"]], **keys))
    assert await rig.announced() == set(names(tokens, HASHER.root_of("aa"))[:3])
    # Without a salt, the names would be those of the model alone.
    rig.prefixes.apply(stored(tokens[::-1], 0, 1, extra_keys=[["poet"]], **keys))
    rig.prefixes.apply(stored(tokens[::-1], 0, 1, extra_keys=[["poet", "aa", "bb"]], **keys))
    assert await rig.announced() == set(names(tokens, HASHER.root_of("aa"))[:3])


async def test_blocks_before_the_key_is_known_are_not_announced() -> None:
    rig = Rig()
    tokens = list(range(2 * BLOCK))
    rig.prefixes.apply(stored(tokens, 0, 1))
    rig.events.set_hash_key(KEY, "m")
    rig.prefixes.apply(stored(tokens, 1, 2))
    assert await rig.announced() == set()


async def test_blocks_of_another_size_are_logged_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    for tokens in ([1] * 2 * BLOCK, [2] * 2 * BLOCK):
        rig.prefixes.apply(stored(tokens, 0, 1, block_size=2 * BLOCK))
    assert await rig.announced() == set()
    (warning,) = (record.getMessage() for record in caplog.records)
    assert f"blocks of {2 * BLOCK} tokens" in warning
    assert f"blocks of {BLOCK}:" in warning


def offloaded(tokens: list[int], first: int, end: int) -> dict[str, Any]:
    """The event of an OffloadingConnector, which reports copied blocks by their hashes alone."""
    return stored(tokens, first, end, medium="CPU", token_ids=[], parent_block_hash=None) | {
        "block_size": 0
    }


async def test_copies_in_host_memory_are_a_tier_of_their_own() -> None:
    rig = Rig(Tier.DEVICE, Tier.HOST)
    rig.events.set_hash_key(KEY, "m")
    tokens = list(range(12 * BLOCK))
    hashes, known = vllm_hashes(tokens), names(tokens)
    rig.prefixes.apply(stored(tokens, 0, 10))
    rig.prefixes.apply(offloaded(tokens, 0, 6))
    rig.prefixes.apply(stored(tokens, 10, 12, medium="CPU"))
    for block_hash in reversed(hashes[2:10]):
        rig.prefixes.apply(removed(block_hash) | {"medium": "GPU"})
    assert await rig.announced() == set(known[:2])
    # The chain breaks after the sixth block, so later ones cannot be found.
    assert await rig.announced(Tier.HOST) == set(known[:6])
    rig.prefixes.apply(removed(*reversed(hashes[1:6])) | {"medium": "CPU"})
    assert await rig.announced() == set(known[:2])
    assert await rig.announced(Tier.HOST) == set(known[:2])


async def test_copies_in_a_tier_that_is_not_announced_change_nothing(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = list(range(4 * BLOCK))
    rig.prefixes.apply(stored(tokens, 0, 4))
    rig.prefixes.apply(offloaded(tokens, 0, 4))
    rig.prefixes.apply(removed(*vllm_hashes(tokens)) | {"medium": "CPU"})
    rig.prefixes.apply(removed(*vllm_hashes(tokens)) | {"medium": "STORAGE"})
    assert await rig.announced() == set(names(tokens))
    assert not caplog.records


class Span(NamedTuple):
    content_hash: bytes
    start_token: int
    token_count: int


def pictured(
    tokens: list[int], images: list[Span], first: int, end: int, **options: str
) -> dict[str, Any]:
    """The event of blocks of a prompt with images, as vLLM reports them."""
    adapter, salt = options.get("adapter", ""), options.get("salt", "")
    keys: list[Any] = []
    for block in range(first, end):
        start = block * BLOCK
        found: list[Any] = [adapter] if adapter else []
        found += [
            [
                f"{options.get('prefix', '')}{image.content_hash.hex()}{salt}",
                image.start_token - start,
            ]
            for image in images
            if image.start_token < start + BLOCK and start < image.start_token + image.token_count
        ]
        found += [salt] if salt and not block else []
        keys.append(found or None)
    event = stored(tokens, first, end, lora_name=adapter or None)
    words = hashed_token_ids(tokens, images).tolist()
    known = salted(salt, [*words, hash(adapter)], first, end)
    return event | {
        "extra_keys": keys,
        "block_hashes": known["block_hashes"],
        "parent_block_hash": known["parent_block_hash"],
    }


PICTURED = [*range(3), *[9] * 6, *[9] * 5, 1, 2, *[9] * 4, 5, 5, *[9] * 20, 3, 4, 5, 6, 7, 8]
PICTURES = [
    Span(content_hash(b"cat"), 3, 6),
    Span(content_hash(b"dog"), 9, 5),
    Span(content_hash(b"cat"), 16, 4),
    Span(content_hash(b"cow"), 22, 20),
]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "options", [{}, {"salt": "aa"}, {"salt": "aa", "adapter": "poet", "prefix": "poet:"}]
)
async def test_images_are_part_of_the_names(rig: Rig, seed: int, options: dict[str, str]) -> None:
    """However events group the blocks, and for images that touch or begin in an earlier block."""
    random = Random(seed)
    first, count = 0, len(PICTURED) // BLOCK
    while first < count:
        end = min(first + random.randrange(1, 6), count)
        rig.prefixes.apply(pictured(PICTURED, PICTURES, first, end, **options))
        first = end
    words = hashed_token_ids(PICTURED, PICTURES)
    assert await rig.announced() == set(names(words, HASHER.root_of(options.get("salt", ""))))


@pytest.mark.parametrize(
    "keys", [["9f", 0], [content_hash(b"x").hex(), 0, 1], ["z" * 32, 0], [7, 0]]
)
async def test_blocks_with_other_media_are_ignored(rig: Rig, keys: list[Any]) -> None:
    rig.prefixes.apply(stored(PICTURED, 0, 1, extra_keys=[[keys]]))
    assert not await rig.announced()
