"""Validation of the registry's requests. Violations map field paths to remedies. Pure."""

from __future__ import annotations

from typing import Final

from google.protobuf import duration_pb2
from google.protobuf.message import Message

from headrace.inference.v1 import first_token_pb2, priority_pb2
from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.durations import seconds_from_duration
from headrace_common.errors import InvalidRequest
from headrace_common.identity import is_incarnation, is_worker_id
from headrace_common.limits import (
    DESCRIPTOR_BYTES_MAX,
    LEASE_TTL_MAX_S,
    LEASE_TTL_MIN_S,
    NAME_CHARACTERS_MAX,
    POLICY_FAR_WEIGHT_MAX,
    POLICY_OVERLAP_WEIGHT_MAX,
    POLICY_QUEUE_WAIT_MAX_S,
    POLICY_RETRY_BUDGET_MAX,
    POLICY_TEMPERATURE_MAX,
    POLICY_TENANT_WEIGHT_MAX,
    TOKEN_TARGET_MAX_S,
    TRANSPORT_CHARACTERS_MAX,
    VERSION_CHARACTERS_MAX,
    limit_violations,
)
from headrace_common.ports import split_host_port
from headrace_common.registry.adapters import announced_violations, runtime_violations
from headrace_common.registry.duties import WORKERS
from headrace_common.registry.place import place_violations

_WORKER_ROLES: Final = frozenset(registry_pb2.WorkerRole.values()) - {
    registry_pb2.WORKER_ROLE_UNSPECIFIED
}
_PRIORITIES: Final = frozenset(priority_pb2.Priority.values()) - {priority_pb2.PRIORITY_UNSPECIFIED}
_is_role, _is_priority = _WORKER_ROLES.__contains__, _PRIORITIES.__contains__


def _is_weight(value: float) -> bool:
    return 0 < value <= POLICY_TENANT_WEIGHT_MAX


def require(violations: dict[str, str]) -> None:
    """Raises InvalidRequest naming every violation, if there is one."""
    if violations:
        raise InvalidRequest(violations)


def reference_violations(reference: registry_pb2.MemberRef, path: str) -> dict[str, str]:
    violations: dict[str, str] = {}
    if not is_worker_id(reference.worker_id):
        violations[f"{path}.worker_id"] = "give 1 to 63 characters of a-z, 0-9, '.', '_' and '-'"
    if not is_incarnation(reference.incarnation):
        violations[f"{path}.incarnation"] = "give 16 hex characters of lower case"
    return violations


def member_violations(member: registry_pb2.Member, path: str) -> dict[str, str]:
    reference = registry_pb2.MemberRef(worker_id=member.worker_id, incarnation=member.incarnation)
    violations = reference_violations(reference, path)
    if member.role not in registry_pb2.Member.Role.values() or not member.role:
        violations[f"{path}.role"] = "give ROLE_ROUTER, ROLE_PREFILL, ROLE_DECODE or ROLE_BOTH"
    if not _is_endpoint(member.endpoint):
        violations[f"{path}.endpoint"] = "give host:port with a port of 1 to 65535"
    if member.client_endpoint and not _is_endpoint(member.client_endpoint):
        violations[f"{path}.client_endpoint"] = "give host:port with a port of 1 to 65535, or none"
    if member.http_endpoint and not _is_endpoint(member.http_endpoint):
        violations[f"{path}.http_endpoint"] = "give host:port with a port of 1 to 65535, or none"
    if len(member.version) > VERSION_CHARACTERS_MAX or not member.version.isprintable():
        violations[f"{path}.version"] = (
            f"give at most {VERSION_CHARACTERS_MAX} printable characters, or none"
        )
    if member.start_unix_ns == 0:
        violations[f"{path}.start_unix_ns"] = (
            "give the start time in nanoseconds since the Unix epoch"
        )
    if member.role in WORKERS:
        violations.update(_worker_violations(member, path))
    violations.update(place_violations(member.place, f"{path}.place"))
    return violations


