"""One range on its way to one decode rank."""

from __future__ import annotations

import time

from headrace_kv.transport.base import WriteResult
from tests.unit.kv.send.support import make_write


def test_the_report_has_the_time_from_the_first_batch_to_the_last_landing() -> None:
    write = make_write("a")
    before_ns = time.perf_counter_ns()
    write.start_batch()
    after_ns = time.perf_counter_ns()
    write.batch_landed(WriteResult("in_memory", "direct", 1), after_ns + 1_000)
    assert 1_000 <= write.report().duration_ns <= after_ns + 1_000 - before_ns


def test_a_write_without_a_batch_took_no_time() -> None:
    assert make_write("a").report().duration_ns == 0
