"""What blocks of slower tiers are worth."""

from __future__ import annotations

import pytest

from headrace.worker.v1 import worker_pb2
from headrace_common.errors import ProtocolViolation
from headrace_kv.layout import WorkerRef
from headrace_kv.prefix.events import LOAD_TIME_MAX_S, Tier, load_time_from_proto
from headrace_router.prefix_cache.cached_prompts import UNMEASURED_SHARES, TierPrices

BLOCK_TOKENS = 16
COMPUTE_S_PER_TOKEN = 0.01
REFS = [WorkerRef(f"w-{number}", "1") for number in range(3)]
HOST_SHARE, DISK_SHARE = UNMEASURED_SHARES.values()


def prices(compute_s_per_token: float = COMPUTE_S_PER_TOKEN) -> TierPrices:
    return TierPrices(lambda model: compute_s_per_token if model == "m" else 0.0)


@pytest.mark.parametrize(
    ("load_s", "compute_s", "share"),
    [(0.0, 1.0, 1.0), (0.25, 1.0, 0.75), (1.0, 1.0, 0.0), (5.0, 1.0, 0.0)],
)
def test_a_loaded_block_is_worth_the_computing_that_it_saves(
    load_s: float, compute_s: float, share: float
) -> None:
    found = prices(compute_s)
    found.measured(REFS[0], Tier.HOST, load_s)
    assert found.shares("m", 1, REFS[:1]).tolist() == [[share], [DISK_SHARE]]


def test_each_worker_has_its_own_measured_share() -> None:
    found = prices()
    block_s = BLOCK_TOKENS * COMPUTE_S_PER_TOKEN
    found.measured(REFS[0], Tier.HOST, 0.1 * block_s)
    found.measured(REFS[2], Tier.HOST, 3 * block_s)
    found.measured(REFS[2], Tier.DISK, 0.5 * block_s)
    host, disk = found.shares("m", BLOCK_TOKENS, REFS)
    assert host == pytest.approx([0.9, HOST_SHARE, 0.0])
    assert disk == pytest.approx([DISK_SHARE, DISK_SHARE, 0.5])
    found.remove(REFS[0])
    found.measured(REFS[2], Tier.HOST, 0.2 * block_s)
    host, _ = found.shares("m", BLOCK_TOKENS, REFS)
    assert host == pytest.approx([HOST_SHARE, HOST_SHARE, 0.8])


def test_before_a_token_was_computed_the_shares_are_fixed() -> None:
    found = prices(0.0)
    found.measured(REFS[0], Tier.HOST, 1e-9)
    assert found.shares("m", BLOCK_TOKENS, REFS).tolist() == [[HOST_SHARE] * 3, [DISK_SHARE] * 3]


@pytest.mark.parametrize("seconds", [-1, int(LOAD_TIME_MAX_S) + 1])
def test_a_load_time_out_of_range_is_refused(seconds: int) -> None:
    message = worker_pb2.SubscribeKvEventsResponse()
    message.heartbeat.SetInParent()
    assert load_time_from_proto(message) is None
    message.heartbeat.load_time_per_block.seconds = seconds
    with pytest.raises(ProtocolViolation, match="load_time_per_block"):
        load_time_from_proto(message)
