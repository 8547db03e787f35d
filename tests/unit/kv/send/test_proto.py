"""Reasons and batches that cross the handoff stream."""

from __future__ import annotations

from headrace.kv.v1 import handoff_pb2
from headrace_kv.send.proto import batches, commit


def test_a_batch_keeps_the_order_and_leaves_logits_alone() -> None:
    commits = [commit(f"x{number}", number) for number in range(300)]
    logits = handoff_pb2.HandoffRequest(logits=handoff_pb2.LogitsPart(transfer_id="x", data=b"1"))
    sent = [commits[0], logits, *commits[1:]]
    found = list(batches(sent))
    assert [len(each.batch.requests) for each in found] == [0, 0, 256, 43]
    assert found[:2] == sent[:2]
    assert [each for batch in found[2:] for each in batch.batch.requests] == commits[1:]
    assert list(batches([])) == []
