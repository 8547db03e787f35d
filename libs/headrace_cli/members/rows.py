"""The members of the registry and what each of them reports."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_cli.client import list_members, open_router_internally, worker_status
from headrace_common.errors import HeadraceError, LayoutMismatch
from headrace_kv.layout.compatibility import PairFault
from headrace_kv.layout.proto import pair_faults_of

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

    @property
    def role(self) -> str:
        """Its role in lower case."""
        return _Role.Name(self.member.role).removeprefix("ROLE_").lower()


async def member_rows(registry: str) -> list[Row]:
    """One row for each member, by role and id."""
    members = await list_members(registry)
    members.sort(key=lambda member: (member.role, member.worker_id))
    return await asyncio.gather(*map(_row, members))


async def _row(member: registry_pb2.Member) -> Row:
    try:
        if member.role == _Role.ROLE_ROUTER:
            async with open_router_internally(member.endpoint) as router:
                fingerprint = await router.prefix_key_fingerprint()
            return Row(member, hashing=worker_pb2.KvHashing(key_fingerprint=fingerprint))
        status = await worker_status(member.endpoint)
    except HeadraceError:
        return Row(member, NO_ANSWER)
    return Row(member, _STATES.get(status.state, "unknown"), status, status.kv_hashing)


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


def version_notes(members: Sequence[registry_pb2.Member]) -> list[str]:
    """A line that lists the members of each version, where there are several."""
    by_version: dict[str, list[str]] = {}
    for member in members:
        by_version.setdefault(member.version or UNKNOWN_VERSION, []).append(member.worker_id)
    if len(by_version) < 2:
        return []
    parts = [f"{name}: {', '.join(by_version[name])}" for name in sorted(by_version)]
    return [f"members have {len(parts)} versions: {'; '.join(parts)}"]
