"""The hidden state of a transfer's last token, which the handoff stream carries with a digest."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from xxhash import xxh3_64_intdigest

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import KvCorrupt, LayoutMismatch, ProtocolViolation
from headrace_kv.layout import KvLayout

ELEMENT_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
BYTES_MAX: Final = 256 * 1024
"""Acknowledgements wait behind a message, and must not wait long."""


@dataclass(frozen=True, slots=True)
class HiddenFormat:
    """The form of a model's hidden states. `dtype` is a key of ELEMENT_BYTES on the side that uses them."""

    dtype: str
    element_count: int

    @property
    def nbytes(self) -> int:
        """Bytes of one position."""
        return ELEMENT_BYTES[self.dtype] * self.element_count

    @property
    def is_supported(self) -> bool:
        """Whether a hidden state can be sent in one message."""
        return self.dtype in ELEMENT_BYTES and 0 < self.nbytes <= BYTES_MAX

    def __str__(self) -> str:
        return f"{self.element_count} x {self.dtype}"

    def to_proto(self) -> handoff_pb2.HiddenFormat:
        return handoff_pb2.HiddenFormat(dtype=self.dtype, element_count=self.element_count)


def format_of(hello: handoff_pb2.Hello) -> HiddenFormat | None:
    """What a prefill worker's hidden states are; None when it sends none."""
    if not hello.HasField("hidden_format"):
        return None
    return HiddenFormat(hello.hidden_format.dtype, hello.hidden_format.element_count)


def hidden_state_rank(prefill: KvLayout) -> int:
    """The prefill rank that sends hidden states: the first of the last stage. All ranks of that stage have them."""
    return prefill.rank_count - prefill.tensor_parallel_size


def hidden_state_message(transfer_id: str, state: bytes, seed: int) -> handoff_pb2.HandoffRequest:
    """The message that carries a hidden state. `seed` is that of the transfer's digests."""
    message = handoff_pb2.HiddenState(
        transfer_id=transfer_id, data=state, digest=xxh3_64_intdigest(state, seed)
    )
    return handoff_pb2.HandoffRequest(hidden_state=message)


class IncomingHiddenState:
    """One transfer's hidden state at decode; `due` is its form, None where none is sent."""

    def __init__(self, transfer_id: str, due: HiddenFormat | None) -> None:
        self._transfer_id = transfer_id
        self._due = due
        self._data = b""
        self._settled = asyncio.Event()
        self.complete = due is None
        """Whether it was received, or is not due."""

    def require_equal(self, offered: HiddenFormat | None) -> None:
        """Raises LayoutMismatch when the worker that sends has hidden states of another form."""
        if self._due is not None and offered != self._due:
            raise LayoutMismatch(
                f"prefill has hidden states of {offered or 'no form'}, and decode of {self._due}",
                metadata={"hidden_format": f"{offered} and {self._due}"},
            )

    def receive(self, message: handoff_pb2.HiddenState, seed: int) -> None:
        """Stores the state. `seed` is that of the transfer's digests.

        Raises ProtocolViolation when it is not due or has another size, KvCorrupt when the digest does not match.
        """
        due_bytes = 0 if self.complete or self._due is None else self._due.nbytes
        if not due_bytes or len(message.data) != due_bytes:
            raise ProtocolViolation(
                f"transfer {self._transfer_id}: a hidden state of {len(message.data)} bytes where {due_bytes} are due",
                metadata={"transfer_id": self._transfer_id},
            )
        if message.digest != xxh3_64_intdigest(message.data, seed):
            raise KvCorrupt(
                f"the hidden state of transfer {self._transfer_id} is not what was sent",
                metadata={"transfer_id": self._transfer_id},
            )
        self._data = message.data
        self.complete = True
        self._settled.set()

    async def wait(self) -> bytes | None:
        """Waits until it is received; None when the transfer ended before."""
        await self._settled.wait()
        return self._data if self.complete else None

    def end(self) -> None:
        """None is received any more."""
        self._settled.set()
