"""A prefill worker fetches what decode has of a prompt, and whatever goes wrong with that costs time only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest

from headrace.kv.v1 import prefix_pb2, prefix_pb2_grpc
from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import (
    Cancelled,
    DuplicateTransfer,
    HeadraceError,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    StaleIncarnation,
    TransferFailed,
    TransferTimeout,
    Unauthenticated,
)
from headrace_common.limits import write_quiet_s
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_common.tickets import SigningKey
from headrace_kv.copy_plan import Runs
from headrace_kv.layout import WorkerRef
from headrace_kv.leases import Timers
from headrace_kv.transport.base import KvTransport, WriteResult
from tests.component.prefill.fetching import (
    DECODE,
    INSECURE,
    LEASE_S,
    PREFILL,
    QUARANTINE_S,
    Reserved,
    Workers,
    fetching_workers,
)
from tests.in_memory_transport import InMemoryTransport
from tests.model.virtual_time import VirtualTimers
from tests.sim_blocks import free_blocks
from tests.waiting import until

FIRST = list(range(100, 140))
MORE = list(range(900, 921))
ANSWER_TOKENS = 24
_RELEASE_S = 30.0

LAYOUTS: dict[str, dict[str, Any]] = {
    "equal": {},
    "both roles": {"both_roles": True},
    "decode has more ranks": {"decode": {"tensor_parallel_size": 2}},
    "prefill has more ranks": {"prefill": {"tensor_parallel_size": 2}},
    "decode copies to its other ranks": {
        "model": "sim:heads=1,context=512",
        "decode": {"tensor_parallel_size": 4},
        "prefill": {"tensor_parallel_size": 2},
    },
    "block sizes differ": {"prefill": {"block_size": 16}, "decode": {"block_size": 8}},
    "decode has larger blocks": {"prefill": {"block_size": 8}, "decode": {"block_size": 16}},
    "whole blocks, several caches and stages": {
        "model": "sim:layers=3,heads=2,index_layers=2,block_format=token_inner,context=512",
        "decode": {"pipeline_parallel_size": 2},
    },
}


async def first_turn(workers: Workers) -> list[int]:
    """Answers FIRST. Returns the prompt of the next turn."""
    turn = await workers.turn(FIRST, ANSWER_TOKENS)
    assert workers.fetches == []
    return [*FIRST, *turn.tokens, *MORE]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
async def test_what_decode_generated_is_fetched_and_not_computed(layout: dict[str, Any]) -> None:
    async with fetching_workers(**layout) as workers:
        prompt = await first_turn(workers)
        turn = await workers.turn(prompt, 8)
        (fetch,) = workers.fetches
        assert fetch.reason == ""
        # Prefill has the first prompt's whole blocks. Decode has all whole blocks of the prompt and the answer.
        block_tokens = workers.prefill.descriptor.layout.groups[0].block_tokens
        cached = len(FIRST) - len(FIRST) % block_tokens
        assert turn.done.cached_tokens == cached
        assert turn.start_token >= len(FIRST) + ANSWER_TOKENS - 1 - 15
        assert fetch.token_count == turn.start_token - cached
        assert fetch.payload_bytes > 0
        # The next turn finds everything in prefill's own cache.
        again = await workers.turn([*prompt, *turn.tokens, *MORE], 4)
        assert again.done.cached_tokens >= turn.start_token


async def test_a_worker_that_decode_does_not_find_computes() -> None:
    async with fetching_workers() as workers:
        prompt = await first_turn(workers)
        workers.known.clear()
        await workers.turn(prompt, 8)
        assert [fetch.reason for fetch in workers.fetches] == [StaleIncarnation.reason]
        # After a failure, the next prompts do not try.
        await workers.turn([*prompt, *workers.expected(prompt, 8), *MORE], 8)
        assert len(workers.fetches) == 1


class HeldTransport(InMemoryTransport):
    """The second write, that of the fetch's last layer, lands when the test says so. No deadline ends it.

    `held` is set as soon as the second write has begun.
    """

    def __init__(self, held: threading.Event, release: threading.Event) -> None:
        super().__init__()
        self._held = held
        self._release = release

    def write(self, session: str, runs: Runs, timeout_s: float) -> WriteResult:
        if self.write_count == 1:
            self._held.set()
            assert self._release.wait(_RELEASE_S)
            timeout_s = _RELEASE_S
        return super().write(session, runs, timeout_s)


def held_transport(held: threading.Event, release: threading.Event) -> Callable[[], KvTransport]:
    return lambda: HeldTransport(held, release)


async def test_a_late_fetch_is_computed_in_other_blocks_and_a_late_write_harms_nothing() -> None:
    release = threading.Event()
    async with fetching_workers(
        decode_transports=held_transport(threading.Event(), release), timeout_s=0.5
    ) as workers:
        prompt = await first_turn(workers)
        free = free_blocks(workers.prefill)
        await workers.turn(prompt, 8)
        (fetch,) = workers.fetches
        assert fetch.reason == TransferTimeout.reason
        # The answer is complete. The blocks that the held write is for stay held (I1).
        held = -(-fetch.token_count // 8)
        assert free - free_blocks(workers.prefill) == held
        assert workers.prefill_receiver.quarantined_blocks
        release.set()
        await until(lambda: free_blocks(workers.prefill) == free)


@dataclass(slots=True)
class HeldFetch:
    """A request with a prefix of which decode has sent all but the last layer.

    `free`: the blocks of prefill and decode that no request held before. `release` lets the last layer land.
    """

    workers: Workers
    request: Reserved
    running: asyncio.Task[prefill_pb2.TaskDone]
    prompt: list[int]
    free: tuple[int, int]
    release: threading.Event

    async def released(self) -> None:
        """Lets the last layer land, and waits until all blocks are free."""
        self.release.set()
        await until(lambda: self.workers.free_blocks() == self.free)


@asynccontextmanager
async def held_fetch(prefill_timers: Timers | None = None) -> AsyncIterator[HeldFetch]:
    """The second turn of a conversation, while prefill waits for its prefix."""
    held, release = threading.Event(), threading.Event()
    async with fetching_workers(
        decode_transports=held_transport(held, release), prefill_timers=prefill_timers
    ) as workers:
        prompt = await first_turn(workers)
        free = workers.free_blocks()
        async with workers.reserved(prompt, 8) as request:
            running = asyncio.create_task(request.prefill())
            # Before its first write, decode could end the fetch at once and return all blocks.
            await until(held.is_set)
            yield HeldFetch(workers, request, running, prompt, free, release)


async def test_a_cancelled_task_ends_its_fetch_and_keeps_the_blocks_until_decode_is_quiet() -> None:
    async with held_fetch() as fetch:
        workers = fetch.workers
        assert workers.prefill_receiver.active_count == 1
        fetch.running.cancel()
        assert (await fetch.running).reason == Cancelled.reason
        fetch.request.call.cancel()
        assert [record.reason for record in workers.fetches] == [Cancelled.reason]
        assert free_blocks(workers.prefill) < fetch.free[0]
        await fetch.released()


async def test_decode_holds_the_blocks_that_it_sends_until_its_writes_have_ended() -> None:
    """I2, also when the request has ended."""
    async with held_fetch() as fetch:
        workers = fetch.workers
        # The client leaves.
        fetch.request.call.cancel()
        await until(lambda: workers.decode.usage().waiting_requests == 0)
        fetch.running.cancel()
        await fetch.running
        assert free_blocks(workers.decode) < fetch.free[1]
        await fetch.released()


async def test_a_lost_decode_worker_costs_the_quarantine_of_its_blocks_and_no_answer() -> None:
    """Its stream ends in the middle: the prompt is computed at once, in other blocks."""
    timers = VirtualTimers()
    async with held_fetch(timers) as fetch:
        workers = fetch.workers
        await workers.end_streams_to_prefill()
        assert (await fetch.running).reason == ""
        assert workers.fetches[0].reason == TransferFailed.reason
        assert free_blocks(workers.prefill) < fetch.free[0]
        assert await fetch.request.answer() == workers.expected(fetch.prompt, 8)
        fetch.release.set()
        await until(lambda: workers.free_blocks()[1] == fetch.free[1], what="the end of the write")
        assert workers.free_blocks()[0] < fetch.free[0]
        timers.advance_to(timers.time() + 1.1 * write_quiet_s(LEASE_S, QUARANTINE_S))
        await fetch.released()


async def refusal_of(workers: Workers, **fields: Any) -> HeadraceError:
    """The error with which the decode worker refuses to send."""
    asked: dict[str, Any] = {
        "worker_id": PREFILL.worker_id,
        "incarnation": PREFILL.incarnation,
        "end_token": 8,
    }
    async with open_channel(workers.decode_endpoint, INSECURE) as channel:
        stub = prefix_pb2_grpc.PrefixServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.SendPrefix(prefix_pb2.SendPrefixRequest(**(asked | fields)), timeout=10.0)
    return error_from_rpc(raised.value)


async def test_only_the_ticket_of_the_task_has_its_prefix_sent() -> None:
    async with fetching_workers() as workers:
        prompt = await first_turn(workers)
        async with workers.reserved(prompt, 8) as request:
            name = request.name
            forged: dict[str, bytes] = {
                "prefill_worker_id": workers.ticket(
                    name, prefill=WorkerRef("prefill-9", PREFILL.incarnation)
                ),
                "prefill_incarnation": workers.ticket(
                    name, prefill=WorkerRef(PREFILL.worker_id, "0" * 16)
                ),
                "transfer_id": workers.ticket("x999"),
                "decode_worker_id": workers.ticket(
                    name, decode=WorkerRef("decode-9", DECODE.incarnation)
                ),
            }
            for claim, ticket in forged.items():
                error = await refusal_of(workers, transfer_id=name, ticket=ticket)
                assert (type(error), error.metadata["ticket"]) == (PermissionDenied, claim)
            unsigned = {"key_id": workers.ticket(name, key=SigningKey()), "missing": b""}
            for claim, ticket in unsigned.items():
                error = await refusal_of(workers, transfer_id=name, ticket=ticket)
                assert (type(error), error.metadata["ticket"]) == (Unauthenticated, claim)
            # None of them has harmed the request.
            assert (await request.prefill()).reason == ""
            assert [fetch.reason for fetch in workers.fetches] == [""]
            assert await request.answer() == workers.expected(prompt, 8)


async def test_a_prefix_is_sent_once_and_no_more_than_is_cached() -> None:
    async with fetching_workers() as workers:
        prompt = await first_turn(workers)
        async with workers.reserved(prompt, 8) as request:
            valid = {"transfer_id": request.name, "ticket": workers.ticket(request.name)}
            beyond = request.reserved.start_token + 1
            for end_token in (beyond, 0):
                error = await refusal_of(workers, **valid, end_token=end_token)
                assert isinstance(error, InvalidRequest)
                assert "end_token" in error.violations
            # Prefill has not asked for it, and has no blocks for the transfer.
            assert "no reservation" in (await refusal_of(workers, **valid)).detail
            assert isinstance(await refusal_of(workers, **valid), DuplicateTransfer)
            assert (await request.prefill()).reason == ""
            assert [fetch.reason for fetch in workers.fetches] == [DuplicateTransfer.reason]
            assert await request.answer() == workers.expected(prompt, 8)
        ended = {"transfer_id": "x999", "ticket": workers.ticket("x999")}
        assert isinstance(await refusal_of(workers, **ended), NotFound)
