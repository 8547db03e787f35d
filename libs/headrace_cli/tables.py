"""Tables that fit a terminal without cutting names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Column:
    """A column. On a narrow terminal, the one with the highest `rank` is left out first, and those with 0 never."""

    title: str
    rank: int = 0
    right: bool = False


def fitted_table(
    console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]]
) -> tuple[Table, list[str]]:
    """A table that fits the console, and the titles of the columns that are left out.

    Without a terminal nothing is left out. Cells never lose text: where no column can be left out, they are folded.
    """
    kept = list(range(len(columns)))
    table = _table(columns, rows, kept)
    left_out: list[str] = []
    unbounded = console.options.update(width=_WIDTH_MAX)
    while console.is_terminal and console.measure(table, options=unbounded).maximum > console.width:
        last = max(kept, key=lambda index: columns[index].rank)
        if not columns[last].rank:
            break
        kept.remove(last)
        left_out.append(columns[last].title)
        table = _table(columns, rows, kept)
    return table, left_out


def _table(columns: Sequence[Column], rows: Sequence[Sequence[str]], kept: Sequence[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index in kept:
        column = columns[index]
        table.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[index]) for index in kept))
    return table
