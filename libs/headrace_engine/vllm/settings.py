"""Values that the service passes to its engine processes inside vLLM's own configuration and requests."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import Any, Final, Literal

from headrace_common.access.credentials import Credentials
from headrace_common.limits import write_quiet_s
from headrace_engine.connector.transfers import (
    PrefillTimes,
    PrefixParams,
    ReceiveParams,
    SendParams,
)
from headrace_engine.receipts import RequestCost
from headrace_kv.layout import WorkerRef
from headrace_kv.messages import TransferTarget
from headrace_kv.prefix.events import Tier
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
_NESTED = ("credentials", "tiers")


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
        return asdict(self)

    @classmethod
    def from_extra_config(cls, values: Mapping[str, Any]) -> ConnectorSettings:
        """From vLLM's kv_connector_extra_config."""
        given = {
            one.name: values[one.name]
            for one in fields(cls)
            if one.name in values and one.name not in _NESTED
        }
        return cls(
            **given,
            credentials=Credentials.from_dict(values.get("credentials", {})),
            tiers=TierSettings(**values.get("tiers", {})),
        )


def receive_params(transfer_id: str, awaits_first_token: bool = False) -> dict[str, Any]:
    """kv_transfer_params of a decode request that waits for its KV."""
    return {PARAMS_KEY: {"incoming": [transfer_id, awaits_first_token]}}


def send_params(
    target: TransferTarget, prefix: PrefixParams | None = None, *, cached_only: bool = False
) -> dict[str, Any]:
    """kv_transfer_params of a prefill request. See SendParams."""
    values = asdict(target)
    values["decode"] = [target.decode.worker_id, target.decode.incarnation]
    values["ticket"] = target.ticket.hex()
    ours: dict[str, Any] = {"outgoing": values}
    if prefix is not None:
        ours["prefix"] = [prefix.transfer_id, prefix.end_token, prefix.least_tokens]
    if cached_only:
        ours["cached_only"] = True
    return {PARAMS_KEY: ours}


def read_params(params: Mapping[str, Any] | None) -> ReceiveParams | SendParams | None:
    """Parses a request's kv_transfer_params. None when they are not ours, or were consumed."""
    ours = (params or {}).get(PARAMS_KEY)
    if not ours:
        return None
    if "incoming" in ours:
        return ReceiveParams(*ours["incoming"])
    values = dict(ours["outgoing"])
    values["decode"] = WorkerRef(*values["decode"])
    values["ticket"] = bytes.fromhex(values["ticket"])
    prefix = ours.get("prefix")
    return SendParams(
        TransferTarget(**values),
        PrefixParams(*prefix) if prefix else None,
        cached_only="cached_only" in ours,
    )


def waits_for_kv(params: Mapping[str, Any] | None) -> bool:
    """Whether the request has no blocks yet, and computes one token only: a transfer brings its KV, or it is cached."""
    ours = (params or {}).get(PARAMS_KEY) or {}
    return "incoming" in ours or "cached_only" in ours


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


def kept_params(kept: Kept) -> dict[str, Any]:
    """For the kv_transfer_params of a decode request's last output."""
    return {PARAMS_KEY: {"kept": [kept.tokens, int(kept.tier), kept.seconds]}}


def read_kept(params: Mapping[str, Any] | None) -> Kept | None:
    """What is promised. None for an output without it."""
    found = ((params or {}).get(PARAMS_KEY) or {}).get("kept")
    return Kept(found[0], Tier(found[1]), found[2]) if found else None


def times_params(times: PrefillTimes) -> dict[str, Any]:
    """For the kv_transfer_params of a prefill request's last output."""
    return {PARAMS_KEY: asdict(times)}


def read_times(params: Mapping[str, Any] | None) -> PrefillTimes | None:
    """None when the request ended without them."""
    ours = (params or {}).get(PARAMS_KEY) or {}
    times = {name: value for name, value in ours.items() if name != _COST}
    return PrefillTimes(**times) if times else None


_COST: Final = "cost"


def with_cost(params: Mapping[str, Any] | None, cost: RequestCost) -> dict[str, Any]:
    """The kv_transfer_params of a request's last output, with what it has cost."""
    return {PARAMS_KEY: {**(params or {}).get(PARAMS_KEY, {}), _COST: list(astuple(cost))}}


def read_cost(params: Mapping[str, Any] | None) -> RequestCost:
    """Empty for an output without it."""
    return RequestCost(*((params or {}).get(PARAMS_KEY) or {}).get(_COST, ()))
