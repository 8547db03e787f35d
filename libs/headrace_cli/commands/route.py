"""`headrace route`: where a prompt would go, and why."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.inference.v1 import inference_pb2


def route_view(routed: inference_pb2.RouteResponse, *, explain: bool) -> RenderableType:
    """One line; with `explain`, a row for each candidate as well, the chosen one first."""
    how = "prefilled by a prefill worker" if routed.remote_prefill else "prefilled there"
    line = Text(f"{routed.worker_id}, {how}: {routed.explanation}")
    return Group(line, candidates_table(routed)) if explain else line


def candidates_table(routed: inference_pb2.RouteResponse) -> Table:
    """What each candidate would cost, in tokens."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("decode worker", no_wrap=True)
    for name in ("cost", "cached", "missing", "held", "requests"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("but it is")
    for candidate in routed.candidates:
        table.add_row(
            "*" if candidate.worker_id == routed.worker_id else "",
            candidate.worker_id,
            f"{candidate.cost:,.0f}",
            f"{candidate.cached_tokens:,}",
            f"{candidate.missing_tokens:,}",
            f"{candidate.held_tokens:,}",
            f"{candidate.requests:,}",
            "; ".join(_but(candidate)) or "-",
        )
    return table


def _but(candidate: inference_pb2.Candidate) -> Iterator[str]:
    if candidate.unfit:
        yield candidate.unfit
    if candidate.prefix_fault:
        yield f"without credit for its cache: {candidate.prefix_fault}"
