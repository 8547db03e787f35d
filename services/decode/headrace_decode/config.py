"""Settings of a decode worker."""

from __future__ import annotations

from pydantic import Field, model_validator

from headrace_common.config import NonNegativeCount, PositiveSeconds, require_order
from headrace_engine.worker.config import WorkerConfig
from headrace_kv.handoff.checksum import DigestMode
from headrace_kv.receive.layer_overlap import OverlapSettings


class DecodeConfig(WorkerConfig):
    """A decode worker: receives KV caches and generates tokens."""

    lease_ttl_s: PositiveSeconds = Field(
        5.0,
        description="Seconds that a prefill rank may write without hearing from this worker.",
    )
    quarantine_s: PositiveSeconds = Field(
        15.0,
        description="Seconds that blocks of a broken transfer rest after the lease; "
        "longer than the transport's own timeout.",
    )
    digest: DigestMode = Field(
        "off",
        description='Whether what landed is compared with a digest of what was sent: "off", "sampled" (a sixteenth of '
        'all layers) or "on".',
    )
    digest_mismatch_limit: int = Field(
        3,
        ge=1,
        description="Broken transfers of one prefill worker after which nothing is taken from it any more.",
    )
    overlap_layers: NonNegativeCount = Field(
        0,
        description="Layers, the last ones, that may be missing when a request's first step begins, which then waits "
        "for each, and all others in the step with it. Engine vllm, models with one kind of cache.",
    )
    overlap_wait_s: PositiveSeconds = Field(
        0.5,
        description="Seconds that one step waits for missing layers at most; then what is late has failed.",
    )
    require_ticket: bool = Field(
        False,
        description="Whether requests must bear a router's ticket; without it, whoever reaches this worker may "
        "call it, and only tickets that are there are checked.",
    )
    request_timeout_s: PositiveSeconds = Field(
        600.0, description="Deadline of requests whose caller set none."
    )

    @property
    def early_start(self) -> OverlapSettings:
        return OverlapSettings(self.overlap_layers, self.overlap_wait_s)

    @model_validator(mode="after")
    def _check_waits(self) -> DecodeConfig:
        """A broken transfer is noticed, and its blocks are lent again, while a request may still be tried again."""
        require_order(
            self, ("lease_ttl_s", "request_timeout_s"), ("quarantine_s", "request_timeout_s")
        )
        if self.overlap_layers:
            require_order(self, ("overlap_wait_s", "lease_ttl_s"))
        return self
