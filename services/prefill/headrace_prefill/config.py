"""Settings of a prefill worker."""

from __future__ import annotations

from pydantic import Field

from headrace_common.access.roles import Role
from headrace_common.config import (
    PositiveCount,
)
from headrace_engine.worker.config import WorkerConfig
from headrace_kv.prefix.fetch_rule import DEFAULT_GAIN


class FetchingConfig(WorkerConfig):
    """A worker that computes prompts, and may fetch what other workers have of them."""

    prefix_fetch_gain: float = Field(
        DEFAULT_GAIN,
        ge=0.0,
        le=1.0,
        description="Least share of the time to compute a prompt's first tokens that fetching them saves, from the "
        "decode worker, which has them from an earlier turn. By the learned times; else by a cautious estimate. 0 "
        "fetches whatever the times say, 1 nothing. Workers that generate reach this worker's ports of KV transfers. "
        "Models with states fetch nothing.",
    )


class PrefillConfig(FetchingConfig):
    """A prefill worker: computes prompts and sends their KV cache."""

    role = Role.PREFILL

    max_num_seqs: PositiveCount = Field(4, description="Most prompts that are computed at once.")
