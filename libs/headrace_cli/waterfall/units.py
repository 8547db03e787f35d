"""Durations and sizes as text. Pure."""

from __future__ import annotations


def format_ms(duration_ns: int) -> str:
    """Nanoseconds as milliseconds, with two decimals below 100 ms."""
    milliseconds = duration_ns / 1e6
    return f"{milliseconds:.2f} ms" if milliseconds < 100 else f"{milliseconds:,.0f} ms"


def format_bytes(count: int) -> str:
    """Bytes in binary units, at most 9 characters."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
