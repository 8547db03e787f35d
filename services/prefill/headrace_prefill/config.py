"""Settings of a prefill worker."""

from __future__ import annotations

from pydantic import Field

from headrace_common.config import PositiveCount, PositiveSeconds
from headrace_engine.worker.config import WorkerConfig


class PrefillConfig(WorkerConfig):
    """A prefill worker: computes prompts and hands their KV cache over."""

    max_num_seqs: PositiveCount = Field(4, description="Most prompts worked on at once.")
    task_timeout_s: PositiveSeconds = Field(600.0, description="Deadline of tasks that bring none.")
