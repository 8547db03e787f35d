"""Mean load times of the tiers."""

from __future__ import annotations

import pytest

from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.load_times import LoadTimes, TierLoad


def test_the_slowest_rank_counts_for_its_tier() -> None:
    times = LoadTimes()
    assert times.seconds_per_block(Tier.HOST) is None
    times.record(TierLoad(Tier.HOST, 4, 0.4))
    times.record(TierLoad(Tier.HOST, 0, 9.0))
    times.record(TierLoad(Tier.HOST, 4, 1.2), rank=1)
    times.record(TierLoad(Tier.DISK, 1, 5.0))
    assert times.seconds_per_block(Tier.HOST) == pytest.approx(0.3)
    assert times.seconds_per_block(Tier.DISK) == 5.0


def test_older_loads_count_for_less() -> None:
    times = LoadTimes()
    times.record(TierLoad(Tier.DISK, 10_000, 10_000.0))
    for _ in range(10):
        times.record(TierLoad(Tier.DISK, 1_000, 0.0))
    found = times.seconds_per_block(Tier.DISK)
    assert found is not None
    assert 0.0 < found < 0.01
