"""Values that the service passes to its engine processes inside vLLM's own configuration and requests."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from headrace_common.access.credentials import Credentials
from headrace_common.limits import write_quiet_s
from headrace_engine.connector.transfers import (
    PrefillTimes,
    ReceiveParams,
    SendParams,
)
from headrace_engine.receipts import RequestCost
from headrace_kv.layout import WorkerRef
from headrace_kv.tiers.pool import PoolOpener, pool_opener
from headrace_kv.tiers.promises import KeepTerms, Kept
from headrace_kv.tiers.tiers import TierSettings
from headrace_kv.transport.guard import parse_networks

PARAMS_KEY = "headrace"
"""In a request's kv_transfer_params."""
WATCH_METHOD = "headrace_watch_hidden_states"
FIRST_TOKEN_METHOD = "headrace_first_token"
BESIDE_STEPS_METHOD = "headrace_serve_beside_steps"
"""Of rank/hidden_states.py:HiddenStates."""
GENERATED_KEY = "headrace_generated"
"""In SamplingParams.extra_args: tokens of the answer that were generated elsewhere."""
STEP_KEY = "headrace_step"
"""In SamplingParams.extra_args: transfer id under which the start of the request's first step is reported."""
PRIORITY_KEY = "headrace_priority"
"""In SamplingParams.extra_args: the request's class, if it is not normal."""
BOUNDS_KEY = "headrace_bounds"
"""In SamplingParams.extra_args: the fields of TokenBounds, if the request has bounds."""
KEEP_KEY = "headrace_keep"
"""In SamplingParams.extra_args: the fields of KeepTerms, if the request's KV shall stay after it."""
TENANT_KEY = "headrace_tenant"
"""In SamplingParams.extra_args: the tenant's salt, if the request has a grammar."""
COMPARISON_KEY = "headrace_comparison"
"""In SamplingParams.extra_args: id of the comparison and the received block that the request's last block is compared
with."""


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Settings of one worker's connectors. `fingerprint` is the model's identity; `link_path` the link's socket."""

    role: Literal["prefill", "decode", "both"]
    worker_id: str
    incarnation: str
    host: str
    transport: str
    fingerprint: str
    link_path: str
    credentials: Credentials = field(default_factory=Credentials)
    """For handoff streams."""
    gpu_direct: bool = True
    """Whether RDMA adapters may read and write KV memory on a device, where they can."""
    rdma_devices: tuple[str, ...] = ()
    """RDMA adapters that carry KV. Empty means all."""
    admitted: tuple[str, ...] | None = None
    """Networks from which hosts may connect to the transport at first. None means every host."""
    link_address: str = ""
    """"host:port" of the link for ranks on other hosts. Empty where the engine has one host."""
    link_secret: str = ""
    """What these ranks present there."""
    write_quiet_s: float = write_quiet_s()
    """How long bytes of a lost sender may still land."""
    tiers: TierSettings = field(default_factory=TierSettings)
    """What is kept below KV memory."""

    @property
    def ref(self) -> WorkerRef:
        """The worker that the connectors belong to."""
        return WorkerRef(self.worker_id, self.incarnation)

    @property
    def sends_from_host(self) -> bool:
        """Whether transfers may read blocks of main memory."""
        return self.role == "prefill" and bool(self.tiers.names)

    def pool_opener(self) -> PoolOpener:
        """Opens the remote pool that `tiers` name."""
        networks = None if self.admitted is None else parse_networks(self.admitted)
        return pool_opener(self.tiers, self.host, self.rdma_devices, networks)

    def to_extra_config(self) -> dict[str, Any]:
        """For vLLM's kv_connector_extra_config."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values

    @classmethod
    def from_extra_config(cls, values: Mapping[str, Any]) -> ConnectorSettings:
        """From vLLM's kv_connector_extra_config."""
        return msgspec.convert(values, cls)


_Value = TypeVar("_Value", ReceiveParams, SendParams, Kept, PrefillTimes, RequestCost)


def params_with(*values: object) -> dict[str, Any]:
    """For the kv_transfer_params of a request, or of its last output. Without those that are None."""
    present = (value for value in values if value is not None)
    return {PARAMS_KEY: {type(value).__name__: msgspec.to_builtins(value) for value in present}}


def find_params(params: Mapping[str, Any] | None, kind: type[_Value]) -> _Value | None:
    """A value from kv_transfer_params. None when they have none of this kind, or it was consumed."""
    found = ((params or {}).get(PARAMS_KEY) or {}).get(kind.__name__)
    return None if found is None else msgspec.convert(found, kind)


def read_params(params: Mapping[str, Any] | None) -> ReceiveParams | SendParams | None:
    """What a request shall receive or send. None when its kv_transfer_params are not ours, or were consumed."""
    return find_params(params, ReceiveParams) or find_params(params, SendParams)


def waits_for_kv(params: Mapping[str, Any] | None) -> bool:
    """Whether the request has no blocks yet, and computes one token only: a transfer brings its KV, or it is cached."""
    ours = (params or {}).get(PARAMS_KEY) or {}
    return ReceiveParams.__name__ in ours or ours.get(SendParams.__name__, {}).get(
        "cached_only", False
    )


def consume_params(
    params: MutableMapping[str, Any] | None,
) -> ReceiveParams | SendParams | None:
    """Parses and removes them: after a preemption vLLM asks again, and then computes the request here."""
    parsed = read_params(params)
    if params is not None:
        params.pop(PARAMS_KEY, None)
    return parsed


def keep_terms(extra_args: Mapping[str, Any] | None) -> KeepTerms | None:
    """What a request's extra_args ask to be kept."""
    found = (extra_args or {}).get(KEEP_KEY)
    return KeepTerms(*found) if found else None
