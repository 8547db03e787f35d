"""What the data plane asks of a transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from headrace_common.errors import HeadraceError, TransferFailed
from headrace_kv.plan.copy_plan import Runs
from headrace_kv.transport.memory import HOST_MEMORY, Memory

Strategy = Literal["direct", "gather", "scatter", "gather_scatter"]
"""How runs that are short on either side got across: written one by one ("direct"), put into the receiver's order
before writing, put into place after landing, or both."""


@dataclass(frozen=True, slots=True)
class WriteResult:
    """How runs got across: the transport that carried them, and the entries that it was given."""

    transport: str
    strategy: Strategy
    entry_count: int


# A transport ends its futures in time by itself; this is for its bugs.
_GRACE_S = 30.0


class KvTransport(ABC):
    """Moves bytes from this rank's memory into another rank's.

    `write`, `submit` and `close` are called by one thread. `write` blocks.
    """

    name: str
    """As in RankMemory.transport."""

    quiet_after_failure_s: float
    """How long bytes may still land after `write` has raised."""

    entry_limit: int = 512
    """Runs that one `write` should hold."""

    byte_limit: int = 64 * 1024 * 1024
    """Bytes that one `write` should hold, so that it is over well within a write lease."""

    memory: Memory = HOST_MEMORY
    """How this process reads what is registered."""

    @property
    @abstractmethod
    def session(self) -> str:
        """How peers name this transport, as in RankMemory.session."""

    @abstractmethod
    def register(self, base_address: int, nbytes: int) -> None:
        """Lets [base_address, base_address + nbytes) be read and written. Raises ConfigError when it cannot."""

    pending_limit: int = 1
    """Writes that are worth having under way to one peer at once."""

    @abstractmethod
    def write(self, session: str, runs: Runs, timeout_s: float) -> WriteResult:
        """Copies the runs into the memory of `session` and returns when they have landed.

        Raises TransferFailed: then an unknown part has landed, and more may until `quiet_after_failure_s` has passed.
        A transport may take longer than `timeout_s` where its library cannot be interrupted.
        """

    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        """Starts a write; the future is done when `write` would return or raise, within about `timeout_s`.

        Until then the source must stay as it is. Blocks for as long as the transport cannot take more.
        """
        try:
            written = self.write(session, runs, timeout_s)
        except HeadraceError as error:
            return failed(error)
        future: Future[WriteResult] = Future()
        future.set_result(written)
        return future

    def route(self, session: str) -> str:
        """Name of the transport that carries writes to `session`; empty when that is not decided yet."""
        return self.name

    @abstractmethod
    def close(self) -> None:
        """Ends the transport; afterwards nothing lands any more. May be called twice."""


def failed(error: HeadraceError) -> Future[WriteResult]:
    """A future that has ended with an error."""
    future: Future[WriteResult] = Future()
    future.set_exception(error)
    return future


def ended(future: Future[WriteResult], timeout_s: float) -> WriteResult:
    """Waits for the future of a write that was submitted with `timeout_s`; returns or raises what it holds."""
    try:
        return future.result(max(0.0, timeout_s) + _GRACE_S)
    except TimeoutError:
        raise TransferFailed("the transport does not end a write") from None
