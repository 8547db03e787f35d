"""How often idle workers send."""

from __future__ import annotations

import pytest

from headrace_common.process.pacing import heartbeat_interval_s, must_change


def test_small_deployments_send_every_second() -> None:
    assert [heartbeat_interval_s(workers) for workers in (0, 1, 5)] == [1.0] * 3


@pytest.mark.parametrize("workers", [6, 100, 300])
def test_the_rate_of_all_together_is_bounded(workers: int) -> None:
    assert workers / heartbeat_interval_s(workers) == pytest.approx(5.0)


def test_no_worker_may_be_asked_for_a_longer_interval() -> None:
    assert heartbeat_interval_s(100_000) == 60.0


def test_a_stream_is_replaced_for_twice_or_half_its_interval_only() -> None:
    changes = {wanted: must_change(10.0, wanted) for wanted in (5.0, 6.0, 10.0, 19.0, 20.0)}
    assert changes == {5.0: True, 6.0: False, 10.0: False, 19.0: False, 20.0: True}
