"""Shows the progress of starting processes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from headrace_cli.up.supervisor import Child, log_tail

REFRESH_PER_S = 4
NAME_WIDTH = 12
OTHER_COLUMNS_WIDTH = 32


class StartProgress:
    """On a terminal, a live line for each process. Elsewhere, one line when a process becomes ready."""

    def __init__(self, console: Console, children: Sequence[Child]) -> None:
        self._console = console
        self._children = children
        self._printed: set[str] = set()
        self._live = (
            Live(console=console, refresh_per_second=REFRESH_PER_S, get_renderable=self._table)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> StartProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.print_ready()
        if self._live is not None:
            self._live.stop()

    def print_ready(self) -> None:
        """Prints a line for each process that has become ready since the last call.

        On a terminal it does nothing, because the live lines refresh themselves.
        """
        if self._live is not None:
            return
        for child in self._children:
            if child.endpoint and child.spec.name not in self._printed:
                self._printed.add(child.spec.name)
                self._console.print(
                    f"{child.spec.name:<{NAME_WIDTH}} ready on {child.endpoint} "
                    f"after {_elapsed_s(child):.1f} s"
                )

    def _table(self) -> Table:
        room = max(0, self._console.width - OTHER_COLUMNS_WIDTH)
        table = Table.grid(padding=(0, 1))
        table.add_column(width=NAME_WIDTH, no_wrap=True)
        table.add_column(width=8, no_wrap=True)
        table.add_column(width=7, justify="right", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis", style="dim")
        for child in self._children:
            ready = bool(child.endpoint)
            note = child.endpoint if ready else _last_line(child, room)
            table.add_row(
                child.spec.name,
                "[green]ready[/]" if ready else "[yellow]starting[/]",
                f"{_elapsed_s(child):.1f} s",
                note,
            )
        return table


def _elapsed_s(child: Child) -> float:
    return (child.ready_s or time.monotonic()) - child.started_s


def _last_line(child: Child, width: int) -> str:
    lines = log_tail(child.spec.log_file, 1)
    return lines[0][:width].replace("[", "\\[") if lines else ""
