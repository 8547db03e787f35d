"""Shows members as a table, or as an object for programs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.text import Text

from headrace.registry.v1 import registry_pb2
from headrace_cli.json_output import message_object
from headrace_cli.members.rows import Row, pairs_apart, prefix_faults, version_notes
from headrace_cli.tables import Column, fitted_table

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
