"""What commands print with --json. docs/commands.md lists every field; a field is never removed or given a new meaning.

A schema's name ends with its version. `None` is "unknown", or "none" where that is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Record:
    """A document. `schema` names it and its version."""

    schema: ClassVar[str] = ""


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A member of the registry. The counts are None for routers, and where a worker gave no answer."""

    id: str
    role: str
    incarnation: str
    endpoint: str
    client_endpoint: str | None
    model: str | None
    transport: str | None
    version: str | None
    tensor_parallel_size: int | None
    pipeline_stages: int | None
    max_model_len: int | None
    max_num_seqs: int | None
    state: str | None
    running_requests: int | None
    waiting_requests: int | None
    total_blocks: int | None
    reserved_blocks: int | None
    quarantined_blocks: int | None
    used_blocks: int | None
    active_transfers: int | None
    prefix_key: str | None
    prefix_block_tokens: int | None
    zone: str | None
    rack: str | None
    host: str | None


@dataclass(frozen=True, slots=True)
class PairRecord:
    """Prefill and decode workers that cannot hand KV over, and the fields that differ, with both values."""

    prefill: list[str]
    decode: list[str]
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WorkersRecord(Record):
    """`headrace workers --json`."""

    schema: ClassVar[str] = "headrace.workers.v1"
    registry: str
    members: list[MemberRecord]
    pairs_apart: list[PairRecord]
    prefix_faults: list[str]


@dataclass(frozen=True, slots=True)
class ResetRecord(Record):
    """`headrace reset-cache --json`."""

    schema: ClassVar[str] = "headrace.reset-cache.v1"
    workers: list[str]


@dataclass(frozen=True, slots=True)
class DrainRecord(Record):
    """`headrace drain --json`."""

    schema: ClassVar[str] = "headrace.drain.v1"
    worker: str
    requests_in_flight: int
    remaining_s: float
    ended: bool


@dataclass(frozen=True, slots=True)
class CandidateRecord:
    """A decode worker that could take the prompt."""

    worker: str
    cost: float
    cached_tokens: int
    missing_tokens: int
    held_tokens: int
    requests: int
    unfit: str | None
    prefix_fault: str | None


