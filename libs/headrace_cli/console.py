"""Consoles: results go to stdout, everything else to stderr."""

from __future__ import annotations

from rich.console import Console

# Wide enough for rows with the longest names. Lines are not filled up to it.
PIPED_WIDTH = 1_000


def answer_console() -> Console:
    """The console for results. Without a terminal it has no colour and a fixed width."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, width=PIPED_WIDTH)


def notice_console() -> Console:
    """The console for progress, hints and errors."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def can_draw_blocks(console: Console) -> bool:
    """Whether the encoding of the console has block characters."""
    return console.encoding.lower().startswith("utf")
