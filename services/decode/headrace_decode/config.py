"""Settings of a decode worker."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import Field, model_validator

from headrace_common.access.roles import Role
from headrace_common.config import (
    checked,
    require_order,
    wildcard_problems,
)
from headrace_common.ports import split_host_port
from headrace_engine.worker.config import WorkerConfig, served_name
from headrace_frontend.config import FrontendConfig
from headrace_kv.checksum import DigestMode


class DecodeConfig(WorkerConfig, FrontendConfig):
    """A decode worker: receives KV caches and generates tokens."""

    role = Role.DECODE

    digest: DigestMode = Field(
        "off",
        description='Whether received bytes are compared with the sender\'s digest: "off", "sampled" (a sixteenth of '
        'all layers) or "on". Devices compute it in their own memory.',
    )
    canary_interval_requests: int = Field(
        500,
        ge=0,
        description="Of so many handed-over prompts from a prefill worker, it computes blocks of one again while it is "
        "idle, and compares them with what it received. 0: of none. Engine vllm, for models in which all layers "
        "keep all tokens.",
    )

    @property
    def model_names(self) -> Collection[str]:
        return (served_name(self),)

    @model_validator(mode="after")
    def _check_http_address(self) -> DecodeConfig:
        problems = (
            wildcard_problems(self, "http_listen", "internal_advertise") if self.http_listen else []
        )
        if (
            self.http_listen
            and self.workers_per_process > 1
            and split_host_port(self.http_listen)[1]
        ):
            problems.append(
                f"workers_per_process is {self.workers_per_process}: give http_listen the port 0, which takes any"
            )
        return checked(self, problems)

    @model_validator(mode="after")
    def _check_waits(self) -> DecodeConfig:
        """A failed transfer must free its blocks while its request can still be retried."""
        require_order(
            self, ("lease_ttl_s", "default_deadline_s"), ("quarantine_s", "default_deadline_s")
        )
        return self
