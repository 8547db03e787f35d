"""The members of a deployment: what they report, as a table and for programs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.text import Text

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_cli.client import (
    list_members,
    open_router_internally,
    read_policy,
    worker_status,
)
from headrace_cli.output import Column, fitted_table, message_object
from headrace_common.durations import seconds_from_duration
from headrace_common.errors import HeadraceError, LayoutMismatch
from headrace_common.registry.duties import role_by_policy
from headrace_kv.compatibility import PairFault, pair_faults_of

NO_ANSWER: Final = "no answer"
UNKNOWN_VERSION: Final = "0.1.0 or older"
"""Version of a member that states none."""
_STATES: Final = {
    worker_pb2.WatchStatusResponse.STATE_SERVING: "serving",
    worker_pb2.WatchStatusResponse.STATE_DRAINING: "draining",
}
_Role = registry_pb2.Member.Role


@dataclass(frozen=True, slots=True)
class Row:
    """A member, its state, the status that it reports (None for routers), and how it hashes cached prefixes."""

    member: registry_pb2.Member
    state: str = ""
    status: worker_pb2.WatchStatusResponse | None = None
    hashing: worker_pb2.KvHashing = field(default_factory=worker_pb2.KvHashing)
    policy_role: registry_pb2.WorkerRole.ValueType = registry_pb2.WORKER_ROLE_BOTH
    """What the policy leaves of the roles."""

    @property
    def role(self) -> str:
        """Its role in lower case, and the one that the policy leaves it."""
        role = _Role.Name(self.member.role).removeprefix("ROLE_").lower()
        left = registry_pb2.WorkerRole.Name(self.policy_role).removeprefix("WORKER_ROLE_").lower()
        return role if left == "both" else f"{role}, {left} by policy"


async def member_rows(registry: str) -> list[Row]:
    """One row for each member, by role and id."""
    members = await list_members(registry)
    members.sort(key=lambda member: (member.role, member.worker_id))
    rows = await asyncio.gather(*map(_row, members))
    if all(member.role != _Role.ROLE_BOTH for member in members):
        return rows
    roles = (await read_policy(registry)).policy.worker_roles
    return [replace(row, policy_role=role_by_policy(row.member, roles)) for row in rows]


async def _row(member: registry_pb2.Member) -> Row:
    try:
        if member.role == _Role.ROLE_ROUTER:
            async with open_router_internally(member.endpoint) as router:
                fingerprint = (await router.listing()).prefix_key_fingerprint
            return Row(member, hashing=worker_pb2.KvHashing(key_fingerprint=fingerprint))
        status = await worker_status(member.endpoint)
    except HeadraceError:
        return Row(member, NO_ANSWER)
    return Row(member, state_of(status), status, status.kv_hashing)


def state_of(status: worker_pb2.WatchStatusResponse) -> str:
    """A worker's state for people."""
    if status.HasField("stall"):
        return f"stalled {seconds_from_duration(status.stall.age):.0f} s"
    return _STATES.get(status.state, "unknown")


def pairs_apart(rows: Sequence[Row]) -> list[PairFault]:
    """The pairs that cannot hand KV over. None where a layout is not valid."""
    try:
        return pair_faults_of(row.member for row in rows)
    except LayoutMismatch:
        return []


def prefix_faults(rows: Sequence[Row]) -> list[str]:
    """A line for each worker that hashes prefixes differently from a router."""
    routers = {row.hashing.key_fingerprint for row in rows if row.member.role == _Role.ROLE_ROUTER}
    lines: list[str] = []
    for row in rows:
        theirs = row.hashing.key_fingerprint
        if row.member.role == _Role.ROLE_ROUTER or not theirs:
            continue
        problems: list[str] = []
        if others := sorted(routers - {0, theirs}):
            keys = ", ".join(f"{other:08x}" for other in others)
            problems.append(f"under key {theirs:08x}, but routers under {keys}")
        groups = row.member.layout.groups
        size = groups[0].block_tokens if groups else 0
        if size and size != row.hashing.block_tokens:
            problems.append(
                f"in blocks of {row.hashing.block_tokens} tokens, but routers of {size}"
            )
        if problems:
            lines.append(
                f"{row.member.worker_id} gets no credit for its cache: it hashes prefixes "
                + " and ".join(problems)
            )
    return lines


