"""Real workers publish their prefix caches, and a real router credits exactly these blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from random import Random
from typing import Any

import grpc.aio
import pytest

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_common.errors import (
    DeadlineExceeded,
    QueueFull,
    StaleIncarnation,
    TransferFailed,
)
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_engine import prefix_events
from headrace_engine.prefix_events import PrefixEventPublisher
from headrace_engine.worker import status
from headrace_kv.handoff.messages import Reservation
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.manager.lower_tiers import TierSettings
from headrace_kv.prefix.hashing import key_fingerprint
from headrace_router.prefix_cache.model_index import ModelIndex
from headrace_router.workers.directory import worker_from_member
from headrace_router.workers.table import LoadTable
from tests.component.engine.kv_event_workers import (
    BLOCK_TOKENS,
    KEY,
    MODEL,
    CachingWorker,
    EventRig,
    random_prompt,
    whole_blocks,
)
from tests.component.engine.sim.support import decode_work, pair
from tests.memory_pool import InMemoryPool, MemoryStore
from tests.waiting import PATIENCE_S, let_a_wrong_step_show, until

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


async def test_blocks_in_the_remote_pool_count_for_every_worker(rig: EventRig) -> None:
    prompt = random_prompt(Random(3), 50)
    store = MemoryStore()
    tiers = TierSettings(host_gib=0.001, pool_address="127.0.0.1:1", publishes=True)
    first = await rig.add("w-0", tiers=tiers, pools=lambda *given: InMemoryPool(store, *given))
    await rig.add("w-1")
    table = rig.follow()
    await first.answer(prompt)
    await rig.until_cached(table, prompt, w_0=48, w_1=48 // 4)
    # The queue of prompts prefers workers that have the blocks themselves.
    refs = {worker.ref for worker in rig.workers}
    assert set(rig.indexes.cached_refs(MODEL, prompt, "", refs)) == {first.ref}
    assert await first.engine.reset_prefix_cache()
    # The worker forgets that it has stored them, and they are still there.
    await rig.until_cached(table, prompt, w_0=0, w_1=0)
    assert store.objects


async def test_blocks_in_main_memory_count_by_their_measured_load_time(rig: EventRig) -> None:
    random = Random(3)
    first, second = random_prompt(random, 80), random_prompt(random, 80)
    model = "sim:context=512,host_blocks=40,host_copy_s_per_token=0.002"
    worker = await rig.add("w-0", model=model, num_gpu_blocks_override=96 // BLOCK_TOKENS)
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
    # Computing a token takes twice as long as loading it does, or less than that on a busy machine.
    rig.compute_s_per_token = 0.004
    await until(lambda: rig.cached(table, first)["w-0"] < unmeasured)
    # In the other role, too.
    refs = [worker.ref]
    credited = rig.indexes.cached_refs(MODEL, first, "", refs)[worker.ref]
    assert credited == rig.cached(table, first)["w-0"]


async def test_another_key_or_block_size_gives_no_credit_and_one_warning(
    rig: EventRig, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = random_prompt(Random(4), 50)
    good, odd = await rig.add("w-0"), await rig.add("w-1")
    for worker in (good, odd):
        await worker.answer(prompt)
    members = [good.member(), odd.member()]
    for group in members[1].layout.groups:
        group.block_tokens = 2 * BLOCK_TOKENS
    rig.indexes.update(members)
    table = LoadTable(map(worker_from_member, members))
    await rig.until_cached(table, prompt, w_0=48, w_1=0)
    await until(lambda: set(rig.indexes.faults) == {odd.ref})
    assert f"blocks of {BLOCK_TOKENS} tokens" in rig.indexes.faults[odd.ref]
    rig.indexes.update([])
    assert not rig.indexes.faults
    caplog.clear()
    # The registry was restarted with another key after the workers joined, and before this router did.
    rig.key = KEY + 1
    table = rig.follow()
    await until(lambda: set(rig.indexes.faults) == {good.ref, odd.ref})
    # A real clock, because the workers' engines have one: every worker repeats its key after a second.
    await asyncio.sleep(1.2)
    assert rig.cached(table, prompt) == {"w-0": 0, "w-1": 0}
    warnings = [r.getMessage() for r in caplog.records if "no credit" in r.getMessage()]
    assert len(warnings) == 2
    for fingerprint in map(key_fingerprint, (KEY, KEY + 1)):
        assert all(f"{fingerprint:08x}" in warning for warning in warnings)


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
            assert rig.indexes.cached_tokens(table, fixed, salt).tolist() == [tokens]
            assert rig.indexes.cached_refs(MODEL, fixed, salt, [worker.ref]) == {worker.ref: tokens}
    assert rig.cached(table, prompt, "cc") == {"w-0": 0}
    await until(worker.engine.reset_prefix_cache)
    await until(lambda: not any(rig.cached(table, prompt, salt)["w-0"] for salt in salts))


async def test_prefill_and_decode_workers_publish_a_transferred_prompt(rig: EventRig) -> None:
    prompt = random_prompt(Random(3), 67)
    refs = [WorkerRef(name, "0123456789abcdef") for name in ("p-0", "d-0", "x-0")]
    prefill, decode, _ = refs
    async with pair(decode={"block_size": 16}) as engines:
        workers = []
        for engine, ref, role in (
            (engines.prefill, prefill, registry_pb2.Member.ROLE_PREFILL),
            (engines.decode, decode, registry_pb2.Member.ROLE_DECODE),
        ):
            assert engine.prefix_events is not None
            engine.prefix_events.ref = ref
            workers.append(await CachingWorker.serving(engine, ref, role))
        rig.follow(workers)
        await engines.generate(prompt)

        def found(token_ids: list[int], refs: list[WorkerRef]) -> dict[WorkerRef, int]:
            return rig.indexes.cached_refs(MODEL, token_ids, "", refs)

        await until(lambda: found(prompt, refs) == {prefill: 64, decode: 64})
        assert found(prompt[:40], refs) == {prefill: 40, decode: 32}
        assert rig.indexes.cached_refs("another", prompt, "", refs) == {}
        for worker in workers:
            await worker.cut()


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


async def test_a_new_incarnation_starts_with_no_credit(rig: EventRig) -> None:
    prompt = random_prompt(Random(7), 40)
    await rig.add_cached(prompt)
    new = await rig.add("w-0", generation=2)
    table = rig.follow([new])
    assert rig.cached(table, prompt) == {"w-0": 0}
    await new.answer(prompt[:20])
    await rig.until_cached(table, prompt, w_0=16)
    assert len(rig.channels) == 2


def _has_applied_all(model_index: ModelIndex, ref: WorkerRef, events: PrefixEventPublisher) -> bool:
    return not events._pending and model_index.index.resume_after(ref) == events._log.sequence


async def test_a_slow_subscriber_is_ended_and_delays_no_other(
    rig: EventRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_events, "BUFFERED_BYTES_MAX", 64 << 10)
    # Without bandwidth probes, the receive window of a connection stays at 64 KiB.
    small = [("grpc.http2.bdp_probe", 0), ("grpc.enable_http_proxy", 0)]
    worker = await rig.add("w-0")
    table = rig.follow()
    events = worker.engine.prefix_events
    assert events is not None
    prompt = random_prompt(Random(9), 40)
    random = Random(10)
    async with grpc.aio.insecure_channel(worker.endpoint, options=small) as channel:
        slow = worker_pb2_grpc.WorkerServiceStub(channel).SubscribeKvEvents(
            worker_pb2.SubscribeKvEventsRequest(incarnation=worker.ref.incarnation)
        )
        await slow.read()
        await until(lambda: bool(rig.indexes._cached._indexes))
        (by_size,) = rig.indexes._cached._indexes.values()
        (model_index,) = by_size.values()
        for _ in range(40):
            events.stored(None, [random.getrandbits(64) for _ in range(4_000)])
            # The router never falls behind, however slow the machine is.
            await until(partial(_has_applied_all, model_index, worker.ref, events))
        await worker.answer(prompt)
        await rig.until_cached(table, prompt, w_0=40)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _read_all(slow)
    assert isinstance(error_from_rpc(caught.value), QueueFull)
    # The slow subscriber and the router, which never subscribed again.
    assert len(worker.servicer.requests) == 2


async def test_a_worker_without_events_has_no_credit_and_is_not_retried(
    rig: EventRig,
) -> None:
    worker = await rig.add("w-0")
    worker.servicer._prefix_events = None
    prompt = random_prompt(Random(11), 40)
    await worker.answer(prompt)
    table = rig.follow()
    await until(lambda: bool(worker.servicer.requests))
    await let_a_wrong_step_show()
    assert rig.cached(table, prompt) == {"w-0": 0}
    assert len(worker.servicer.requests) == 1


async def test_workers_of_several_block_sizes_are_credited_together(rig: EventRig) -> None:
    prompt = random_prompt(Random(12), 50)
    for worker_id, size in (("w-0", 8), ("w-1", 16), ("w-2", 16)):
        worker = await rig.add(worker_id, block_size=size)
        await worker.answer(prompt if worker_id != "w-2" else prompt[:20])
    table = rig.follow()
    await rig.until_cached(table, prompt, w_0=48, w_1=48, w_2=16)
    # Rows of another table do not matter.
    alone = LoadTable([table.workers[2]])
    assert rig.cached(alone, prompt) == {"w-2": 16}
    assert rig.cached(table, prompt) == {"w-0": 48, "w-1": 48, "w-2": 16}
    rig.key = 0
    assert rig.cached(table, prompt) == {"w-0": 0, "w-1": 0, "w-2": 0}


async def test_members_that_leave_lose_their_streams_and_blocks(rig: EventRig) -> None:
    prompt = random_prompt(Random(13), 40)
    for number in range(3):
        await (await rig.add(f"w-{number}")).answer(prompt)
    table = rig.follow()
    await rig.until_cached(table, prompt, w_0=40, w_1=40, w_2=40)
    rig.follow(rig.workers[:1])
    assert rig.cached(table, prompt) == {"w-0": 40, "w-1": 0, "w-2": 0}
    index = next(iter(rig.indexes._cached._indexes[MODEL].values())).index
    await until(lambda: not index._slots.retired)
    assert index.block_count == 40 // BLOCK_TOKENS
    assert len(rig.indexes._feeds) == 1
    rig.follow([])
    assert rig.indexes._cached._indexes == {}


async def _read_all(call: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await call.read()


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
        events = worker.engine.decode(work)
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
        worker.engine.released(work.transfer_id)
        with pytest.raises(TransferFailed):
            await anext(events)
        await resetting
    await rig.until_cached(table, prompt, w_0=0)
    _, cached = await worker.answer(prompt)
    assert cached == 0


async def test_a_repeated_lookup_sees_new_blocks_and_workers(rig: EventRig) -> None:
    prompt = tuple(random_prompt(Random(1), 50))
    first, second = await rig.add("w-0"), await rig.add("w-1")
    refs = frozenset({first.ref, second.ref})

    held = partial(rig.indexes.cached_refs, MODEL, prompt, "", refs)
    table = rig.follow([first])
    await rig.until_cached(table, list(prompt), w_0=0)
    assert held() == {}
    await first.answer(list(prompt))
    await until(lambda: held() == {first.ref: 48})
    # The router does not know the second worker yet.
    await second.answer(list(prompt[:20]))
    table = rig.follow([first, second])
    await until(lambda: held() == {first.ref: 48, second.ref: 16})
    assert rig.indexes.cached_tokens(table, prompt, "").tolist() == [48.0, 16.0]
    rig.follow([second])
    assert held() == {second.ref: 16}


async def test_a_changed_list_is_looked_up_as_another_prompt(rig: EventRig) -> None:
    prompt = random_prompt(Random(2), 50)
    _, table = await rig.add_cached(list(prompt))
    assert rig.cached(table, prompt) == {"w-0": 48}
    prompt[20] += 1
    assert rig.cached(table, prompt) == {"w-0": 16}
