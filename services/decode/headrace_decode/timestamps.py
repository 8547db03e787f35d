"""When each event of an attempt happened."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from headrace.decode.v1 import decode_pb2
from headrace_common.latency.clocks import ClockPair, clocks_now


@dataclass(slots=True)
class RequestTimestamps:
    """Unix nanoseconds of an attempt's events; 0 for an event that has not happened.

    All are the start's plus a time by the monotonic clock. So their differences are durations, although the wall clock
    may be set meanwhile. Admission estimates the length of answers from them.

    `sampled_unix_ns` is for a first token that was sampled from a hidden state. `first_token_unix_ns` is
    for the first token that was computed from KV, and `step_start_unix_ns` for the first step with the request.
    `token_received_unix_ns` is for a first token that the router brought.
    """

    start: ClockPair = field(default_factory=clocks_now)
    reserved_unix_ns: int = 0
    hidden_state_unix_ns: int = 0
    sampled_unix_ns: int = 0
    arrived_unix_ns: int = 0
    token_received_unix_ns: int = 0
    step_start_unix_ns: int = 0
    first_token_unix_ns: int = 0
    last_token_unix_ns: int = 0
    end_unix_ns: int = 0

    @property
    def start_unix_ns(self) -> int:
        """The start by the wall clock."""
        return self.start.unix_ns

    @property
    def start_monotonic_ns(self) -> int:
        """The start by the monotonic clock."""
        return self.start.monotonic_ns

    def blocks_reserved(self) -> None:
        """The engine holds the request's blocks."""
        self.reserved_unix_ns = self._now_ns()

    def hidden_state_arrived(self) -> None:
        """The last prompt token's hidden state is here."""
        self.hidden_state_unix_ns = self._now_ns()

    def kv_arrived(self) -> None:
        """The KV cache is complete."""
        self.arrived_unix_ns = self._now_ns()

    def token_received(self) -> None:
        """The router brought the first token."""
        self.token_received_unix_ns = self._now_ns()

    def first_generated(self, *, sampled: bool, from_kv: bool, step_start_ns: int) -> None:
        """The engine generated a token that was sampled from a hidden state, or the first from KV, or both.

        Only the first of either kind counts. `step_start_ns` is as in DecodeTokens.
        """
        now_ns = self._now_ns()
        if sampled:
            self.sampled_unix_ns = self.sampled_unix_ns or now_ns
        if from_kv:
            self.first_token_unix_ns = now_ns
            if step_start_ns:
                self.step_start_unix_ns = (
                    self.start_unix_ns + step_start_ns - self.start_monotonic_ns
                )
        self.last_token_unix_ns = now_ns

    def token_generated(self) -> None:
        """The engine generated more tokens."""
        self.last_token_unix_ns = self._now_ns()

    def ended(self) -> None:
        """The attempt is over."""
        self.end_unix_ns = self._now_ns()

    def to_proto(self) -> decode_pb2.AttemptTimes:
        """The times of this attempt until now."""
        return decode_pb2.AttemptTimes(
            received_unix_ns=self.start_unix_ns,
            reserved_us=self._after_us(self.reserved_unix_ns),
            kv_arrived_us=self._after_us(self.arrived_unix_ns),
            hidden_state_arrived_us=self._after_us(self.hidden_state_unix_ns),
            sampled_us=self._after_us(self.sampled_unix_ns),
            token_received_us=self._after_us(self.token_received_unix_ns),
            step_start_us=self._after_us(self.step_start_unix_ns),
            first_token_us=self._after_us(self.first_token_unix_ns),
        )

    def _after_us(self, unix_ns: int) -> int:
        """Microseconds since the start, at least 1. 0 for an event that has not happened."""
        return max(1, (unix_ns - self.start_unix_ns) // 1_000) if unix_ns else 0

    def _now_ns(self) -> int:
        return self.start_unix_ns + time.monotonic_ns() - self.start_monotonic_ns