@dataclass(frozen=True, slots=True)
class RouteRecord(Record):
    """`headrace route --json`. The first candidate is the chosen worker."""

    schema: ClassVar[str] = "headrace.route.v1"
    worker: str
    incarnation: str
    remote_prefill: bool
    explanation: str
    candidates: list[CandidateRecord]


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A timed step. Attributes are those of docs/telemetry.md, as text."""

    span_id: str
    parent_span_id: str | None
    name: str
    service: str
    worker: str | None
    start_unix_ns: int
    duration_ns: int
    attributes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PartRecord:
    """One part of the time to first token."""

    name: str
    duration_ns: int


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """What one prefill rank wrote to one decode rank."""

    name: str
    transport: str
    payload_bytes: int
    moving_ns: int
    end_ns: int
    writes: int


@dataclass(frozen=True, slots=True)
class TraceRecord(Record):
    """`headrace trace --json`."""

    schema: ClassVar[str] = "headrace.trace.v1"
    trace_id: str
    request_id: str
    start_unix_ns: int
    complete: bool
    verdict: str
    ttft_ns: int | None
    parts: list[PartRecord]
    links: list[LinkRecord]
    spans: list[SpanRecord]


@dataclass(frozen=True, slots=True)
class TraceSummaryRecord:
    """A stored trace without its spans."""

    trace_id: str
    request_id: str
    start_unix_ns: int
    complete: bool


@dataclass(frozen=True, slots=True)
class TracesRecord(Record):
    """`headrace trace --list N --json`, newest first."""

    schema: ClassVar[str] = "headrace.traces.v1"
    traces: list[TraceSummaryRecord]


@dataclass(frozen=True, slots=True)
class PolicyRecord(Record):
    """`headrace policy get|set --json`. A field of the policy that is not set is None."""

    schema: ClassVar[str] = "headrace.policy.v1"
    revision: int
    local_prefill_max_tokens: int
    retry_budget: int | None
    overlap_weight: float | None
    temperature: float
    max_queue_wait_s: float | None
    tenant_weights: Mapping[str, float]
    tenant_priorities: Mapping[str, str]
    first_token: str | None
    ttft_target_s: float | None
    pair_level: str | None
    pair_rule: str | None
    far_weight: float | None


@dataclass(frozen=True, slots=True)
class FindingRecord:
    """The result of one check. `verdict` is ok, warning or error."""

    verdict: str
    subject: str
    detail: str
    remedy: str | None


@dataclass(frozen=True, slots=True)
class DoctorRecord(Record):
    """`headrace doctor --json`."""

    schema: ClassVar[str] = "headrace.doctor.v1"
    findings: list[FindingRecord]


@dataclass(frozen=True, slots=True)
class SizeRowRecord:
    """One prompt length. `compute_ms` and `hidden` are None without a rate of computing."""

    tokens: int
    payload_bytes: int
    transfer_ms: float
    compute_ms: float | None
    exposed_ms: float
    hidden: bool | None


@dataclass(frozen=True, slots=True)
class WorkerCountRecord:
    """The workers of one role that a load needs."""

    role: str
    count: int
    limit: str
    share: float


@dataclass(frozen=True, slots=True)
class SizeRecord(Record):
    """`headrace size --json`."""

    schema: ClassVar[str] = "headrace.size.v1"
    attention: str
    dtype: str
    layers: int
    token_bytes: int
    gbit_per_s: float
    efficiency: float
    hidden_up_to_tokens_per_s: float
    rows: list[SizeRowRecord]
    workers: list[WorkerCountRecord] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ChatRecord(Record):
    """`headrace chat PROMPT --json`."""

    schema: ClassVar[str] = "headrace.chat.v1"
    text: str
    finish_reason: str
    request_id: str
    trace_id: str
    prompt_tokens: int
    completion_tokens: int
    decode_cached_tokens: int
    transferred_tokens: int
    time_to_first_token_s: float
    total_s: float
    prefill_worker: str | None
    decode_worker: str | None
    attempts: int
    latency: Mapping[str, object] | None = None
    """With --timing: the parts of the times to the first tokens, in microseconds."""


@dataclass(frozen=True, slots=True)
class StatusPageRecord(Record):
    """`headrace status --json`."""

    schema: ClassVar[str] = "headrace.status-page.v1"
    url: str


@dataclass(frozen=True, slots=True)
class ReasonRecord:
    """A rule of the planner that applied, and the figures that it compared."""

    role: str
    rule: str
    count: int
    inputs: Mapping[str, float]
    sentence: str


@dataclass(frozen=True, slots=True)
class DecisionRecord(Record):
    """A line of `headrace planner replay --json`."""

    schema: ClassVar[str] = "headrace.planner-decision.v1"

    start_unix_s: float
    duration_s: float
    prefill_workers: int
    decode_workers: int
    prefill_target: int
    decode_target: int
    is_changing: bool
    reasons: list[ReasonRecord]


@dataclass(frozen=True, slots=True)
class ExplainedDecision:
    """A decision of a running planner."""

    number: int
    start_unix_s: float
    duration_s: float
    prefill_workers: int
    decode_workers: int
    prefill_target: int
    decode_target: int
    outcome: str
    detail: str
    reasons: list[ReasonRecord]


@dataclass(frozen=True, slots=True)
class ExplainRecord(Record):
    """`headrace planner explain --json`. The counts are None before the first observation or target."""

    schema: ClassVar[str] = "headrace.planner-explain.v1"

    model: str
    mode: str
    interval_s: float
    observation_fault: str
    prefill_workers: int | None
    decode_workers: int | None
    prefill_target: int | None
    decode_target: int | None
    decisions: list[ExplainedDecision]


@dataclass(frozen=True, slots=True)
class ChangeRecord:
    """The numbers of workers that the planner asked for."""

    time_s: float
    prefill_workers: int
    decode_workers: int


@dataclass(frozen=True, slots=True)
class SimulationClassRecord:
    """The requests of one class in a replay. Times as in SimulationRunRecord."""

    priority: str
    requests: int
    failed: int
    ttft_ms: Mapping[str, float]
    itl_ms: Mapping[str, float]
    attainment: float
    goodput: float


@dataclass(frozen=True, slots=True)
class SimulationRunRecord:
    """One replay of a trace. Times are in milliseconds, by "mean", "p50", "p90", "p95" and "p99"."""

    placement: str
    scaling: str
    requests: int
    failures: Mapping[str, int]
    duration_s: float
    ttft_ms: Mapping[str, float]
    itl_ms: Mapping[str, float]
    e2e_ms: Mapping[str, float]
    attainment: float
    ttft_attainment: float
    itl_attainment: float
    goodput: float
    cached_share: float
    prefill_worker_hours: float
    decode_worker_hours: float
    changes: list[ChangeRecord]
    classes: list[SimulationClassRecord] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SimulationRecord(Record):
    """`headrace simulate --json`."""

    schema: ClassVar[str] = "headrace.simulation.v1"
    trace: str
    runs: list[SimulationRunRecord]
