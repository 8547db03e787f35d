"""Settings of a prefill worker."""

from __future__ import annotations

from pydantic import Field

from headrace_common.access.roles import Role
from headrace_common.config import PositiveCount, PrefixFetchGain
from headrace_engine.worker.config import WorkerConfig
from headrace_kv.prefix.fetch_rule import DEFAULT_GAIN


class FetchingConfig(WorkerConfig):
    """A worker that computes prompts, and may fetch what other workers have of them."""

    prefix_fetch_gain: PrefixFetchGain = DEFAULT_GAIN


class PrefillConfig(FetchingConfig):
    """A prefill worker: computes prompts and sends their KV cache."""

    role = Role.PREFILL

    max_num_seqs: PositiveCount = Field(4, description="Most prompts that are computed at once.")
