"""What the RDMA test runs. Pure: the machines and those who wait for them read the same list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.rdma.conformance import CASES

# Each token's KV has 4 KiB in all of them, so that every request moves more than a megabyte.
MODELS: Mapping[str, str] = {
    "gqa": "sim:layers=2,heads=4,head_bytes=512",
    "mla": "sim:layers=2,heads=1,head_bytes=2048",
    "few-heads": "sim:layers=2,heads=2,head_bytes=1024",
}
RANKS = (1, 2, 4)

WRITES = {case.__name__: f"write: {case.__name__}" for case in CASES}
WRITES_MOVED = "write: all of it by RDMA"
CONTROL = "control: over TCP no RDMA packet is sent"


@dataclass(frozen=True, slots=True)
class Group:
    """One prefill worker and some decode workers of one layout; each pair gets a request, all at once."""

    layout: str
    prefill_ranks: int
    decode_ranks: tuple[int, ...]

    @property
    def model(self) -> str:
        """The engines' model."""
        return MODELS[self.layout]

    @property
    def prefill_id(self) -> str:
        """The prefill worker."""
        return f"prefill-{self.layout}-{self.prefill_ranks}"

    def decode_id(self, ranks: int) -> str:
        """A decode worker."""
        return f"decode-{self.layout}-{ranks}"

    def pair_name(self, ranks: int) -> str:
        """As reports print the case of one decode worker."""
        return f"serve: {self.layout} P{self.prefill_ranks} to D{ranks}"


LANES: Mapping[str, tuple[Group, ...]] = {
    layout: tuple(Group(layout, ranks, RANKS) for ranks in RANKS) for layout in MODELS
}
"""Groups by layout: those of one share their decode workers."""
BETWEEN_HOSTS = (Group("gqa", 2, (4,)), Group("mla", 4, (2,)))


def expected_names(host_count: int) -> tuple[str, ...]:
    """The results that the machines must report, whatever else they do."""
    groups = BETWEEN_HOSTS if host_count > 1 else [g for lane in LANES.values() for g in lane]
    names = tuple(group.pair_name(ranks) for group in groups for ranks in group.decode_ranks)
    return names if host_count > 1 else (*names, *WRITES.values(), WRITES_MOVED, CONTROL)
