"""Whole transfers over real gRPC, and real Mooncake over TCP."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from headrace_kv.plan.shard_map import expected_keys
from headrace_kv.receive.observer import TransferState
from tests.component.kv.harness import (
    BLOCK_TOKENS,
    LEASE_S,
    LentMooncake,
    TransportSource,
    make_layout,
    memory_transports,
    running,
)
from tests.waiting import until


@pytest.fixture(params=["memory", "mooncake"])
def transports(request: pytest.FixtureRequest, mooncake: LentMooncake) -> TransportSource:
    return memory_transports() if request.param == "memory" else mooncake


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("decode_tp", [1, 2, 4])
@pytest.mark.parametrize("prefill_tp", [1, 2, 4])
async def test_every_rank_gets_its_heads(
    prefill_tp: int, decode_tp: int, heads: int, transports: TransportSource
) -> None:
    prefill, decode = make_layout(prefill_tp, heads), make_layout(decode_tp, heads)
    token_count = 5 * BLOCK_TOKENS + 3
    source_blocks = (7, 8, 9, 2, 30, 31)
    async with running(prefill, decode, transports) as rig:
        transfer = rig.start(token_count)
        rig.push(transfer.transfer_id, source_blocks, 0, token_count)
        rig.finish(transfer.transfer_id)
        summary = await rig.received(transfer, source_blocks)
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


async def test_a_rank_without_edges_is_quiet_at_once() -> None:
    async with running(make_layout(4, 1, layers=1), make_layout(1, 1, layers=1)) as rig:
        transfer = rig.start()
        await until(lambda: len(rig.reports) == 3)
        assert all(report.layers == () and report.reason == "" for report in rig.reports)
        rig.push(transfer.transfer_id)
        summary = await transfer.wait()
        assert summary.acknowledgement_count == 1


@pytest.mark.parametrize("prefill_tp, decode_tp", [(2, 4), (4, 2)])
async def test_chunks_arrive_before_the_next_is_computed(prefill_tp: int, decode_tp: int) -> None:
    blocks = tuple(range(10, 18))
    token_count = 7 * BLOCK_TOKENS + 1
    async with running(prefill_tp, decode_tp) as rig:
        transfer = rig.start(token_count)
        edges = len(expected_keys(rig.prefill, rig.decode, transfer.transfer_id))
        for chunk, (start, end) in enumerate(((0, 8), (8, 20), (20, token_count)), start=1):
            rig.push(transfer.transfer_id, blocks[: -(-end // BLOCK_TOKENS)], start, end)
            await until(
                lambda n=chunk: (
                    transfer.ledger is not None  # type: ignore[misc]
                    and transfer.ledger.ack_count == n * edges
                )
            )
        await rig.received(transfer, blocks)


async def test_only_tokens_that_decode_lacks_are_sent() -> None:
    """Decode has two blocks cached. Prefill pushes its own cached prefix from the start."""
    blocks = (3, 4, 5, 6)
    token_count = 4 * BLOCK_TOKENS - 2
    async with running(2, 1) as rig:
        transfer = rig.start(token_count, start_token=2 * BLOCK_TOKENS)
        rig.push(transfer.transfer_id, blocks, 0, 3 * BLOCK_TOKENS)
        rig.push(transfer.transfer_id, blocks, 3 * BLOCK_TOKENS, token_count + 1)
        summary = await rig.received(transfer, blocks, first_block=2)
        group = rig.decode.groups[0]
        lacking = group.bytes_between(2 * BLOCK_TOKENS, token_count, heads=4)
        assert summary.payload_bytes == 6 * lacking


async def test_ranges_that_are_pushed_again_are_sent_once() -> None:
    """The engine computes a preempted request again from its start."""
    async with running() as rig:
        transfer = rig.start(2 * BLOCK_TOKENS)
        for end in (BLOCK_TOKENS, 2 * BLOCK_TOKENS):
            rig.push(transfer.transfer_id, end_token=end)
        summary = await transfer.wait()
        assert summary.acknowledgement_count == 12
        whole = rig.decode.groups[0].bytes_between(0, 2 * BLOCK_TOKENS, heads=4)
        assert summary.payload_bytes == 6 * whole


async def test_open_may_come_before_the_reservation() -> None:
    async with running(2, 2) as rig:
        transfer_id = "x" + "1" * 32
        rig.open(rig.target(rig.reserve(), transfer_id=transfer_id))
        rig.push(transfer_id)
        await until(lambda: len(rig.receiver._pending_opens._expiries.get(transfer_id, ())) == 2)
        await rig.received(rig.reserve(transfer_id=transfer_id, first_block=9))


async def test_many_transfers_at_once() -> None:
    async with running(2, 4, block_count=400) as rig:
        transfers = []
        for index in range(40):
            blocks = tuple(range(index * 5, index * 5 + 5))
            transfer = rig.start(5 * BLOCK_TOKENS, first_block=index * 5 + 104)
            rig.push(transfer.transfer_id, blocks, 0, 5 * BLOCK_TOKENS)
            transfers.append((transfer, blocks))
        for transfer, blocks in transfers:
            await rig.received(transfer, blocks)


async def test_nothing_is_left_behind() -> None:
    threads, tasks = threading.active_count(), len(asyncio.all_tasks())
    async with running(2, 2) as rig:
        await rig.send().wait()
        unfinished = rig.start()
        await until(lambda: unfinished.state is TransferState.OPEN)
        start_s = time.monotonic()
    # Closing waits for no lease and no deadline.
    assert time.monotonic() - start_s < LEASE_S / 2
    await until(
        lambda: (
            not [t for t in threading.enumerate() if t.name.startswith("kv-sender")]
            and threading.active_count() <= threads + 2
        )  # grpc's own poller may stay
    )
    await until(lambda: len(asyncio.all_tasks()) <= tasks)
