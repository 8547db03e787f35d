"""What blocks of slower tiers are worth."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.worker.v1 import worker_pb2
from headrace_common.errors import ProtocolViolation
from headrace_kv.layout.layout import KvLayout, WorkerRef
from headrace_kv.prefix.events import LOAD_TIME_MAX_S, Tier, load_time_from_proto
from headrace_router.prefix_cache.tier_prices import (
    UNMEASURED_SHARES,
    TierPrices,
    share_of_loaded,
)
from headrace_router.workers.table import LoadTable, Worker

BLOCK_TOKENS = 16
COMPUTE_S_PER_TOKEN = 0.01
LAYOUT = KvLayout.attention(
    model="m",
    dtype="float32",
    layer_count=2,
    kv_head_count=2,
    tensor_parallel_size=1,
    block_tokens=BLOCK_TOKENS,
    parts={"kv": 16},
)
REFS = [WorkerRef(f"w-{number}", "1") for number in range(3)]


def table() -> LoadTable:
    return LoadTable(Worker(ref, "127.0.0.1:1", "m", 512, 8, LAYOUT) for ref in REFS)


def prices(compute_s_per_token: float = COMPUTE_S_PER_TOKEN) -> TierPrices:
    return TierPrices(lambda model: compute_s_per_token if model == "m" else 0.0)


@pytest.mark.parametrize(
    ("load_s", "compute_s", "share"),
    [(0.0, 1.0, 1.0), (0.25, 1.0, 0.75), (1.0, 1.0, 0.0), (5.0, 1.0, 0.0), (0.1, 0.0, 0.0)],
)
def test_a_loaded_block_is_worth_the_computing_that_it_saves(
    load_s: float, compute_s: float, share: float
) -> None:
    assert share_of_loaded(load_s, compute_s) == share


def test_each_worker_has_its_own_measured_share() -> None:
    found, rows = prices(), table()
    block_s = BLOCK_TOKENS * COMPUTE_S_PER_TOKEN
    found.measured(REFS[0], Tier.HOST, 0.1 * block_s)
    found.measured(REFS[2], Tier.HOST, 3 * block_s)
    found.measured(REFS[2], Tier.DISK, 0.5 * block_s)
    host, disk = found.shares("m", BLOCK_TOKENS, rows)
    assert host == pytest.approx([0.9, UNMEASURED_SHARES[0], 0.0])
    assert disk == pytest.approx([UNMEASURED_SHARES[1], UNMEASURED_SHARES[1], 0.5])
    for row, ref in enumerate(REFS):
        assert found.shares_of("m", BLOCK_TOKENS, ref) == pytest.approx([host[row], disk[row]])
    found.remove(REFS[0])
    found.measured(REFS[2], Tier.HOST, 0.2 * block_s)
    host, _ = found.shares("m", BLOCK_TOKENS, rows)
    assert host == pytest.approx([UNMEASURED_SHARES[0], UNMEASURED_SHARES[0], 0.8])


def test_small_changes_are_ignored() -> None:
    found, rows = prices(), table()
    block_s = BLOCK_TOKENS * COMPUTE_S_PER_TOKEN
    for load_s in (0.5, 0.52, 0.48):
        found.measured(REFS[0], Tier.HOST, load_s * block_s)
        assert found.shares("m", BLOCK_TOKENS, rows)[0][0] == pytest.approx(0.5)
    found.measured(REFS[0], Tier.HOST, 0.6 * block_s)
    assert found.shares("m", BLOCK_TOKENS, rows)[0][0] == pytest.approx(0.4)


def test_before_a_token_was_computed_the_shares_are_fixed() -> None:
    found, rows = prices(0.0), table()
    found.measured(REFS[0], Tier.HOST, 1e-9)
    for share, unmeasured in zip(
        found.shares("m", BLOCK_TOKENS, rows), UNMEASURED_SHARES, strict=True
    ):
        assert np.all(share == unmeasured)
    assert found.shares_of("m", BLOCK_TOKENS, REFS[0]) == list(UNMEASURED_SHARES)


@pytest.mark.parametrize("seconds", [-1, int(LOAD_TIME_MAX_S) + 1])
def test_a_load_time_out_of_range_is_refused(seconds: int) -> None:
    message = worker_pb2.SubscribeKvEventsResponse()
    message.heartbeat.SetInParent()
    assert load_time_from_proto(message) is None
    message.heartbeat.load_time_per_block.seconds = seconds
    with pytest.raises(ProtocolViolation, match="load_time_per_block"):
        load_time_from_proto(message)
