"""The times of a task that its router gets."""

from __future__ import annotations

from headrace.prefill.v1 import prefill_pb2
from headrace_kv.handoff.messages import SendReport
from headrace_prefill.times import task_times
from tests.transfer_links import link_sent

_RECEIVED_NS = 10**18


def sent(rank: int, start_us: int, duration_us: int) -> SendReport:
    start_ns = _RECEIVED_NS + 1_000 * start_us
    link = link_sent(submitted_unix_ns=start_ns, landed_unix_ns=start_ns + 1_000 * duration_us)
    return SendReport("x1", rank, "", "", (link,))


def test_a_task_without_an_outcome_was_received() -> None:
    times = task_times(None, _RECEIVED_NS, _RECEIVED_NS)
    assert times == prefill_pb2.TaskTimes(received_unix_ns=_RECEIVED_NS, sent_us=1)
