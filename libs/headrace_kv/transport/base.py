"""What the data plane asks of a transport."""

from __future__ import annotations

from abc import ABC, abstractmethod

from headrace_kv.block_map import Runs


class KvTransport(ABC):
    """Moves bytes from this rank's memory into another rank's.

    `write` and `close` are called by one thread. `write` blocks.
    """

    name: str
    """As in RankMemory.transport."""

    quiet_after_failure_s: float
    """How long bytes may still land after `write` has raised."""

    entry_limit: int = 512
    """Runs that one `write` should hold."""

    byte_limit: int = 64 * 1024 * 1024
    """Bytes that one `write` should hold, so that it is over well within a write lease."""

    @property
    @abstractmethod
    def session(self) -> str:
        """How peers name this transport, as in RankMemory.session."""

    @abstractmethod
    def register(self, base_address: int, nbytes: int) -> None:
        """Lets [base_address, base_address + nbytes) be read and written. Raises ConfigError when it cannot."""

    @abstractmethod
    def write(self, session: str, runs: Runs, timeout_s: float) -> None:
        """Copies the runs into the memory of `session` and returns when they have landed.

        Raises TransferFailed: then an unknown part has landed, and more may until `quiet_after_failure_s` has passed.
        A transport may take longer than `timeout_s` where its library cannot be interrupted.
        """

    def route(self, session: str) -> str:
        """Name of the transport that carries writes to `session`; empty when that is not decided yet."""
        return self.name

    @abstractmethod
    def close(self) -> None:
        """Ends the transport; afterwards nothing lands any more. May be called twice."""
