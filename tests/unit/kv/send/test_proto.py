"""Reasons that cross the handoff stream."""

from __future__ import annotations

import pytest

from headrace_kv.send.proto import reason_from_peer


@pytest.mark.parametrize(
    "reason, reported",
    [
        ("DRAINING", "TRANSFER_FAILED"),
        ("WORKER_GONE", "TRANSFER_FAILED"),
        ("", "CANCELLED"),
        ("TRANSFER_TIMEOUT", "TRANSFER_TIMEOUT"),
        ("NEWER_REASON", "NEWER_REASON"),
    ],
)
def test_decodes_own_state_is_not_reported_as_this_ranks(reason: str, reported: str) -> None:
    assert reason_from_peer(reason) == reported
