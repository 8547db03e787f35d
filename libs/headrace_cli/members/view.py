"""Shows members as a table, or as a record for programs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.text import Text

from headrace_cli.members.rows import Row, pairs_apart, prefix_faults, version_notes
from headrace_cli.records import MemberRecord, PairRecord, WorkersRecord
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


def workers_record(registry: str, rows: Sequence[Row]) -> WorkersRecord:
    """The members for programs."""
    return WorkersRecord(
        registry=registry,
        members=[_member_record(row) for row in rows],
        pairs_apart=[
            PairRecord(list(fault.prefill_ids), list(fault.decode_ids), dict(fault.fields))
            for fault in pairs_apart(rows)
        ],
        prefix_faults=prefix_faults(rows),
    )


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


def _member_record(row: Row) -> MemberRecord:
    member, status = row.member, row.status
    layout = member.layout if member.HasField("layout") else None
    key = row.hashing.key_fingerprint
    return MemberRecord(
        id=member.worker_id,
        role=row.role,
        incarnation=member.incarnation,
        endpoint=member.endpoint,
        client_endpoint=member.client_endpoint or None,
        model=member.model or None,
        transport=member.transport or None,
        version=member.version or None,
        tensor_parallel_size=layout.tensor_parallel_size if layout else None,
        pipeline_stages=len(layout.stage_starts) if layout else None,
        max_model_len=member.max_model_len or None,
        max_num_seqs=member.max_num_seqs or None,
        state=row.state or None,
        running_requests=status.running_requests if status else None,
        waiting_requests=status.waiting_requests if status else None,
        total_blocks=status.total_blocks if status else None,
        reserved_blocks=status.reserved_blocks if status else None,
        quarantined_blocks=status.quarantined_blocks if status else None,
        used_blocks=status.used_blocks if status else None,
        active_transfers=status.active_transfers if status else None,
        prefix_key=f"{key:08x}" if key else None,
        prefix_block_tokens=row.hashing.block_tokens or None,
        zone=member.place.zone or None,
        rack=member.place.rack or None,
        host=member.place.host or None,
    )
