"""Whole transfers over real gRPC, and real Mooncake over TCP."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from headrace_kv.plan.shard_map import expected_keys
from headrace_kv.receive.state import TransferState
from headrace_kv.transport.base import KvTransport
from headrace_kv.transport.factory import open_transport
from tests.component.kv.harness import (
    BLOCK_TOKENS,
    LentTransport,
    TransportSource,
    make_layout,
    memory_transports,
    running,
)
from tests.waiting import until


@pytest.fixture(scope="module")
def mooncake() -> Iterator[TransportSource]:
    """Mooncake transports, made once for each role and rank."""
    made: dict[tuple[str, int], LentTransport] = {}

    def make(role: str, rank: int) -> KvTransport:
        if (role, rank) not in made:
            made[role, rank] = LentTransport(open_transport("mooncake", "127.0.0.1", "tcp"))
        return made[role, rank]

    yield make
    for transport in made.values():
        transport.close_lender()


SIZES = (1, 2, 4)
PAIRS = [(prefill, decode) for prefill in SIZES for decode in SIZES]


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("prefill_tp, decode_tp", PAIRS)
async def test_every_rank_gets_its_heads(prefill_tp: int, decode_tp: int, heads: int) -> None:
    await send_one(prefill_tp, decode_tp, heads, memory_transports())


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("prefill_tp, decode_tp", PAIRS)
async def test_every_rank_gets_its_heads_over_mooncake(
    prefill_tp: int, decode_tp: int, heads: int, mooncake: TransportSource
) -> None:
    await send_one(prefill_tp, decode_tp, heads, mooncake)


async def send_one(
    prefill_tp: int, decode_tp: int, heads: int, transports: TransportSource
) -> None:
    prefill, decode = make_layout(prefill_tp, heads), make_layout(decode_tp, heads)
    token_count = 5 * BLOCK_TOKENS + 3
    source_blocks = (7, 8, 9, 2, 30, 31)
    async with running(prefill, decode, transports) as rig:
        truth = rig.fill(source_blocks, seed=1)
        transfer = rig.reserve(token_count)
        rig.open(rig.target(transfer))
        rig.push(transfer.transfer_id, source_blocks, 0, token_count)
        rig.finish(transfer.transfer_id)
        summary = await transfer.wait()
        rig.check_bytes(truth, transfer.reservation)
        reports = await rig.quiet(transfer.transfer_id)
        keys = expected_keys(rig.prefill, rig.decode, transfer.transfer_id)
        assert summary.acknowledgement_count == len(keys)
        assert summary.prefill == rig.prefill_ref
        assert summary.first_ack_unix_ns <= summary.complete_unix_ns
        assert {
            (report.rank, sent.destination_rank, sent.layer)
            for report in reports
            for sent in report.layers
        } == keys
        assert all(report.reason == "" for report in reports)
        assert summary.payload_bytes == sum(
            sent.payload_bytes for report in reports for sent in report.layers
        )
        assert not rig.released
        assert rig.receiver.active_count == rig.receiver.quarantined_blocks == 0
        states = [state for state, _ in transfer.transitions]
        assert states == [
            TransferState.RESERVED,
            TransferState.OPEN,
            TransferState.RECEIVING,
            TransferState.COMPLETE,
            TransferState.FREE,
        ]


async def test_ranks_with_redundant_heads_write_nothing() -> None:
    """With P TP=4, D TP=2 and one head, two of the four ranks write each layer, and they complete it."""
    async with running(make_layout(4, 1), make_layout(2, 1), memory_transports()) as rig:
        truth = rig.fill((0,), seed=2)
        transfer = rig.reserve(BLOCK_TOKENS)
        rig.open(rig.target(transfer))
        rig.push(transfer.transfer_id, (0,), 0, BLOCK_TOKENS)
        summary = await transfer.wait()
        reports = await rig.quiet(transfer.transfer_id)
        assert summary.acknowledgement_count == 6 * 2
        assert sum(len(report.layers) for report in reports) == 6 * 2
        assert all(report.reason == "" for report in reports)
        rig.check_bytes(truth, transfer.reservation)


async def test_a_rank_without_edges_is_quiet_at_once() -> None:
    async with running(
        make_layout(4, 1, layers=1), make_layout(1, 1, layers=1), memory_transports()
    ) as rig:
        rig.fill((0,), seed=2)
        transfer = rig.reserve(BLOCK_TOKENS)
        rig.open(rig.target(transfer))
        await until(lambda: len(rig.reports) == 3)
        assert all(report.layers == () and report.reason == "" for report in rig.reports)
        rig.push(transfer.transfer_id, (0,), 0, BLOCK_TOKENS)
        summary = await transfer.wait()
        assert summary.acknowledgement_count == 1


@pytest.mark.parametrize("prefill_tp, decode_tp", [(2, 4), (4, 2)])
async def test_chunks_arrive_before_the_next_is_computed(prefill_tp: int, decode_tp: int) -> None:
    prefill, decode = make_layout(prefill_tp), make_layout(decode_tp)
    blocks = tuple(range(10, 18))
    token_count = 7 * BLOCK_TOKENS + 1
    async with running(prefill, decode, memory_transports()) as rig:
        truth = rig.fill(blocks, seed=3)
        transfer = rig.reserve(token_count)
        rig.open(rig.target(transfer))
        edges = len(expected_keys(rig.prefill, rig.decode, transfer.transfer_id))
        for chunk, (start, end) in enumerate(((0, 8), (8, 20), (20, token_count)), start=1):
            rig.push(transfer.transfer_id, blocks[: -(-end // BLOCK_TOKENS)], start, end)
            await until(
                lambda n=chunk: (
                    transfer.ledger is not None  # type: ignore[misc]
                    and transfer.ledger.ack_count == n * edges
                )
            )
        summary = await transfer.wait()
        assert summary.acknowledgement_count == 3 * edges
        rig.check_bytes(truth, transfer.reservation)


async def test_only_tokens_that_decode_lacks_are_sent() -> None:
    """Decode has two blocks cached. Prefill pushes its own cached prefix from the start."""
    blocks = (3, 4, 5, 6)
    token_count = 4 * BLOCK_TOKENS - 2
    async with running(make_layout(2), make_layout(1), memory_transports()) as rig:
        truth = rig.fill(blocks, seed=4)
        transfer = rig.reserve(token_count, start_token=2 * BLOCK_TOKENS)
        rig.open(rig.target(transfer))
        rig.push(transfer.transfer_id, blocks, 0, 3 * BLOCK_TOKENS)
        rig.push(transfer.transfer_id, blocks, 3 * BLOCK_TOKENS, token_count + 1)
        summary = await transfer.wait()
        rig.check_bytes(truth, transfer.reservation, first_block=2)
        group = rig.decode.groups[0]
        lacking = group.bytes_between(2 * BLOCK_TOKENS, token_count, heads=4)
        assert summary.payload_bytes == 6 * lacking


async def test_ranges_that_are_pushed_again_are_sent_once() -> None:
    """The engine computes a preempted request again from its start."""
    blocks = (3, 4)
    async with running(make_layout(1), make_layout(1), memory_transports()) as rig:
        rig.fill(blocks, seed=5)
        transfer = rig.reserve(2 * BLOCK_TOKENS)
        rig.open(rig.target(transfer))
        rig.push(transfer.transfer_id, blocks, 0, BLOCK_TOKENS)
        rig.push(transfer.transfer_id, blocks, 0, 2 * BLOCK_TOKENS)
        summary = await transfer.wait()
        assert summary.acknowledgement_count == 12
        whole = rig.decode.groups[0].bytes_between(0, 2 * BLOCK_TOKENS, heads=4)
        assert summary.payload_bytes == 6 * whole


async def test_open_may_come_before_the_reservation() -> None:
    async with running(make_layout(2), make_layout(2), memory_transports()) as rig:
        truth = rig.fill((1,), seed=6)
        transfer_id = "x" + "1" * 32
        reserved = rig.reserve(BLOCK_TOKENS, transfer_id="x" + "2" * 32)
        target = rig.target(reserved)
        early = type(target)(
            transfer_id, target.decode, target.handoff_endpoint, 0, 4, target.deadline_s
        )
        rig.open(early)
        rig.push(transfer_id, (1,), 0, BLOCK_TOKENS)
        await asyncio.sleep(0.2)
        transfer = rig.reserve(BLOCK_TOKENS, transfer_id=transfer_id, first_block=9)
        await transfer.wait()
        rig.check_bytes(truth, transfer.reservation)


async def test_many_transfers_at_once() -> None:
    async with running(make_layout(2), make_layout(4), memory_transports(), block_count=400) as rig:
        transfers = []
        for index in range(40):
            blocks = tuple(range(index * 5, index * 5 + 5))
            truth = rig.fill(blocks, seed=index)
            transfer = rig.reserve(5 * BLOCK_TOKENS, first_block=index * 5 + 104)
            rig.open(rig.target(transfer))
            rig.push(transfer.transfer_id, blocks, 0, 5 * BLOCK_TOKENS)
            transfers.append((transfer, truth))
        for transfer, truth in transfers:
            await transfer.wait()
            rig.check_bytes(truth, transfer.reservation)


async def test_nothing_is_left_behind() -> None:
    threads, tasks = threading.active_count(), len(asyncio.all_tasks())
    async with running(make_layout(2), make_layout(2), memory_transports()) as rig:
        rig.fill((1,), seed=7)
        transfer = rig.reserve(BLOCK_TOKENS)
        rig.open(rig.target(transfer))
        rig.push(transfer.transfer_id, (1,), 0, BLOCK_TOKENS)
        await transfer.wait()
        unfinished = rig.reserve(BLOCK_TOKENS)
        rig.open(rig.target(unfinished))
        await until(lambda: unfinished.state is TransferState.OPEN)
        start = time.monotonic()
    assert time.monotonic() - start < 3.0
    await until(
        lambda: (
            not [t for t in threading.enumerate() if t.name.startswith("kv-sender")]
            and threading.active_count() <= threads + 2
        )  # grpc's own poller may stay
    )
    await until(lambda: len(asyncio.all_tasks()) <= tasks)
