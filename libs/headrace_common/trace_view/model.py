"""What a trace says about one request, without spans. Times count from the request's arrival. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Final

UNACCOUNTED: Final = "unaccounted"
"""The name of the part that no step covers. It is always shown."""
TRANSFER_EXPOSED: Final = "transfer exposed"
"""The name of the part in which a request waits for its KV and nothing else."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the time to first token. Parts do not overlap, and their durations add up."""

    name: str
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class LayerWrite:
    """One layer's bytes on one link: ready at the source, submitted to the transport, landed."""

    layer: int
    ready_ns: int
    submitted_ns: int
    landed_ns: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Link:
    """What one source rank wrote to one destination rank. `writes` is in the order of submission."""

    source: str
    source_rank: int
    destination: str
    destination_rank: int
    transport: str
    strategy: str
    runs: int
    entries: int
    writes: tuple[LayerWrite, ...]

    @property
    def name(self) -> str:
        """Such as "prefill-1/r2 -> decode-0/r1"."""
        return f"{self.source}/r{self.source_rank} -> {self.destination}/r{self.destination_rank}"

    @property
    def payload_bytes(self) -> int:
        """Bytes of all writes."""
        return sum(write.payload_bytes for write in self.writes)

    @property
    def start_ns(self) -> int:
        """The first submission."""
        return min((write.submitted_ns for write in self.writes), default=0)

    @property
    def end_ns(self) -> int:
        """The last landing."""
        return max((write.landed_ns for write in self.writes), default=0)

    @property
    def busy_ns(self) -> int:
        """Time in which at least one write was in flight."""
        busy = reached = 0
        for write in sorted(self.writes, key=lambda one: one.submitted_ns):
            busy += max(0, write.landed_ns - max(write.submitted_ns, reached))
            reached = max(reached, write.landed_ns)
        return busy

    @property
    def gb_s(self) -> float:
        """Gigabytes (1e9 bytes) a second while busy; 0 when the time is unknown."""
        busy = self.busy_ns
        return self.payload_bytes / busy if busy > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one process. A failed step has an `error`."""

    depth: int
    name: str
    label: str
    service: str
    worker: str
    start_ns: int
    duration_ns: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class TraceView:
    """One request. `ttft_ns` is 0 when it had no first token."""

    trace_id: str
    request_id: str
    start_unix_ns: int
    complete: bool
    ttft_ns: int
    total_ns: int
    parts: tuple[Part, ...]
    links: tuple[Link, ...]
    steps: tuple[Step, ...]
    first_token_by: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""

    @property
    def largest_part(self) -> Part | None:
        """The part that took longest."""
        return max(self.parts, key=lambda part: part.duration_ns, default=None)

    @property
    def last_link(self) -> Link | None:
        """The link that ended last, so that the request waited for it."""
        return max(self.links, key=lambda link: link.end_ns, default=None)

    @property
    def slowest_link(self) -> Link | None:
        """The link with the fewest bytes a second."""
        timed = [link for link in self.links if link.busy_ns > 0]
        return min(timed, key=lambda link: link.gb_s, default=None)

    @property
    def median_gb_s(self) -> float:
        """The median speed of the links; 0 without one."""
        return median([link.gb_s for link in self.links]) if self.links else 0.0
