"""`headrace workers`: who is there, and what they are doing."""

from __future__ import annotations

import asyncio

from rich import box
from rich.table import Table

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_cli.client import list_members, worker_status
from headrace_common.errors import HeadraceError

STATES = {
    worker_pb2.WatchStatusResponse.STATE_SERVING: "serving",
    worker_pb2.WatchStatusResponse.STATE_DRAINING: "draining",
}
Role = registry_pb2.Member.Role


async def workers_table(registry: str) -> Table:
    """One row for each member, with its state asked of itself."""
    members = await list_members(registry)
    members.sort(key=lambda member: (member.role, member.worker_id))
    states = await asyncio.gather(*(_state_cells(member) for member in members))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("worker", "role", "TP", "endpoint", "state"):
        table.add_column(title, no_wrap=True)
    for title in ("run", "wait", "blocks", "kv"):
        table.add_column(title, no_wrap=True, justify="right")
    table.add_column("model", no_wrap=True, overflow="ellipsis")
    for member, cells in zip(members, states, strict=True):
        table.add_row(
            member.worker_id,
            Role.Name(member.role).removeprefix("ROLE_").lower(),
            str(member.layout.tensor_parallel_size) if member.HasField("layout") else "-",
            member.endpoint,
            *cells,
            member.model or "-",
        )
    return table


async def _state_cells(member: registry_pb2.Member) -> tuple[str, str, str, str, str]:
    if member.role == registry_pb2.Member.ROLE_ROUTER:
        return "-", "-", "-", "-", "-"
    try:
        status = await worker_status(member.endpoint)
    except HeadraceError:
        return "no answer", "-", "-", "-", "-"
    held = status.reserved_blocks + status.quarantined_blocks
    return (
        STATES.get(status.state, "unknown"),
        str(status.running_requests),
        str(status.waiting_requests),
        f"{held}/{status.total_blocks}",
        str(status.active_transfers),
    )
