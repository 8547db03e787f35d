"""Durations and sizes as text. Pure."""

from __future__ import annotations


def format_ms(duration_ns: int) -> str:
    """Nanoseconds as milliseconds, with two decimals below 100 ms, and from 1,000 s on as seconds."""
    milliseconds = duration_ns / 1e6
    if abs(milliseconds) >= 1e6:
        return f"{milliseconds / 1e3:,.0f} s"
    return f"{milliseconds:.2f} ms" if milliseconds < 100 else f"{milliseconds:,.0f} ms"


def format_bytes(count: int) -> str:
    """Bytes in binary units, at most 9 characters."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def format_gb_s(speed: float) -> str:
    """Gigabytes a second with two digits, such as "2.1", "0.031" or "<0.001"."""
    if 0 < speed < 0.001:
        return "<0.001"
    return f"{speed:.2g}" if speed < 10 else f"{speed:.0f}"


def format_percent(part: int, whole: int) -> str:
    """The share in whole percent, or "0 %" of nothing."""
    return f"{100 * part / whole:.0f} %" if whole > 0 else "0 %"
