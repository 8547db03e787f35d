"""Settings of a worker of both roles."""

from __future__ import annotations

from pydantic import Field

from headrace_common.access.roles import Role
from headrace_common.config import PositiveCount
from headrace_decode.config import DecodeConfig
from headrace_prefill.config import FetchingConfig


class BothConfig(DecodeConfig, FetchingConfig):
    """A worker of both roles: a decode worker that also computes prompts for others."""

    role = Role.WORKER

    max_prompts: PositiveCount = Field(
        8, description="Most prompts that are computed for other workers at once."
    )
