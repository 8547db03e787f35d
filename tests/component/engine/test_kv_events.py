"""Real workers publish their prefix caches, and a real router credits exactly these blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random

import grpc.aio
import pytest

from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_common.errors import DeadlineExceeded, StaleIncarnation, TransferFailed
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_engine.interface import Released
from headrace_engine.worker import status
from headrace_kv.messages import Reservation
from headrace_kv.prefix.events import Tier
from tests.component.engine.kv_event_workers import (
    BLOCK_TOKENS,
    MODEL,
    EventRig,
    random_prompt,
    whole_blocks,
)
from tests.component.engine.sim.support import decode_work, host_blocks
from tests.decoding import decoded
from tests.waiting import let_a_wrong_step_show, until

Messages = AsyncIterator[worker_pb2.SubscribeKvEventsResponse]


@pytest.fixture
async def rig() -> AsyncIterator[EventRig]:
    rig = EventRig()
    yield rig
    await rig.close()


async def test_earlier_blocks_are_sent_in_a_snapshot_and_later_ones_as_events(
    rig: EventRig,
) -> None:
    random = Random(1)
    early, late = random_prompt(random, 50), random_prompt(random, 50)
    first, second = await rig.add("w-0"), await rig.add("w-1")
    await first.answer(early)
    table = rig.follow()
    await rig.until_cached(table, early, w_0=48, w_1=0)
    whole, _ = await second.answer(late, max_tokens=31)
    # The answer's last token has no KV.
    await rig.until_cached(table, [*whole, 1, 2], w_0=0, w_1=80)
    # Only the common prefix counts.
    assert rig.cached(table, [*early[:20], *late]) == {"w-0": 16, "w-1": 0}
    assert rig.cached(table, early[:7]) == {"w-0": 0, "w-1": 0}
    assert rig.cached(table, []) == {"w-0": 0, "w-1": 0}


@pytest.mark.parametrize("model", ["sim:context=512", "sim:context=512,index_layers=1"])
async def test_credited_tokens_equal_the_engines_cached_tokens(rig: EventRig, model: str) -> None:
    """Over many prompts with shared prefixes, on engines that evict blocks."""
    random = Random(2)
    for number in range(2):
        await rig.add(f"w-{number}", model=model, num_gpu_blocks_override=40, seed=number)
    table = rig.follow()
    beginnings = [random_prompt(random, random.randrange(20, 120)) for _ in range(4)]
    known = 0
    for _ in range(60):
        beginning = random.choice(beginnings)
        prompt = beginning[: random.randrange(1, len(beginning))]
        prompt += random_prompt(random, random.randrange(1, 60))
        worker = random.choice(rig.workers)
        credit = rig.cached(table, prompt)[worker.ref.worker_id]
        _, cached = await worker.answer(prompt)
        # An engine always computes the prompt's last token.
        assert cached == min(credit, whole_blocks(prompt[:-1])), prompt
        known += cached
        await rig.until_cached(
            table, prompt, **{worker.ref.worker_id.replace("-", "_"): whole_blocks(prompt)}
        )
    assert known > 500


async def test_blocks_in_main_memory_count_by_their_measured_load_time(rig: EventRig) -> None:
    random = Random(3)
    first, second = random_prompt(random, 80), random_prompt(random, 80)
    worker = await rig.add("w-0", tiers=host_blocks(40), num_gpu_blocks_override=96 // BLOCK_TOKENS)
    table = rig.follow()
    await worker.answer(first)
    await rig.until_cached(table, first, w_0=80)
    await worker.answer(second)
    await until(lambda: rig.cached(table, first)["w-0"] < 80)
    unmeasured = rig.cached(table, first)["w-0"]
    # The fixed share of main memory.
    assert unmeasured >= 0.75 * 80
    await worker.answer(first)
    await worker.answer(second)
    # Computing a token takes twice as long as loading it does.
    loads = worker.engine.tier_loads
    await until(lambda: loads.seconds_per_block(Tier.HOST) is not None)
    rig.compute_s_per_token = 2 * (loads.seconds_per_block(Tier.HOST) or 0.0) / BLOCK_TOKENS
    await until(lambda: rig.cached(table, first)["w-0"] < unmeasured)
    # In the other role, too.
    refs = [worker.ref]
    credited = rig.indexes.cached.cached_refs(MODEL, first, "", refs)[worker.ref]
    assert credited == rig.cached(table, first)["w-0"]


async def test_a_lookup_finds_the_blocks_of_its_salt_only(rig: EventRig) -> None:
    prompt = random_prompt(Random(14), 150)
    salts = {"": 16, "aa": 72, "bb": 144}
    worker = await rig.add("w-0")
    table = rig.follow()
    for salt, tokens in salts.items():
        _, cached = await worker.answer(prompt[: tokens + 1], cache_salt=salt)
        assert cached == 0
    # Twice, because the router caches the hashes of a tuple.
    fixed = tuple(prompt)
    await until(lambda: salts == {salt: rig.cached(table, prompt, salt)["w-0"] for salt in salts})
    for _ in range(2):
        for salt, tokens in salts.items():
            assert rig.indexes.cached.cached_tokens(table, fixed, salt).tolist() == [tokens]
            assert rig.indexes.cached.cached_refs(MODEL, fixed, salt, [worker.ref]) == {
                worker.ref: tokens
            }
    assert rig.cached(table, prompt, "cc") == {"w-0": 0}
    await until(worker.engine.reset_prefix_cache)
    await until(lambda: not any(rig.cached(table, prompt, salt)["w-0"] for salt in salts))


async def test_a_broken_stream_resumes_where_it_broke(rig: EventRig) -> None:
    random = Random(4)
    before, meanwhile = random_prompt(random, 40), random_prompt(random, 40)
    worker, table = await rig.add_cached(before)
    await worker.cut()
    await worker.answer(meanwhile)
    # Its last events count for a while.
    assert rig.cached(table, before) == {"w-0": 40}
    await worker.serve()
    await rig.until_cached(table, meanwhile, w_0=40)
    assert rig.cached(table, before) == {"w-0": 40}
    assert worker.servicer.requests[-1].since_sequence > 0


@pytest.mark.parametrize("kind", ["stored", "removed", "snapshot"])
async def test_a_lost_event_is_detected_and_repaired(rig: EventRig, kind: str) -> None:
    random = Random(6)
    worker = await rig.add("w-0", num_gpu_blocks_override=17)
    lost: list[str] = []

    async def losing(messages: Messages) -> Messages:
        async for message in messages:
            if not lost and message.WhichOneof("event") == kind:
                lost.append(kind)
            else:
                yield message

    worker.servicer.relay = losing
    prompts = [random_prompt(random, 60) for _ in range(4)]
    await worker.answer(prompts[0])
    table = rig.follow()
    for prompt in prompts[1:]:
        await worker.answer(prompt)
        await asyncio.sleep(0.05)
    await until(lambda: bool(lost))
    await rig.until_cached(table, prompts[-1], w_0=56)
    _, cached = await worker.answer(prompts[0])
    assert cached < 56
    await rig.until_cached(table, prompts[0], w_0=56)
    assert len(worker.servicer.requests) == 2


async def test_each_of_two_routers_gets_all_events(rig: EventRig) -> None:
    random = Random(8)
    prompts = [random_prompt(random, 50) for _ in range(3)]
    worker = await rig.add("w-0")
    other = EventRig(workers=rig.workers)
    await worker.answer(prompts[0])
    tables = rig.follow(), other.follow()
    await worker.answer(prompts[1])
    for prompt in prompts[:2]:
        await rig.until_cached(tables[0], prompt, w_0=48)
        await other.until_cached(tables[1], prompt, w_0=48)
    await other.indexes.close()
    await worker.answer(prompts[2])
    await rig.until_cached(tables[0], prompts[2], w_0=48)


async def test_a_worker_without_events_has_no_credit_and_is_not_retried(rig: EventRig) -> None:
    worker = await rig.add("w-0")
    worker.servicer.has_events = False
    prompt = random_prompt(Random(11), 40)
    await worker.answer(prompt)
    table = rig.follow()
    await until(lambda: bool(worker.servicer.requests))
    await let_a_wrong_step_show()
    assert rig.cached(table, prompt) == {"w-0": 0}
    assert len(worker.servicer.requests) == 1


async def test_members_that_leave_lose_their_streams_and_blocks(rig: EventRig) -> None:
    prompt = random_prompt(Random(13), 40)
    for number in range(3):
        await (await rig.add(f"w-{number}")).answer(prompt)
    table = rig.follow()
    await rig.until_cached(table, prompt, w_0=40, w_1=40, w_2=40)
    rig.follow(rig.workers[:1])
    assert rig.cached(table, prompt) == {"w-0": 40, "w-1": 0, "w-2": 0}
    index = next(iter(rig.indexes.cached._indexes[MODEL].values())).index
    await until(lambda: not index._slots.retired)
    assert index.block_count == 40 // BLOCK_TOKENS
    assert len(rig.indexes._feeds) == 1
    rig.follow([])
    assert rig.indexes.cached._indexes == {}


async def test_a_cache_reset_waits_for_requests_and_is_published(
    rig: EventRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So the answer comes a minute before the caller's deadline.
    monkeypatch.setattr(status, "RESPONSE_MARGIN_S", 60.0)
    prompt = random_prompt(Random(9), 50)
    worker, table = await rig.add_cached(prompt)
    async with open_channel(worker.endpoint) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ResetPrefixCache(worker_pb2.ResetPrefixCacheRequest(incarnation="0" * 16))
        assert isinstance(error_from_rpc(caught.value), StaleIncarnation)

        work = decode_work(prompt, transfer_id="x9", remote_kv=True)
        events = decoded(worker.engine, work)
        assert isinstance(await anext(events), Reservation)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ResetPrefixCache(worker_pb2.ResetPrefixCacheRequest(), timeout=60.5)
        refused = error_from_rpc(caught.value)
        assert isinstance(refused, DeadlineExceeded)
        assert int(refused.metadata["used_blocks"]) >= 7
        assert rig.cached(table, prompt) == {"w-0": 48}

        resetting = stub.ResetPrefixCache(
            worker_pb2.ResetPrefixCacheRequest(incarnation=worker.ref.incarnation), timeout=60
        )
        await let_a_wrong_step_show()
        assert not resetting.done()
        worker.engine.transfer_event(Released(work.transfer_id))
        with pytest.raises(TransferFailed):
            await anext(events)
        await resetting
    await rig.until_cached(table, prompt, w_0=0)
    _, cached = await worker.answer(prompt)
    assert cached == 0
