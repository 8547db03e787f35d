"""The times of a task that its router gets."""

from __future__ import annotations

from headrace.prefill.v1 import prefill_pb2
from headrace_engine.interface import PrefillOutcome
from headrace_kv.handoff.messages import SendReport
from headrace_prefill.times import task_times
from tests.transfer_links import link_sent

_RECEIVED_NS = 10**18


def sent(rank: int, start_us: int, duration_us: int) -> SendReport:
    start_ns = _RECEIVED_NS + 1_000 * start_us
    link = link_sent(submitted_unix_ns=start_ns, landed_unix_ns=start_ns + 1_000 * duration_us)
    return SendReport("x1", rank, "", "", (link,))


def test_times_are_durations_since_the_receipt() -> None:
    outcome = PrefillOutcome(
        2,
        _RECEIVED_NS + 2_000,
        _RECEIVED_NS + 30_000,
        (sent(0, 9, 4), sent(1, 8, 20)),
    )
    assert task_times(outcome, _RECEIVED_NS, _RECEIVED_NS + 40_000) == prefill_pb2.TaskTimes(
        received_unix_ns=_RECEIVED_NS,
        compute_start_us=2,
        compute_end_us=30,
        first_write_us=8,
        last_write_us=28,
        sent_us=40,
    )


def test_a_task_without_an_outcome_was_received() -> None:
    times = task_times(None, _RECEIVED_NS, _RECEIVED_NS)
    assert times == prefill_pb2.TaskTimes(received_unix_ns=_RECEIVED_NS, sent_us=1)
