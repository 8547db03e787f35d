"""Threads of low priority."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from headrace_common.tasks import lower_priority


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_only_the_calling_thread_gets_a_low_priority() -> None:
    here = niceness()
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(niceness).result(10) == here
        for _ in range(2):
            thread.submit(lower_priority).result(10)
            assert thread.submit(niceness).result(10) == max(10, here)
    assert niceness() == here
