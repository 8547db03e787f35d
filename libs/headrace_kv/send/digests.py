"""Digests of the writes to one decode worker. An observer beside the send path, for workers that ask for digests."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from headrace.kv.v1 import handoff_pb2
from headrace_kv.handoff.checksum import is_digested, source_digest
from headrace_kv.send.peer import WriteObserver
from headrace_kv.send.writes.layer_write import LayerWrite
from headrace_kv.transport.memory import Memory


class WriteDigests:
    """Computes the digest of a write's source bytes and adds it to the write's LayerDone.

    `share` is the part of all (transfer, layer) pairs that decode wants digests of.
    """

    def __init__(self, memory: Memory, share: float) -> None:
        self._memory = memory
        self._share = share
        # The digest of a write that is never acknowledged is freed with the write.
        self._digests: WeakKeyDictionary[LayerWrite, int] = WeakKeyDictionary()

    def on_all_started(self, transfer_id: str, write: LayerWrite, digest_seed: int) -> None:
        """Computes the digest while the transport is still sending the bytes."""
        if is_digested(self._share, transfer_id, write.layer):
            self._digests[write] = source_digest(self._memory, write.runs, digest_seed)

    def on_acknowledge(self, write: LayerWrite, message: handoff_pb2.LayerDone) -> None:
        """Adds the digest, if there is one."""
        digest = self._digests.get(write)
        if digest is not None:
            message.digest = digest


def requested_observers(welcome: handoff_pb2.Welcome, memory: Memory) -> tuple[WriteObserver, ...]:
    """The observers that a decode worker's Welcome asks for."""
    if welcome.digest_share > 0.0:
        return (WriteDigests(memory, welcome.digest_share),)
    return ()
