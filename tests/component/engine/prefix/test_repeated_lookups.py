"""Results that a router caches between lookups are never stale."""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random

import pytest

from headrace_kv.layout.layout import WorkerRef
from tests.component.engine.prefix.workers import MODEL, EventRig, random_prompt
from tests.waiting import until


@pytest.fixture
async def rig() -> AsyncIterator[EventRig]:
    rig = EventRig()
    yield rig
    await rig.close()


async def test_a_repeated_lookup_sees_new_blocks_and_workers(rig: EventRig) -> None:
    prompt = tuple(random_prompt(Random(1), 50))
    first, second = await rig.add("w-0"), await rig.add("w-1")
    refs = frozenset({first.ref, second.ref})

    def held() -> dict[WorkerRef, int]:
        return rig.indexes.cached_refs(MODEL, prompt, refs)

    table = rig.follow([first])
    await rig.until_cached(table, list(prompt), w_0=0)
    assert held() == {}
    await first.answer(list(prompt))
    await until(lambda: held() == {first.ref: 48})
    # The router does not know the second worker yet.
    await second.answer(list(prompt[:20]))
    table = rig.follow([first, second])
    await until(lambda: held() == {first.ref: 48, second.ref: 16})
    assert rig.indexes.cached_tokens(table, prompt).tolist() == [48.0, 16.0]
    rig.follow([second])
    assert held() == {second.ref: 16}


async def test_a_changed_list_is_looked_up_as_another_prompt(rig: EventRig) -> None:
    prompt = random_prompt(Random(2), 50)
    worker = await rig.add("w-0")
    table = rig.follow()
    await worker.answer(list(prompt))
    await rig.until_cached(table, prompt, w_0=48)
    prompt[20] += 1
    assert rig.cached(table, prompt) == {"w-0": 16}
