"""Digests are computed for the workers that ask for them, and freed with their writes."""

from __future__ import annotations

import numpy as np

from headrace.kv.v1 import handoff_pb2
from headrace_kv.send.loop import WriteDigests, requested_observers
from headrace_kv.transport.memory import HOST_MEMORY

SOURCE = np.arange(100, dtype=np.uint8)


def test_only_a_worker_that_asks_for_digests_has_an_observer() -> None:
    assert not requested_observers(handoff_pb2.Welcome(), HOST_MEMORY)
    (observer,) = requested_observers(handoff_pb2.Welcome(digest_share=1.0), HOST_MEMORY)
    assert isinstance(observer, WriteDigests)
