"""Batches that cross the handoff stream."""

from __future__ import annotations

from headrace.kv.v1 import handoff_pb2
from headrace_kv.hidden_state import hidden_state_message
from headrace_kv.send.stream import batches


def test_a_batch_keeps_the_order_and_leaves_hidden_states_alone() -> None:
    commits = [
        handoff_pb2.HandoffRequest(commit=handoff_pb2.Commit(transfer_id=f"x{number}"))
        for number in range(300)
    ]
    sent = [commits[0], hidden_state_message("x", b"1", 0), *commits[1:]]
    found = list(batches(sent))
    assert [len(each.batch.requests) for each in found] == [0, 0, 256, 43]
    assert found[:2] == sent[:2]
    assert [each for batch in found[2:] for each in batch.batch.requests] == commits[1:]
    assert list(batches([])) == []
