"""One range on its way to one decode rank."""

from __future__ import annotations

import time

from headrace_kv.transport.base import WriteResult
from tests.unit.kv.send.support import make_write


def test_a_write_has_the_times_of_its_first_batch_and_of_its_last_landing() -> None:
    write = make_write("a")
    before_ns = time.monotonic_ns()
    write.start_batch()
    after_ns = time.monotonic_ns()
    write.batch_landed(WriteResult("in_memory", "gather", 1, 30, 7), after_ns + 1_000)
    assert before_ns <= write.submitted_ns <= after_ns
    assert write.landed_ns == after_ns + 1_000
    assert (write.entry_count, write.gather_ns, write.staging_wait_ns) == (1, 30, 7)
