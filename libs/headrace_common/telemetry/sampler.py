"""Which traces are recorded, by the samplers of OpenTelemetry's standard. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, get_args

from headrace_common.config import TracesSampler

SAMPLERS: Final[tuple[str, ...]] = get_args(TracesSampler)
_PARENT_BASED: Final = "parentbased_"
_RATIO: Final = "traceidratio"
_RANDOM_BITS: Final = 64


@dataclass(frozen=True, slots=True)
class Sampler:
    """Decides from the trace id, so all processes with the same settings decide alike."""

    name: TracesSampler = "parentbased_always_on"
    ratio: float = 1.0
    """Share of traces that traceidratio records."""

    def samples(self, trace_id: int, parent_sampled: bool | None) -> bool:
        """Whether to record a span of this trace. `parent_sampled` is None for a root."""
        if parent_sampled is not None and self.name.startswith(_PARENT_BASED):
            return parent_sampled
        if self.name.endswith(_RATIO):
            # The rest of the id may be a time.
            low_bits = trace_id & ((1 << _RANDOM_BITS) - 1)
            return low_bits < round(self.ratio * (1 << _RANDOM_BITS))
        return self.name.endswith("always_on")
