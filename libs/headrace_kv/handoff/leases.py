"""Write leases of senders, and the quarantine after which no write can land. Pure: callers pass the time.

A renewal carries the time at which decode sent it, by decode's clock. It extends the lease from that time, however late
the sender reads it. The fastest message so far relates the two clocks. The first message, the Welcome, is read within
one time to live or not at all. So a lease ends at most two times to live after decode's last renewal. The receiver
waits that long before it reuses blocks (I1).
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace_common.limits import write_quiet_s


class WriteLease:
    """The sender's permission to write, renewed by messages of one stream.

    The sender's thread reads it and the stream's event loop renews it. Only one number is
    shared, so no lock is needed.
    """

    def __init__(self, hello_s: float, welcome_s: float, ttl_s: float) -> None:
        """Times are by the sender's clock: it sent Hello at `hello_s` and read Welcome at `welcome_s`."""
        self._expires_s = hello_s + ttl_s
        # When decode sent Welcome, plus the shortest time that a message has taken so far.
        self._origin_s = welcome_s

    @classmethod
    def none(cls) -> WriteLease:
        """A lease that was never granted."""
        return cls(float("-inf"), float("-inf"), 0.0)

    def renew(self, now_s: float, sent_s: float, ttl_s: float) -> bool:
        """Extends the lease to `ttl_s` after decode sent the renewal, which was `sent_s` after its Welcome.

        False when the lease had run out. It stays expired.
        """
        if not self.alive(now_s):
            return False
        self._origin_s = min(self._origin_s, now_s - sent_s)
        self._expires_s = max(self._expires_s, self._origin_s + sent_s + ttl_s)
        return True

    def revoke(self) -> None:
        """Ends the lease at once."""
        self._expires_s = float("-inf")

    @property
    def end_s(self) -> float:
        """When the lease ends, unless it is renewed."""
        return self._expires_s

    def alive(self, now_s: float) -> bool:
        """Whether a write may start now."""
        return now_s < self._expires_s

    def remaining_s(self, now_s: float) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._expires_s - now_s)


@dataclass(frozen=True, slots=True)
class QuarantinePolicy:
    """How long the blocks of a stream's transfers must not be reused after the stream has ended.

    `transport_s` must be longer than a write may last, see KvTransport.quiet_after_failure_s.
    """

    lease_ttl_s: float
    transport_s: float

    @property
    def total_s(self) -> float:
        """Seconds from the end of the stream until no write can land."""
        return write_quiet_s(self.lease_ttl_s, self.transport_s)

    @property
    def tick_s(self) -> float:
        """Interval at which to call Quarantine.advance."""
        return min(0.25, max(0.005, self.total_s / 20))


class Quarantine:
    """Counts the time since a stream ended.

    A gap between two calls of `advance` counts as four ticks at most. While this process was stopped, bytes that wait
    in its sockets did not land either.
    """

    def __init__(self, policy: QuarantinePolicy, now_s: float) -> None:
        self._remaining_s = policy.total_s
        self._step_max_s = 4 * policy.tick_s
        self._last_s = now_s

    def advance(self, now_s: float) -> bool:
        """True once the quarantine is over."""
        self._remaining_s -= min(max(0.0, now_s - self._last_s), self._step_max_s)
        self._last_s = now_s
        return self._remaining_s <= 0
