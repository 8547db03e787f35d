"""Shows members again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from headrace_cli.console import notice_console
from headrace_cli.json_output import print_json
from headrace_cli.members.rows import Row
from headrace_cli.members.view import workers_object, workers_view
from headrace_common.errors import HeadraceError

ReadRows = Callable[[], Awaitable[Sequence[Row]]]


async def watch_table(read: ReadRows, console: Console, interval_s: float) -> None:
    """Replaces the table on a terminal; elsewhere prints one after the other. Never returns.

    While the registry gives no answer, the last table stays, with the cause below it.
    """
    rows: Sequence[Row] = ()
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            note = Text(time.strftime("%H:%M:%S"), style="dim")
            try:
                rows = await read()
            except HeadraceError as error:
                note = Text(f"{time.strftime('%H:%M:%S')} {error.detail}", style="red")
            view = Group(workers_view(rows, console), note)
            if console.is_terminal:
                live.update(view, refresh=True)
            else:
                console.print(view)
            await asyncio.sleep(interval_s)


async def watch_objects(registry: str, read: ReadRows, interval_s: float) -> None:
    """Prints one document a line. Never returns. Failures are lines on stderr."""
    while True:
        try:
            print_json(workers_object(registry, await read()), one_line=True)
        except HeadraceError as error:
            notice_console().print(error.detail, style="red", markup=False)
        await asyncio.sleep(interval_s)
