"""When an attempt got where."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RequestTimestamps:
    """In Unix nanoseconds; 0 for what has not happened.

    `sampled_unix_ns` is that of a first token made from logits; `first_token_unix_ns` of the first made from KV.
    """

    start_unix_ns: int = 0
    reserved_unix_ns: int = 0
    logits_unix_ns: int = 0
    sampled_unix_ns: int = 0
    arrived_unix_ns: int = 0
    told_unix_ns: int = 0
    first_token_unix_ns: int = 0
    last_token_unix_ns: int = 0
    end_unix_ns: int = 0
