"""When each event of an attempt happened."""

from __future__ import annotations

import time

from headrace.decode.v1 import decode_pb2
from headrace_common.latency.clocks import ClockPair, clocks_now


class RequestTimestamps:
    """Microseconds from an attempt's start to its events, at least 1; 0 for an event that has not happened.

    They are by the monotonic clock, although the wall clock may be set meanwhile. Admission estimates the length of
    answers from them. `steps` has those that the router gets: `sampled_us` is for a first token that was sampled from a
    hidden state, and `first_token_us` for the first token that was computed from KV.
    """

    __slots__ = ("end_us", "last_token_us", "start", "steps")

    def __init__(self, start: ClockPair | None = None) -> None:
        self.start = start or clocks_now()
        self.steps = decode_pb2.AttemptTimes(received_unix_ns=self.start.unix_ns)
        self.last_token_us = 0
        self.end_us = 0

    def unix_ns(self, after_us: int) -> int:
        """The wall clock's time of an event, as the start's plus a time by the monotonic clock."""
        return self.start.unix_ns + 1_000 * after_us

    def blocks_reserved(self) -> None:
        """The engine holds the request's blocks."""
        self.steps.reserved_us = self._after_us()

    def hidden_state_arrived(self) -> None:
        """The last prompt token's hidden state is here."""
        self.steps.hidden_state_arrived_us = self._after_us()

    def kv_arrived(self) -> None:
        """The KV cache is complete."""
        self.steps.kv_arrived_us = self._after_us()

    def token_received(self) -> None:
        """The router brought the first token."""
        self.steps.token_received_us = self._after_us()

    def first_generated(self, *, sampled: bool, from_kv: bool, step_start_ns: int) -> None:
        """The engine generated a token that was sampled from a hidden state, or the first from KV, or both.

        Only the first of either kind counts. `step_start_ns` is as in DecodeTokens.
        """
        steps = self.steps
        self.last_token_us = now_us = self._after_us()
        if sampled:
            steps.sampled_us = steps.sampled_us or now_us
        if from_kv:
            steps.first_token_us = now_us
            if step_start_ns:
                steps.step_start_us = self._after_us(step_start_ns)

    def token_generated(self) -> None:
        """The engine generated more tokens."""
        self.last_token_us = self._after_us()

    def ended(self) -> None:
        """The attempt is over."""
        self.end_us = self._after_us()

    def _after_us(self, monotonic_ns: int = 0) -> int:
        """From the start to that time, or to now."""
        return max(1, ((monotonic_ns or time.monotonic_ns()) - self.start.monotonic_ns) // 1_000)
