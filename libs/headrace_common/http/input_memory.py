"""The memory of what clients have sent and nothing has parsed yet, over all HTTP listeners of a process."""

from __future__ import annotations

from collections import Counter
from typing import Final, Protocol

from headrace_common.http.bounds import BODIES_BYTES_MAX, UNREAD_BYTES_MAX


class Input(Protocol):
    """What one client sends. `caller` shares the memory with its other inputs."""

    caller: str

    def end_input(self) -> None:
        """Frees the memory, and refuses the request with status 503."""


class InputMemory:
    """Ends inputs while they have more than `bytes_max` together: the oldest of the caller with the most bytes.

    One event loop owns it. An input that is alone is not ended: it has bounds of its own.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._inputs: dict[str, dict[Input, int]] = {}
        self._by_caller: Counter[str] = Counter()
        self.bytes = 0
        """Of all inputs."""

    def hold(self, holder: Input, size: int) -> None:
        """Sets the bytes of an input. May end it, or others."""
        held = self._inputs.setdefault(holder.caller, {})
        growth = size - held.get(holder, 0)
        held[holder] = size
        self._by_caller[holder.caller] += growth
        self.bytes += growth
        while self.bytes > self._bytes_max and self._end_oldest():
            pass

    def release(self, holder: Input) -> None:
        """Forgets an input. Does nothing when it has ended."""
        held = self._inputs.get(holder.caller, {})
        size = held.pop(holder, None)
        if size is None:
            return
        self.bytes -= size
        self._by_caller[holder.caller] -= size
        if not held:
            del self._inputs[holder.caller], self._by_caller[holder.caller]

    def _end_oldest(self) -> bool:
        caller = max(self._by_caller, key=self._by_caller.__getitem__)
        held = self._inputs[caller]
        if len(held) == len(self._inputs) == 1:
            return False
        oldest = next(iter(held))
        self.release(oldest)
        oldest.end_input()
        return True


UNREAD_INPUT: Final = InputMemory(UNREAD_BYTES_MAX)
READ_BODIES: Final = InputMemory(BODIES_BYTES_MAX)
