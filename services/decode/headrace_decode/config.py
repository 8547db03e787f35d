"""Settings of a decode worker."""

from __future__ import annotations

from pydantic import Field, model_validator

from headrace_common.access.roles import Role
from headrace_common.client_config import ClientFacingConfig
from headrace_common.config import (
    NonNegativeCount,
    OptionalHostPort,
    PositiveSeconds,
    require_order,
)
from headrace_common.limits import WRITE_LEASE_S, WRITE_QUARANTINE_S, write_quiet_s
from headrace_engine.worker.config import WorkerConfig
from headrace_kv.handoff.checksum import DigestMode
from headrace_kv.receive.layer_overlap import OverlapSettings


class DecodeConfig(WorkerConfig, ClientFacingConfig):
    """A decode worker: receives KV caches and generates tokens."""

    role = Role.DECODE

    listen: OptionalHostPort = Field(
        "",
        description="host:port to serve clients on that a router has given a ticket; port 0 takes any free port. "
        "Empty: no client can reach this worker, and routers stream its tokens.",
    )

    lease_ttl_s: PositiveSeconds = Field(
        WRITE_LEASE_S,
        description="Seconds that a prefill rank may write without a message from this worker.",
    )
    quarantine_s: PositiveSeconds = Field(
        WRITE_QUARANTINE_S,
        description="Seconds that blocks of a failed transfer stay unused after the lease; at least 5, longer than the "
        "transport's own timeout. A frozen sender is ended after half of them.",
    )
    digest: DigestMode = Field(
        "off",
        description='Whether received bytes are compared with the sender\'s digest: "off", "sampled" (a sixteenth of '
        'all layers) or "on".',
    )
    digest_mismatch_limit: int = Field(
        3,
        ge=1,
        description="Corrupt transfers of one prefill worker after which its transfers are rejected.",
    )
    overlap_layers: NonNegativeCount = Field(
        0,
        description="Number of last layers that may be missing when a request's first step begins. The step, with all "
        "its requests, then waits for each of them. Engine vllm, models with one kind of cache.",
    )
    overlap_wait_s: PositiveSeconds = Field(
        0.5,
        description="Seconds that one step waits for missing layers; then the late transfers fail.",
    )
    request_timeout_s: PositiveSeconds = Field(
        600.0, description="Seconds until the deadline of requests that have none."
    )

    @property
    def clients_prove_themselves(self) -> bool:
        """Clients need a router's ticket."""
        return True

    @property
    def write_quiet_s(self) -> float:
        return write_quiet_s(self.lease_ttl_s, self.quarantine_s)

    @property
    def overlap_settings(self) -> OverlapSettings:
        return OverlapSettings(self.overlap_layers, self.overlap_wait_s)

    @model_validator(mode="after")
    def _check_waits(self) -> DecodeConfig:
        """A failed transfer must free its blocks while its request can still be retried."""
        require_order(
            self, ("lease_ttl_s", "request_timeout_s"), ("quarantine_s", "request_timeout_s")
        )
        if self.overlap_layers:
            require_order(self, ("overlap_wait_s", "lease_ttl_s"))
        return self