def watch_violations(request: registry_pb2.WatchRequest) -> dict[str, str]:
    known = [role for role in registry_pb2.Member.Role.values() if role]
    if len(set(request.roles)) < len(request.roles) or not set(request.roles) <= set(known):
        return {"roles": "give known roles, each once, or none for all"}
    return {}


def layout_violations(layout: layout_pb2.KvLayout, path: str) -> dict[str, str]:
    violations = _text_violations(layout, ("model",), path)
    limits = limit_violations(layout)
    if limits:
        return {f"{path}.{name}": remedy for name, remedy in limits.items()}
    layers = sorted(layer for group in layout.groups for layer in group.layers)
    if not layers or layers != list(range(len(layers))):
        violations[f"{path}.groups"] = "give groups that hold every layer from 0 on once"
    starts = list(layout.stage_starts)
    ascending = starts == sorted(set(starts)) and starts[:1] == [0]
    if not ascending or (layers and starts[-1] > layers[-1]):
        violations[f"{path}.stage_starts"] = "give the first layer of each stage, ascending from 0"
    for index, group in enumerate(layout.groups):
        violations.update(_group_violations(group, f"{path}.groups[{index}]"))
    return violations


def _group_violations(group: layout_pb2.CacheGroup, path: str) -> dict[str, str]:
    violations = _text_violations(group, ("name",), path)
    if group.head_count == 0:
        violations[f"{path}.head_count"] = "give a number above 0"
    if group.kind not in (layout_pb2.CacheGroup.KIND_TOKENS, layout_pb2.CacheGroup.KIND_STATE):
        violations[f"{path}.kind"] = "give KIND_TOKENS or KIND_STATE"
    elif (group.block_tokens > 0) != (group.kind == layout_pb2.CacheGroup.KIND_TOKENS):
        violations[f"{path}.block_tokens"] = "give a number above 0 for tokens, 0 for a state"
    if not group.parts:
        violations[f"{path}.parts"] = "give at least one part"
    for index, part in enumerate(group.parts):
        where = f"{path}.parts[{index}]"
        violations.update(_text_violations(part, ("name", "dtype", "block_format"), where))
        if part.unit_bytes == 0:
            violations[f"{where}.unit_bytes"] = "give a number above 0"
    return violations


def _text_violations(message: Message, names: tuple[str, ...], path: str) -> dict[str, str]:
    return {
        f"{path}.{name}": f"give 1 to {NAME_CHARACTERS_MAX} characters"
        for name in names
        if not 0 < len(getattr(message, name)) <= NAME_CHARACTERS_MAX
    }


def descriptor_violations(descriptor: layout_pb2.KvDescriptor, path: str) -> dict[str, str]:
    violations = layout_violations(descriptor.layout, f"{path}.layout")
    layout = descriptor.layout
    expected = range(layout.tensor_parallel_size * len(layout.stage_starts))
    if len(descriptor.ranks) != len(expected) or any(
        memory.rank != rank for memory, rank in zip(descriptor.ranks, expected, strict=True)
    ):
        violations[f"{path}.ranks"] = "give one entry per rank, by rank"
    for index, memory in enumerate(descriptor.ranks):
        where = f"{path}.ranks[{index}]"
        for name in ("transport", "session", "arena_bytes", "regions"):
            if not getattr(memory, name):
                violations[f"{where}.{name}"] = "must be set"
    if descriptor.ByteSize() > DESCRIPTOR_BYTES_MAX:
        violations[path] = (
            f"is limited to {DESCRIPTOR_BYTES_MAX} bytes, not {descriptor.ByteSize()}"
        )
    return violations


def ttl_violations(ttl: duration_pb2.Duration, path: str) -> dict[str, str]:
    if LEASE_TTL_MIN_S <= seconds_from_duration(ttl) <= LEASE_TTL_MAX_S:
        return {}
    return {path: f"give {LEASE_TTL_MIN_S} s to {LEASE_TTL_MAX_S} s"}


