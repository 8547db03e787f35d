"""`headrace workers` and `headrace reset-cache`: the members, and their prefix caches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_cli.client import (
    list_members,
    open_router_internally,
    reset_prefix_cache,
    worker_status,
)
from headrace_cli.console import answer_console
from headrace_cli.exit_status import run_command
from headrace_cli.options import DEFAULT_ROUTER, Registry, Router
from headrace_cli.up.state import find_registry
from headrace_common.errors import HeadraceError, NotFound

STATES = {
    worker_pb2.WatchStatusResponse.STATE_SERVING: "serving",
    worker_pb2.WatchStatusResponse.STATE_DRAINING: "draining",
}
Role = registry_pb2.Member.Role


@dataclass(frozen=True, slots=True)
class Row:
    """A member, its state and counts as cells, and how it hashes cached prefixes."""

    member: registry_pb2.Member
    state: str = "-"
    counts: tuple[str, str, str, str, str] = ("-", "-", "-", "-", "-")
    hashing: worker_pb2.KvHashing = field(default_factory=worker_pb2.KvHashing)

    @property
    def prefixes(self) -> str:
        """The block size and the key's fingerprint."""
        if not self.hashing.key_fingerprint:
            return "-"
        size = f"{self.hashing.block_tokens}/" if self.hashing.block_tokens else ""
        return f"{size}{self.hashing.key_fingerprint:08x}"


def register(app: typer.Typer) -> None:
    """Adds `headrace workers` and `headrace reset-cache`."""
    app.command(
        epilog="Examples:  headrace workers   |   headrace workers --registry 127.0.0.1:7051"
    )(workers)
    app.command(
        "reset-cache",
        epilog="Examples:  headrace reset-cache decode-0   |   "
        "headrace reset-cache prefill-0 decode-0 --timeout 30",
    )(reset_cache)


def workers(router: Router = DEFAULT_ROUTER, registry: Registry = "") -> None:
    """Lists the registered processes and the state of each worker."""

    async def work() -> None:
        answer_console().print(await workers_view(registry or find_registry(router)))

    run_command(work())


def reset_cache(
    worker_ids: Annotated[list[str], typer.Argument(metavar="WORKER...", help="Worker ids.")],
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    timeout: Annotated[
        float, typer.Option(min=0.5, max=60, help="Seconds to wait for running requests.")
    ] = 10.0,
) -> None:
    """Empties workers' prefix caches; routers are notified at once."""

    async def work() -> None:
        await reset_caches(registry or find_registry(router), worker_ids, timeout)

    run_command(work())


async def workers_view(registry: str) -> RenderableType:
    """One row for each member, with the state it reports, then a line for each prefix fault."""
    members = await list_members(registry)
    members.sort(key=lambda member: (member.role, member.worker_id))
    rows = await asyncio.gather(*map(_row, members))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("worker", "role", "TP", "endpoint", "state"):
        table.add_column(title, no_wrap=True)
    for title in ("run", "wait", "blocks", "used", "kv"):
        table.add_column(title, no_wrap=True, justify="right")
    table.add_column("prefixes", no_wrap=True)
    table.add_column("model", no_wrap=True, overflow="ellipsis")
    for row in rows:
        member = row.member
        table.add_row(
            member.worker_id,
            Role.Name(member.role).removeprefix("ROLE_").lower(),
            str(member.layout.tensor_parallel_size) if member.HasField("layout") else "-",
            member.endpoint,
            row.state,
            *row.counts,
            row.prefixes,
            member.model or "-",
        )
    return Group(table, *map(Text, prefix_faults(rows)))


def prefix_faults(rows: Sequence[Row]) -> list[str]:
    """A line for each worker that hashes prefixes differently from a router."""
    routers = {row.hashing.key_fingerprint for row in rows if row.member.role == Role.ROLE_ROUTER}
    lines: list[str] = []
    for row in rows:
        theirs = row.hashing.key_fingerprint
        if row.member.role == Role.ROLE_ROUTER or not theirs:
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


async def reset_caches(registry: str, worker_ids: list[str], timeout_s: float) -> None:
    """Empties the prefix caches of these workers. Raises NotFound, and empties none, for an unknown worker."""
    members = {member.worker_id: member for member in await list_members(registry)}
    for worker_id in worker_ids:
        if worker_id not in members or members[worker_id].role == Role.ROLE_ROUTER:
            raise NotFound(
                f"no worker {worker_id} is registered: `headrace workers` lists them",
                metadata={"worker_id": worker_id},
            )
    for worker_id in worker_ids:
        await reset_prefix_cache(members[worker_id].endpoint, timeout_s)


async def _row(member: registry_pb2.Member) -> Row:
    try:
        if member.role == Role.ROLE_ROUTER:
            async with open_router_internally(member.endpoint) as router:
                fingerprint = await router.prefix_key_fingerprint()
            return Row(member, hashing=worker_pb2.KvHashing(key_fingerprint=fingerprint))
        status = await worker_status(member.endpoint)
    except HeadraceError:
        return Row(member, state="no answer")
    held = status.reserved_blocks + status.quarantined_blocks
    counts = (
        str(status.running_requests),
        str(status.waiting_requests),
        f"{held}/{status.total_blocks}",
        str(status.used_blocks),
        str(status.active_transfers),
    )
    return Row(member, STATES.get(status.state, "unknown"), counts, status.kv_hashing)
