"""Deadlines of requests and waits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace_common.errors import DeadlineExceeded

if TYPE_CHECKING:
    import grpc.aio


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time by `time.monotonic`, so that no change of the wall clock moves it.

    The processes of one host share this clock. A message to another host carries `remaining_s()`.
    """

    monotonic_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The deadline `seconds` from now."""
        return cls(time.monotonic() + seconds)

    @classmethod
    def from_context(
        cls, context: grpc.aio.ServicerContext[Any, Any], default_s: float
    ) -> Deadline:
        """The RPC's deadline, or `default_s` from now when the caller set none."""
        # None without a deadline, although the type stubs exclude it.
        remaining_s: Any = context.time_remaining()
        return cls.after(default_s if remaining_s is None else remaining_s)

    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.monotonic_s - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.monotonic_s

    def check(self, what: str) -> None:
        """Raises DeadlineExceeded after the deadline. `what` names the thing waited for."""
        if self.expired:
            raise DeadlineExceeded.waiting_for(what)
