"""A trace as one HTML page without scripts, which needs no other file. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

from headrace_common.trace_view.model import UNDRAWN_STEPS, LayerWrite, Link, Step, TraceView
from headrace_common.trace_view.units import (
    format_bytes,
    format_gb_s,
    format_ms,
    format_percent,
)
from headrace_common.trace_view.verdict import verdict

_COLORS: Final = {
    "admission": "#7f56d9", "tokenize": "#9e77ed", "route": "#6172f3", "retry": "#c01048", "reserve": "#53b1fd",
    "queue": "#f79009", "batch wait": "#fdb022", "prefill": "#2e7dc1", "transfer exposed": "#d64545",
    "decode wait": "#ee46bc", "first step": "#12b76a", "network": "#0e9384", "unaccounted": "#98a2b3",
}  # fmt: skip
_SERVICES: Final = {"router": "#6172f3", "prefill": "#f79009", "decode": "#12b76a"}
_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 13px/1.5 system-ui, "DejaVu Sans", sans-serif; margin: 20px; max-width: 1100px; }
h1 { font-size: 16px; } h2 { font-size: 14px; margin-top: 24px; }
.lane { display: grid; grid-template-columns: 260px 1fr 90px; gap: 8px; align-items: center; }
.lane span { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.lane b { font-weight: normal; text-align: right; font-variant-numeric: tabular-nums; }
.track { position: relative; height: 12px; background: #8882; border-radius: 2px; overflow: hidden; }
.track i { position: absolute; top: 0; bottom: 0; min-width: 1px; border-radius: 2px; }
.sum { display: flex; height: 22px; margin: 10px 0; border-radius: 3px; overflow: hidden; }
table { border-collapse: collapse; } td, th { padding: 1px 14px 1px 0; text-align: right; }
td:first-child, th:first-child { text-align: left; } .error { color: #c01048; }
details { margin: 6px 0; }
"""


def html_page(view: TraceView) -> str:
    """The page. Texts of clients are escaped."""
    end_ns = max(1, view.ttft_ns)
    state = "" if view.complete else ", incomplete"
    about = f"trace {view.trace_id}, request {view.request_id}, {view.prompt_tokens:,} prompt tokens{state}"
    body = [
        f"<h1>{escape(verdict(view))}</h1>",
        f"<p>{escape(about)}</p>",
        "<h2>Time to first token</h2>" if view.answered else "<h2>Until the end</h2>",
        *_sum(view),
        f"<h2>Steps, from 0 to {format_ms(view.ttft_ns)}</h2>",
        *(_step(step, end_ns) for step in view.steps if _is_drawn(step, end_ns)),
        "<h2>Links</h2>" if view.links else "",
        *(_lane(link, end_ns) for link in view.links),
        *(_layers(link) for link in view.links),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(view.request_id or view.trace_id)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def _sum(view: TraceView) -> Iterable[str]:
    total_ns = max(1, view.ttft_ns)
    yield '<div class="sum">'
    for part in view.parts:
        color = _COLORS.get(part.name, "#98a2b3")
        width = 100 * part.duration_ns / total_ns
        title = escape(f"{part.name}: {format_ms(part.duration_ns)}")
        yield f'<i title="{title}" style="width:{width:.3f}%;background:{color}"></i>'
    yield "</div><table>"
    for part in view.parts:
        share = format_percent(part.duration_ns, total_ns)
        yield f"<tr><td>{escape(part.name)}</td><td>{format_ms(part.duration_ns)}</td><td>{share}</td></tr>"
    yield f"<tr><th>sum</th><th>{format_ms(view.ttft_ns)}</th><th></th></tr></table>"


def _is_drawn(step: Step, end_ns: int) -> bool:
    return step.name not in UNDRAWN_STEPS and (step.start_ns < end_ns or bool(step.error))


def _step(step: Step, end_ns: int) -> str:
    color = "#c01048" if step.error else _SERVICES.get(step.service, "#98a2b3")
    label = f"{step.worker or step.service} {step.label}"
    bar = _bar(step.start_ns, step.start_ns + step.duration_ns, end_ns, color)
    note = f' <span class="error">{escape(step.error)}</span>' if step.error else ""
    indent = f"padding-left:{10 * step.depth}px"
    return (
        f'<div class="lane"><span style="{indent}">{escape(label)}{note}</span><div class="track">{bar}</div>'
        f"<b>{format_ms(step.duration_ns)}</b></div>"
    )


def _lane(link: Link, end_ns: int) -> str:
    bars = "".join(_write_bar(write, end_ns) for write in link.writes)
    speed = f"{format_gb_s(link.gb_s)} GB/s" if link.moving_ns > 0 else "-"
    return f'<div class="lane"><span>{escape(link.name)}</span><div class="track">{bars}</div><b>{speed}</b></div>'


def _write_bar(write: LayerWrite, end_ns: int) -> str:
    title = f"layer {write.layer}, {format_bytes(write.payload_bytes)}, {write.cause}"
    return _bar(write.submitted_ns, write.landed_ns, end_ns, "#9e77ed99", title)


def _bar(start_ns: int, end_ns: int, scale_ns: int, color: str, title: str = "") -> str:
    left = 100 * max(0, min(start_ns, scale_ns)) / scale_ns
    width = 100 * max(0, min(end_ns, scale_ns)) / scale_ns - left
    return f'<i title="{escape(title)}" style="left:{left:.3f}%;width:{max(0.0, width):.3f}%;background:{color}"></i>'


def _layers(link: Link) -> str:
    rows = "".join(
        f"<tr><td>{write.layer}</td><td>{write.ready_ns / 1e6:.2f}</td><td>{write.submitted_ns / 1e6:.2f}</td>"
        f"<td>{f'{write.landed_ns / 1e6:.2f}' if write.finished else 'never'}</td>"
        f"<td>{format_bytes(write.payload_bytes)}</td><td>{escape(write.cause)} {format_ms(write.cause_ns)}</td></tr>"
        for write in link.writes
    )
    return (
        f"<details><summary>{escape(link.name)}: layers</summary><table><tr><th>layer</th><th>ready ms</th>"
        f"<th>submitted</th><th>landed</th><th>bytes</th><th>time went to</th></tr>{rows}</table></details>"
    )
