"""Settings of a prefill worker."""

from __future__ import annotations

from pydantic import Field

from headrace_common.access.roles import Role
from headrace_common.config import (
    NonNegativeCount,
    PositiveCount,
)
from headrace_engine.worker.config import WorkerConfig


class FetchingConfig(WorkerConfig):
    """A worker that computes prompts, and may fetch what other workers have of them."""

    prefix_fetch_min_tokens: NonNegativeCount = Field(
        0,
        description="Fewest tokens of a prompt that are fetched from its decode worker, which has them from an earlier "
        "turn, instead of being computed. Only where the learned times do not say that this is slower. 0 fetches none. "
        "Decode workers then reach this worker's ports of KV transfers, and prefill workers for divided prompts. For "
        "models without states.",
    )


class PrefillConfig(FetchingConfig):
    """A prefill worker: computes prompts and sends their KV cache."""

    role = Role.PREFILL

    max_num_seqs: PositiveCount = Field(4, description="Most prompts that are computed at once.")
