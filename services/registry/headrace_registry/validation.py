"""What the registry's requests must hold. Violations map field paths to remedies."""

from __future__ import annotations

import re
from typing import Final

from google.protobuf import duration_pb2

from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.config import split_host_port
from headrace_common.errors import InvalidRequest
from headrace_common.identity import is_worker_id

TTL_MIN_S: Final = 1
TTL_MAX_S: Final = 300
PAGE_MAX: Final = 1000
RETRY_BUDGET_MAX: Final = 10
# etcd refuses requests beyond 1.5 MiB.
DESCRIPTOR_BYTES_MAX: Final = 1024 * 1024
_TEXT_MAX: Final = 255

_INCARNATION = re.compile(r"[0-9a-f]{16}")
_LAYOUT_COUNTS: Final = (
    "layer_count",
    "kv_head_count",
    "tensor_parallel_size",
    "block_tokens",
    "block_head_bytes",
)


def require(violations: dict[str, str]) -> None:
    """Raises InvalidRequest that names every violation, if there is one."""
    if violations:
        raise InvalidRequest(violations)


def reference_violations(reference: registry_pb2.MemberRef, path: str) -> dict[str, str]:
    violations: dict[str, str] = {}
    if not is_worker_id(reference.worker_id):
        violations[f"{path}.worker_id"] = "give 1 to 63 characters of a-z, 0-9, '.', '_' and '-'"
    if _INCARNATION.fullmatch(reference.incarnation) is None:
        violations[f"{path}.incarnation"] = "give 16 hex characters of lower case"
    return violations


def member_violations(member: registry_pb2.Member, path: str) -> dict[str, str]:
    reference = registry_pb2.MemberRef(worker_id=member.worker_id, incarnation=member.incarnation)
    violations = reference_violations(reference, path)
    if member.role not in registry_pb2.Member.Role.values() or not member.role:
        violations[f"{path}.role"] = "give ROLE_ROUTER, ROLE_PREFILL or ROLE_DECODE"
    if not _is_endpoint(member.endpoint):
        violations[f"{path}.endpoint"] = "give host:port with a port of 1 to 65535"
    if member.start_unix_ns == 0:
        violations[f"{path}.start_unix_ns"] = (
            "give the start time, by which incarnations are ordered"
        )
    if member.role in (registry_pb2.Member.ROLE_PREFILL, registry_pb2.Member.ROLE_DECODE):
        violations.update(_worker_violations(member, path))
    return violations


def layout_violations(layout: layout_pb2.KvLayout, path: str) -> dict[str, str]:
    violations: dict[str, str] = {}
    for name in ("model", "dtype", "interior"):
        if not 0 < len(getattr(layout, name)) <= _TEXT_MAX:
            violations[f"{path}.{name}"] = f"give 1 to {_TEXT_MAX} characters"
    for name in _LAYOUT_COUNTS:
        if getattr(layout, name) == 0:
            violations[f"{path}.{name}"] = "give a number above 0"
    return violations


def descriptor_violations(descriptor: layout_pb2.KvDescriptor, path: str) -> dict[str, str]:
    violations = layout_violations(descriptor.layout, f"{path}.layout")
    expected = list(range(descriptor.layout.tensor_parallel_size))
    if [memory.rank for memory in descriptor.ranks] != expected:
        violations[f"{path}.ranks"] = "give one entry per tensor-parallel rank, by rank"
    for index, memory in enumerate(descriptor.ranks):
        where = f"{path}.ranks[{index}]"
        for name in ("transport", "session", "arena_bytes", "block_count", "regions"):
            if not getattr(memory, name):
                violations[f"{where}.{name}"] = "must be set"
    if descriptor.ByteSize() > DESCRIPTOR_BYTES_MAX:
        violations[path] = f"may take {DESCRIPTOR_BYTES_MAX} bytes, not {descriptor.ByteSize()}"
    return violations


def ttl_violations(ttl: duration_pb2.Duration, path: str) -> dict[str, str]:
    seconds = ttl.seconds + ttl.nanos / 1e9
    if TTL_MIN_S <= seconds <= TTL_MAX_S:
        return {}
    return {path: f"give {TTL_MIN_S} s to {TTL_MAX_S} s"}


def policy_violations(policy: registry_pb2.Policy, path: str) -> dict[str, str]:
    if policy.retry_budget <= RETRY_BUDGET_MAX:
        return {}
    return {f"{path}.retry_budget": f"give 0 to {RETRY_BUDGET_MAX}"}


def _worker_violations(member: registry_pb2.Member, path: str) -> dict[str, str]:
    violations: dict[str, str] = {}
    if not 0 < len(member.model) <= _TEXT_MAX:
        violations[f"{path}.model"] = (
            f"give the name of the model served, 1 to {_TEXT_MAX} characters"
        )
    for name in ("context_tokens", "max_requests"):
        if getattr(member, name) == 0:
            violations[f"{path}.{name}"] = "give a number above 0"
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
