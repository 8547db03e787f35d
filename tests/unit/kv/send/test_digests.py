"""Digests are computed for the workers that ask for them, and freed with their writes."""

from __future__ import annotations

import gc

import numpy as np

from headrace.kv.v1 import handoff_pb2
from headrace_kv.handoff.checksum import source_digest
from headrace_kv.plan.copy_plan import Runs
from headrace_kv.send.loop import WriteDigests, requested_observers
from headrace_kv.transport.memory import HOST_MEMORY
from tests.unit.kv.send.support import make_write

SOURCE = np.arange(100, dtype=np.uint8)
RUNS = Runs(np.array([SOURCE.ctypes.data]), np.array([0]), np.array([SOURCE.nbytes]))


def test_only_a_worker_that_asks_for_digests_has_an_observer() -> None:
    assert not requested_observers(handoff_pb2.Welcome(), HOST_MEMORY)
    (observer,) = requested_observers(handoff_pb2.Welcome(digest_share=1.0), HOST_MEMORY)
    assert isinstance(observer, WriteDigests)


def test_a_digest_is_sent_with_its_write_and_freed_with_it() -> None:
    digests = WriteDigests(HOST_MEMORY, 1.0)
    digested, other = make_write("a", runs=RUNS), make_write("a", runs=RUNS)
    digests.on_all_started("a", digested, 7)
    messages = [handoff_pb2.LayerDone(), handoff_pb2.LayerDone()]
    for write, message in zip((digested, other), messages, strict=True):
        digests.on_acknowledge(write, message)
    assert messages[0].digest == source_digest(HOST_MEMORY, RUNS, 7)
    assert not messages[1].HasField("digest")
    assert len(digests._digests) == 1
    del write, digested
    gc.collect()
    assert len(digests._digests) == 0
