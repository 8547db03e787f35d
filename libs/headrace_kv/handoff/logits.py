"""The logits of a transfer's last token. The handoff stream carries them in parts, with a digest of the whole."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from xxhash import xxh3_64_intdigest

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import KvCorrupt, ProtocolViolation
from headrace_kv.layout.layout import KvLayout

PART_BYTES: Final = 256 * 1024


def logits_rank(prefill: KvLayout) -> int:
    """The prefill rank that sends the logits: the first of the last stage. All ranks of that stage have all of them."""
    return prefill.rank_count - prefill.tensor_parallel_size


def logits_parts(
    transfer_id: str, logits: bytes, seed: int
) -> Iterator[handoff_pb2.HandoffRequest]:
    """The messages that carry the logits, in order. They are small, so that acknowledgements pass between them.

    `seed` is that of the transfer's digests.
    """
    for start in range(0, len(logits), PART_BYTES):
        part = handoff_pb2.LogitsPart(
            transfer_id=transfer_id,
            start_byte=start,
            total_bytes=len(logits),
            data=logits[start : start + PART_BYTES],
        )
        if start + PART_BYTES >= len(logits):
            part.digest = xxh3_64_intdigest(logits, seed)
        yield handoff_pb2.HandoffRequest(logits=part)


class OutgoingLogits:
    """One transfer's logits at the rank that sends them."""

    def __init__(self, transfer_id: str, seed: int) -> None:
        self.sent = False
        self._transfer_id = transfer_id
        self._seed = seed
        self._logits = b""

    def supply(self, logits: bytes) -> None:
        """Stores the logits until they can be sent."""
        self._logits = logits

    def take_parts(self) -> Iterator[handoff_pb2.HandoffRequest]:
        """The messages to send now: none before the logits are supplied. They are yielded once."""
        if self._logits and not self.sent:
            logits, self._logits, self.sent = self._logits, b"", True
            yield from logits_parts(self._transfer_id, logits, self._seed)


class IncomingLogits:
    """One transfer's logits at decode, of which `expected_bytes` are due; 0 where no logits are sent."""

    def __init__(self, transfer_id: str, expected_bytes: int) -> None:
        self._transfer_id = transfer_id
        self._expected_bytes = expected_bytes
        self._data = bytearray()
        self._settled = asyncio.Event()
        self.complete = not expected_bytes
        """Whether every due byte was received."""

    def receive_part(self, part: handoff_pb2.LogitsPart, seed: int) -> None:
        """Adds the next part. `seed` is that of the transfer's digests.

        Raises ProtocolViolation for another part, KvCorrupt when the digest does not match.
        """
        end = part.start_byte + len(part.data)
        if self.complete or part.total_bytes != self._expected_bytes:
            raise self._violation(
                f"{part.total_bytes} bytes of logits where {self._expected_bytes} are due"
                if part.total_bytes != self._expected_bytes
                else "more logits than are due"
            )
        if (
            part.start_byte != len(self._data)
            or not part.data
            or len(part.data) > PART_BYTES
            or end > self._expected_bytes
        ):
            raise self._violation(
                f"bytes [{part.start_byte}, {end}) of logits after byte {len(self._data)}"
            )
        self._data += part.data
        if end < self._expected_bytes:
            return
        if not part.HasField("digest"):
            raise self._violation("the last part of logits without a digest")
        if part.digest != xxh3_64_intdigest(self._data, seed):
            raise KvCorrupt(
                f"the logits of transfer {self._transfer_id} are not what was sent",
                metadata={"transfer_id": self._transfer_id},
            )
        self.complete = True
        self._settled.set()

    async def wait(self) -> bytes | None:
        """Waits until they are complete; None when they ended before."""
        await self._settled.wait()
        return bytes(self._data) if self.complete else None

    def end(self) -> None:
        """No further part is received."""
        self._settled.set()

    def _violation(self, what: str) -> ProtocolViolation:
        return ProtocolViolation(
            f"transfer {self._transfer_id}: {what}", metadata={"transfer_id": self._transfer_id}
        )
