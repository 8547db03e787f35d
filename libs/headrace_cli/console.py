"""Where the command line writes: answers to stdout, everything about them to stderr."""

from __future__ import annotations

from rich.console import Console

PIPED_WIDTH = 140


def answer_console() -> Console:
    """For what was asked for. Neither colour nor the terminal's width when it is not a terminal."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, width=PIPED_WIDTH)


def notice_console() -> Console:
    """For progress, hints and errors."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def can_draw_blocks(console: Console) -> bool:
    """Whether the terminal's encoding has more than ASCII."""
    return console.encoding.lower().startswith("utf")
