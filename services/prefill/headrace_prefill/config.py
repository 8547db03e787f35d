"""Settings of a prefill worker."""

from __future__ import annotations

from pydantic import Field, model_validator

from headrace_common.access.roles import Role
from headrace_common.config import (
    NonNegativeCount,
    PositiveCount,
    PositiveSeconds,
    require_order,
)
from headrace_engine.worker.config import WorkerConfig


class PrefillConfig(WorkerConfig):
    """A prefill worker: computes prompts and sends their KV cache."""

    role = Role.PREFILL

    max_num_seqs: PositiveCount = Field(4, description="Most prompts that are computed at once.")
    task_timeout_s: PositiveSeconds = Field(
        600.0, description="Seconds until the deadline of tasks that have none."
    )
    link_gbit_per_s: float = Field(
        0.0,
        ge=0,
        le=100_000,
        description="Bandwidth of this worker's network in Gbit/s, with which traces compare each transfer; 0 means "
        "the best that was measured to the same host.",
    )
    trace_layers: bool = Field(
        False,
        description="Whether traces have one more span for each layer's write. The span of a link has their times "
        "anyway.",
    )
    prefix_fetch_min_tokens: NonNegativeCount = Field(
        0,
        description="Fewest tokens of a prompt that are fetched from its decode worker, which has them from an earlier "
        "turn, instead of being computed. Only where fetching was faster. 0 fetches none. Decode workers then reach "
        "this worker's ports of KV transfers. For models without states.",
    )
    prefix_fetch_timeout_s: PositiveSeconds = Field(
        2.0,
        description="Most seconds that a prompt waits for such tokens. What has not come is computed.",
    )

    @model_validator(mode="after")
    def _check_prefix_fetch(self) -> PrefillConfig:
        if not self.prefix_fetch_min_tokens:
            return self
        # A failed fetch must free its blocks while tasks can still use them.
        require_order(self, ("lease_ttl_s", "task_timeout_s"), ("quarantine_s", "task_timeout_s"))
        return self
