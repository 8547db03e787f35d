"""Settings of a prefill worker."""

from __future__ import annotations

from pydantic import Field

from headrace_common.access.roles import Role
from headrace_common.config import (
    NonNegativeCount,
    PositiveCount,
    PositiveSeconds,
)
from headrace_engine.worker.config import WorkerConfig


class PrefillConfig(WorkerConfig):
    """A prefill worker: computes prompts and sends their KV cache."""

    role = Role.PREFILL

    max_num_seqs: PositiveCount = Field(4, description="Most prompts that are computed at once.")
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
