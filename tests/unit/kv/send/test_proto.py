"""Reasons and batches that cross the handoff stream."""

from __future__ import annotations

import pytest

from headrace.kv.v1 import handoff_pb2
from headrace_kv.send.proto import batches, commit, reason_from_peer


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


def test_a_batch_keeps_the_order_and_leaves_logits_alone() -> None:
    commits = [commit(f"x{number}", number) for number in range(300)]
    logits = handoff_pb2.HandoffRequest(logits=handoff_pb2.LogitsPart(transfer_id="x", data=b"1"))
    sent = [commits[0], logits, *commits[1:]]
    found = list(batches(sent))
    assert [len(each.batch.requests) for each in found] == [0, 0, 256, 43]
    assert found[:2] == sent[:2]
    assert [each for batch in found[2:] for each in batch.batch.requests] == commits[1:]
    assert list(batches([])) == []