def policy_violations(policy: registry_pb2.Policy, path: str) -> dict[str, str]:
    violations: dict[str, str] = {}
    if policy.retry_budget > POLICY_RETRY_BUDGET_MAX:
        violations[f"{path}.retry_budget"] = f"give 0 to {POLICY_RETRY_BUDGET_MAX}"
    for name, highest in (
        ("overlap_weight", POLICY_OVERLAP_WEIGHT_MAX),
        ("far_weight", POLICY_FAR_WEIGHT_MAX),
        ("temperature", POLICY_TEMPERATURE_MAX),
        ("divide_gain", 1),
        ("gather_fill", 1),
    ):
        # A comparison that is also false for nan.
        if not 0 <= getattr(policy, name) <= highest:
            violations[f"{path}.{name}"] = f"give 0 to {highest}"
    if not 0 <= seconds_from_duration(policy.max_queue_wait) <= POLICY_QUEUE_WAIT_MAX_S:
        violations[f"{path}.max_queue_wait"] = f"give 0 s to {POLICY_QUEUE_WAIT_MAX_S} s"
    for name, target in (("ttft_target", policy.ttft_target), ("tpot_target", policy.tpot_target)):
        if policy.HasField(name) and not 0 < seconds_from_duration(target) <= TOKEN_TARGET_MAX_S:  # type: ignore[arg-type]
            violations[f"{path}.{name}"] = f"give more than 0 s, at most {TOKEN_TARGET_MAX_S} s"
    for name, kind in (
        ("first_token", first_token_pb2.FirstTokenPolicy),
        ("pair_level", registry_pb2.PairLevel),
        ("pair_rule", registry_pb2.PairRule),
    ):
        if getattr(policy, name) not in kind.values():
            violations[f"{path}.{name}"] = "give one of the named values"
    violations.update(_entry_violations(policy, path))
    return violations


def _entry_violations(policy: registry_pb2.Policy, path: str) -> dict[str, str]:
    """Of the entries of tenants and workers, by name."""
    weights = f"a weight above 0, at most {POLICY_TENANT_WEIGHT_MAX}"
    violations: dict[str, str] = {}
    for field, kind, values, valid in (
        ("tenant_priorities", "tenant", "high, normal or low", _is_priority),
        ("tenant_weights", "tenant", weights, _is_weight),
        ("worker_roles", "worker", "prefill, decode or both", _is_role),
    ):
        for name, value in getattr(policy, field).items():
            if not is_worker_id(name) or not valid(value):
                violations[f"{path}.{field}[{name[:NAME_CHARACTERS_MAX]}]"] = (
                    f"name a {kind} with 1 to 63 characters of a-z, 0-9, '.', '_' and '-', and give it {values}"
                )
    return violations


def _worker_violations(member: registry_pb2.Member, path: str) -> dict[str, str]:
    violations: dict[str, str] = {}
    if not 0 < len(member.model) <= NAME_CHARACTERS_MAX:
        violations[f"{path}.model"] = (
            f"give the name of the model served, 1 to {NAME_CHARACTERS_MAX} characters"
        )
    for name in ("max_model_len", "max_num_seqs"):
        if getattr(member, name) == 0:
            violations[f"{path}.{name}"] = "give a number above 0"
    if len(member.transport) > TRANSPORT_CHARACTERS_MAX:
        violations[f"{path}.transport"] = f"give at most {TRANSPORT_CHARACTERS_MAX} characters"
    violations.update(announced_violations(member.adapters, f"{path}.adapters"))
    violations.update(
        runtime_violations(member.runtime_adapters, member.adapters, f"{path}.runtime_adapters")
    )
    if not member.HasField("layout"):
        violations[f"{path}.layout"] = "give the KV layout"
    else:
        violations.update(layout_violations(member.layout, f"{path}.layout"))
    return violations


def _is_endpoint(text: str) -> bool:
    try:
        return split_host_port(text)[1] > 0
    except ValueError:
        return False
