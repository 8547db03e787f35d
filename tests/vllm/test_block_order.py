"""Requests get neighbouring blocks in order, from vLLM's own pool. Starts no engine."""

from __future__ import annotations

import itertools
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from tests.vllm.conftest import IMPORTS_VLLM

pytestmark = IMPORTS_VLLM

BLOCKS = 400
REQUESTS = 300
RUNNING = 8


def lists_of_requests(*, sort: bool) -> list[list[int]]:
    """The blocks of requests of random lengths, which run side by side and grow in chunks of 8 blocks."""
    from vllm.v1.core.block_pool import BlockPool

    from headrace_engine.vllm.scheduler.connector_scheduler import sort_new_blocks

    pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=32)
    if sort:
        sort_new_blocks(cast("Any", SimpleNamespace(block_pool=pool)))
    random = Random(5)
    running: list[tuple[int, list[Any]]] = []
    found: list[list[int]] = []
    while len(found) < REQUESTS:
        if len(running) < RUNNING:
            running.append((random.randint(1, 40), []))
        wanted, blocks = running.pop(random.randrange(len(running)))
        blocks += pool.get_new_blocks(min(8, wanted - len(blocks)))
        if len(blocks) < wanted:
            running.append((wanted, blocks))
        else:
            found.append([block.block_id for block in blocks])
            pool.free_blocks(reversed(blocks))
    return found


def runs(lists: list[list[int]]) -> int:
    """How many pieces of neighbouring blocks in ascending order the lists consist of."""
    return sum(
        sum(later != block + 1 for block, later in itertools.pairwise(ids)) + 1 for ids in lists
    )


def test_requests_get_the_same_blocks_in_fewer_runs() -> None:
    plain, ordered = lists_of_requests(sort=False), lists_of_requests(sort=True)
    print(f"runs of {REQUESTS} requests: {runs(plain)}, in order {runs(ordered)}")
    assert [sorted(ids) for ids in ordered[:3]] == [sorted(ids) for ids in plain[:3]]
    assert sum(map(len, ordered)) == sum(map(len, plain))
    assert runs(ordered) < 0.9 * runs(plain)
