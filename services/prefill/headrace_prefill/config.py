"""Settings of a prefill worker."""

from __future__ import annotations

from pydantic import Field

from headrace_common.access.roles import Role
from headrace_common.config import PositiveCount, PositiveSeconds
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
