"""What a trace says about one request, without spans. Times count from the request's arrival, in ns. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from headrace_common.telemetry import schema
from headrace_common.telemetry.layer_stamps import LayerStamps

TRANSFER_EXPOSED: Final = "transfer exposed"
"""The name of the part in which a request waits for its KV and nothing else."""
UNDRAWN_STEPS: Final = frozenset(
    (
        *(schema.SPAN_REQUEST, schema.SPAN_FIRST_TOKEN, schema.SPAN_SECOND_TOKEN),
        *(schema.SPAN_STREAM, schema.SPAN_DECODE_GENERATE),
    )
)
"""Steps that are the whole of a scale from 0 to the first token, or lie after it."""


@dataclass(frozen=True, slots=True)
class Link:
    """What one source rank wrote to one destination rank. `writes` is in the order of submission.

    Of very many writes, `writes` has the last ones; the other fields count all. `moving_ns` is the time in which at
    least one write was on the way. `bandwidth_share` and `expected_ns` are 0 where the bandwidth is unknown.
    """

    source: str
    source_rank: int
    destination: str
    destination_rank: int
    transport: str
    strategy: str
    payload_bytes: int
    moving_ns: int
    runs: int = 0
    entries: int = 0
    expected_ns: int = 0
    bandwidth_share: float = 0.0
    error: str = ""
    requests: int = 1
    """Those that it is the sum of."""
    writes: tuple[LayerStamps, ...] = ()

    @property
    def name(self) -> str:
        """Such as "prefill-1/r2 -> decode-0/r1"."""
        return f"{self.source}/r{self.source_rank} -> {self.destination}/r{self.destination_rank}"

    @property
    def start_ns(self) -> int:
        """When the first of `writes` was ready."""
        return min((write.ready_ns for write in self.writes), default=0)

    @property
    def end_ns(self) -> int:
        """When the last write landed."""
        return max((write.landed_ns for write in self.writes), default=0)

    @property
    def last_write(self) -> LayerStamps | None:
        """The write that landed last."""
        return max(self.writes, key=lambda write: write.landed_ns, default=None)

    @property
    def gb_s(self) -> float:
        """Gigabytes (1e9 bytes) a second while bytes were on the way; 0 when that time is unknown."""
        return self.payload_bytes / self.moving_ns if self.moving_ns > 0 else 0.0


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One step of one process. A failed step has an `error`."""

    depth: int
    name: str
    label: str
    service: str
    worker: str
    start_ns: int
    duration_ns: int
    error: str = ""
    note: str = ""
    """Cached tokens from lower tiers. Of a wait in the queue, the tenants of the prompts that workers had meanwhile."""


@dataclass(frozen=True, slots=True)
class TokenGap:
    """A long time without a token. `cause` is "failure", "client", what other requests show, or empty."""

    start_ns: int
    duration_ns: int
    cause: str


@dataclass(frozen=True, slots=True)
class TraceView:
    """One request.

    `parts` add up to `ttft_ns`: the time to the first token, or to the end of a request without one (`answered` is
    false). `second_parts` add up to the time from the first token to the second, where prefill or its state made the
    first. Both have names such as "queue", in the order of a request. `usual` and `second_usual` are the medians of
    like requests, and empty before there are enough. `hidden_ns` is the transfer beside computing.
    """

    trace_id: str
    request_id: str
    start_unix_ns: int
    complete: bool
    ttft_ns: int
    total_ns: int
    parts: Mapping[str, int]
    links: tuple[Link, ...]
    steps: tuple[TraceStep, ...]
    answered: bool = True
    second_parts: Mapping[str, int] = field(default_factory=dict)
    hidden_ns: int = 0
    clock_error_ns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""
    other: str = ""
    """The best other placement. Empty without an estimate."""
    usual: Mapping[str, int] = field(default_factory=dict)
    second_usual: Mapping[str, int] = field(default_factory=dict)
    gaps: tuple[TokenGap, ...] = ()
    error_reason: str = ""

    @property
    def last_link(self) -> Link | None:
        """The link that ended last: the request waited for it."""
        return max(self.links, key=lambda link: link.end_ns, default=None)

    @property
    def median_gb_s(self) -> float:
        """The median speed of the links; 0 without one of a known speed."""
        speeds = [link.gb_s for link in self.links if link.moving_ns > 0]
        return median(speeds) if speeds else 0.0
