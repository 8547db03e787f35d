"""Whole transfers over real gRPC, and real Mooncake over TCP."""

from __future__ import annotations

import pytest

from headrace_kv.plan.shard_map import expected_keys
from headrace_kv.receive.observer import TransferState
from tests.component.kv.harness import (
    BLOCK_TOKENS,
    LentMooncake,
    TransportSource,
    make_layout,
    memory_transports,
    running,
)


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
