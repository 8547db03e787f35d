"""Who may write for how long, and when writing has surely ended. Pure: the clock is handed in.

A renewal says by decode's clock when it was sent, and extends the lease from that moment, however late it is read. The
two clocks are set against each other by the message that crossed fastest; the first of them, the Welcome, is read
within one time to live or not at all. So a lease ends at most two of them after decode last renewed it, and for that
long the receiver waits.
"""

from __future__ import annotations

from dataclasses import dataclass


class WriteLease:
    """The sender's permission to write, renewed by messages of one stream.

    Read by the thread that writes and renewed by the stream's: a lease only ever holds one number that both touch.
    """

    def __init__(self, hello_s: float, welcome_s: float, ttl_s: float) -> None:
        """Granted between two moments of the sender's clock: it asked at `hello_s` and heard at `welcome_s`."""
        self._expires_s = hello_s + ttl_s
        # When decode's clock of this stream began, plus the least that a message ever took.
        self._origin_s = welcome_s

    @classmethod
    def none(cls) -> WriteLease:
        """One that was never granted."""
        return cls(float("-inf"), float("-inf"), 0.0)

    def renew(self, now_s: float, sent_s: float, ttl_s: float) -> bool:
        """Extends to `ttl_s` from when decode sent this, `sent_s` after its Welcome.

        False when the lease had run out: it stays dead.
        """
        if not self.alive(now_s):
            return False
        self._origin_s = min(self._origin_s, now_s - sent_s)
        self._expires_s = max(self._expires_s, self._origin_s + sent_s + ttl_s)
        return True

    def revoke(self) -> None:
        """Ends the lease at once."""
        self._expires_s = float("-inf")

    def alive(self, now_s: float) -> bool:
        """Whether a write may start now."""
        return now_s < self._expires_s

    def remaining_s(self, now_s: float) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._expires_s - now_s)


@dataclass(frozen=True, slots=True)
class QuarantinePolicy:
    """How long after the end of a stream its transfers' blocks stay untouched.

    `transport_s` must be longer than a write may last, see KvTransport.quiet_after_failure_s.
    """

    lease_ttl_s: float
    transport_s: float

    @property
    def total_s(self) -> float:
        """Seconds from the end of the stream until nothing writes."""
        return 2 * self.lease_ttl_s + self.transport_s

    @property
    def tick_s(self) -> float:
        """How often a Quarantine is to be advanced."""
        return min(0.25, max(0.005, self.total_s / 20))


class Quarantine:
    """Counts up the time that has passed since a stream ended.

    A gap between two ticks counts for at most four of them: while this process itself was stopped, bytes that wait
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
