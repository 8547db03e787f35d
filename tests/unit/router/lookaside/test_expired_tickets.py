"""Requests with an expired ticket count while their worker reports as many."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from headrace.inference.v1 import inference_pb2
from headrace_kv.layout.layout import WorkerRef
from headrace_router.lookaside.tracking import DirectRequestTracker

_REF = WorkerRef("d0", "a")


class _Workers:
    def __init__(self, external_requests: int) -> None:
        self.external_requests = external_requests

    def external_request_count(self, ref: WorkerRef) -> int:
        assert ref == _REF
        return self.external_requests


@pytest.mark.parametrize("external_requests,ended", [(0, 3), (1, 2), (3, 0), (4, 0)])
async def test_expired_requests_beyond_those_that_the_worker_reports_end(
    external_requests: int, ended: int
) -> None:
    workers: Any = _Workers(external_requests)
    unused: Any = None
    tracker = DirectRequestTracker(workers, unused, ttl_s=0.0, longest_s=60.0)
    released: list[str] = []
    for name in "abc":
        direct = inference_pb2.DirectRequest(
            transfer_id=name, traceparent=f"00-{ord(name):032x}-{1:016x}-01"
        )
        tracker.track(direct, _REF, unused, partial(released.append, name), 0)
    tracker._sweep()
    assert released == ["a", "b", "c"][:ended]
    assert len(tracker) == 3 - ended
    tracker.close()
    assert released == ["a", "b", "c"]
