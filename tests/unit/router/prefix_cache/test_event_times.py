"""The credit of a worker that sends no events for a while."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_engine.prefix_events import PrefixEventPublisher
from headrace_engine.worker.status import StatusSignal, WorkerStatusServicer
from headrace_kv.layout import KvLayout, WorkerRef, layout_to_proto
from headrace_kv.prefix.hashing import prefix_hasher
from headrace_router.prefix_cache.directory import PrefixCacheDirectory
from tests.local_channel import LocalChannel
from tests.virtually import virtually

KEY, MODEL, BLOCK_TOKENS = 7, "small", 8
PROMPT = list(range(40))
SILENCE_S = 5.0
UNUSED: Any = (None, None, None)
LAYOUT = KvLayout.attention(
    model=MODEL,
    dtype="float32",
    layer_count=1,
    kv_head_count=1,
    tensor_parallel_size=1,
    block_tokens=BLOCK_TOKENS,
    parts={"kv": 4},
)


class Worker:
    """An incarnation of a worker that has cached PROMPT."""

    def __init__(self, generation: int = 1) -> None:
        self.ref = WorkerRef("w-0", f"{generation:016x}")
        self.events = PrefixEventPublisher(self.ref, BLOCK_TOKENS)
        self.events.set_hash_key(KEY, MODEL)
        self.servicer = WorkerStatusServicer(
            worker_pb2.WatchStatusResponse, self.events, StatusSignal(), *UNUSED
        )

    def cache(self) -> None:
        hashes = prefix_hasher(KEY, MODEL, BLOCK_TOKENS).hashes(PROMPT)
        self.events.stored(None, hashes)

    def member(self) -> registry_pb2.Member:
        return registry_pb2.Member(
            worker_id=self.ref.worker_id,
            incarnation=self.ref.incarnation,
            role=registry_pb2.Member.ROLE_DECODE,
            endpoint="10.0.0.1:7100",
            model=MODEL,
            layout=layout_to_proto(LAYOUT),
        )


class Router:
    """The directory of a router that follows one worker over one channel."""

    def __init__(self, worker: Worker) -> None:
        self.channel = LocalChannel(worker.servicer)
        self.ref = worker.ref
        self.directory = PrefixCacheDirectory(
            lambda endpoint: self.channel.channel, lambda: KEY, event_timeout_s=SILENCE_S
        )
        self.directory.update([worker.member()])

    def credit(self) -> int:
        return self.directory.cached.cached_refs(MODEL, PROMPT, "", [self.ref]).get(self.ref, 0)


@virtually
async def test_a_silent_worker_loses_its_credit_until_it_sends_again() -> None:
    worker = Worker()
    router = Router(worker)
    await asyncio.sleep(1.0)
    worker.cache()
    # Heartbeats keep the credit.
    await asyncio.sleep(100 * SILENCE_S)
    assert router.credit() == len(PROMPT)
    router.channel.cut()
    # The last events of a broken stream count for a while.
    await asyncio.sleep(SILENCE_S - 1.5)
    assert router.credit() == len(PROMPT)
    await asyncio.sleep(3.0)
    assert router.credit() == 0
    router.channel.servicer = worker.servicer
    await asyncio.sleep(10.0)
    assert router.credit() == len(PROMPT)
    await router.directory.close()


@virtually
async def test_an_unnoticed_restart_is_detected_by_the_incarnation() -> None:
    worker = Worker()
    router = Router(worker)
    worker.cache()
    await asyncio.sleep(1.0)
    assert router.credit() == len(PROMPT)
    router.channel.cut()
    new = Worker(generation=2)
    new.cache()
    router.channel.servicer = new.servicer
    await asyncio.sleep(2 * SILENCE_S)
    assert router.credit() == 0
    await router.directory.close()