def distrust_lines(rows: Sequence[Row]) -> list[str]:
    """A line for each pair of workers that hands over nothing any more."""
    return [
        f"{row.member.worker_id} accepts no KV from {one.worker_id}: {one.detail}"
        for row in rows
        if row.status is not None
        for one in row.status.distrusted_workers
    ]


def version_notes(members: Sequence[registry_pb2.Member]) -> list[str]:
    """A line that lists the members of each version, where there are several."""
    by_version: dict[str, list[str]] = {}
    for member in members:
        by_version.setdefault(member.version or UNKNOWN_VERSION, []).append(member.worker_id)
    if len(by_version) < 2:
        return []
    parts = [f"{name}: {', '.join(by_version[name])}" for name in sorted(by_version)]
    return [f"members have {len(parts)} versions: {'; '.join(parts)}"]


COLUMNS: Final = (
    Column("worker"),
    Column("role"),
    Column("TP", rank=4),
    Column("endpoint", rank=7),
    Column("state"),
    Column("run", right=True),
    Column("wait", right=True),
    Column("blocks", rank=1, right=True),
    Column("used", rank=3, right=True),
    Column("kv", rank=2, right=True),
    Column("prefixes", rank=6),
    Column("model", rank=5),
)


def workers_view(rows: Sequence[Row], console: Console) -> RenderableType:
    """One row for each member, then a line for each fault. On a narrow console, the names stay whole."""
    table, left_out = fitted_table(console, COLUMNS, [_cells(row) for row in rows])
    lines = [Text(str(fault)) for fault in pairs_apart(rows)]
    lines += map(Text, prefix_faults(rows))
    lines += map(Text, distrust_lines(rows))
    lines += map(Text, version_notes([row.member for row in rows]))
    if left_out:
        note = f"left out: {', '.join(reversed(left_out))} (--json has them)"
        lines.append(Text(note, style="dim"))
    return Group(table, *lines)


def workers_object(registry: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The members for programs."""
    return {
        "registry": registry,
        "members": list(map(_member_object, rows)),
        "pairs_apart": [asdict(fault) for fault in pairs_apart(rows)],
        "prefix_faults": prefix_faults(rows),
    }


def _member_object(row: Row) -> dict[str, Any]:
    """The member's message without its layout and descriptors, and the status that it reports."""
    member = registry_pb2.Member()
    member.CopyFrom(row.member)
    member.ClearField("layout")
    tensor_parallel_size = row.member.layout.tensor_parallel_size
    return message_object(member) | {
        "tensor_parallel_size": tensor_parallel_size,
        "role_by_policy": registry_pb2.WorkerRole.Name(row.policy_role),
        "state": row.state,
        "status": None if row.status is None else message_object(row.status),
    }


def _cells(row: Row) -> tuple[str, ...]:
    member, status = row.member, row.status
    counts = ("-",) * 5
    if status is not None:
        held = status.reserved_blocks + status.quarantined_blocks
        counts = (
            str(status.running_requests),
            str(status.waiting_requests),
            f"{held}/{status.total_blocks}",
            str(status.used_blocks),
            str(status.active_transfers),
        )
    return (
        member.worker_id,
        row.role,
        str(member.layout.tensor_parallel_size) if member.HasField("layout") else "-",
        member.endpoint,
        row.state or "-",
        *counts,
        _prefixes(row),
        member.model or "-",
    )


def _prefixes(row: Row) -> str:
    """The block size and the key's fingerprint."""
    if not row.hashing.key_fingerprint:
        return "-"
    size = f"{row.hashing.block_tokens}/" if row.hashing.block_tokens else ""
    return f"{size}{row.hashing.key_fingerprint:08x}"
