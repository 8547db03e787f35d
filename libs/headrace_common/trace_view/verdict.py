"""Names what most of a request's time to first token went to, in one sentence. Pure."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Final

from headrace_common.telemetry import schema
from headrace_common.trace_view.model import Link, TraceView


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


SLOW_LINK: Final = 0.5
"""A link below this share of the median speed is called slow."""
SLOW_LAYER: Final = 3.0
"""A layer that took this many times the median is called slow, if it also is a large share of the computation."""
_SLOW_LAYER_SHARE: Final = 0.2
_WAITS: Final = {
    "compute": "was ready late: the link was idle",
    "lease": "waited for decode's reservation",
    "window": "waited for room in the write window",
    "queue": "waited for the sender's thread",
    "staging_slot": "waited for a staging slot",
    "gather": "was copied to staging memory",
    "unfinished": "did not land",
}


def verdict(view: TraceView) -> str:
    """Such as "68 % transfer exposed: link prefill-1/r2 -> decode-0/r1 moved at 0.3 GB/s, median is 2.1"."""
    failed = f"failed: {view.error}; " if view.error else ""
    part = view.largest_part
    if part is None or view.ttft_ns <= 0:
        return f"{failed}no times have arrived"
    part_ns = view.parts[part]
    share = format_percent(part_ns, view.ttft_ns)
    return f"{failed}{share} {part}: {_detail(view, part, part_ns)}"


def _detail(view: TraceView, part: str, part_ns: int) -> str:
    duration = format_ms(part_ns)
    match part:
        case "transfer exposed":
            return _transfer_detail(view, duration)
        case "prefill":
            return _prefill_detail(view, part_ns)
        case "retry":
            errors = [step.error for step in view.steps if step.name == schema.SPAN_ATTEMPT]
            reason = next((error for error in errors if error), "no reason has arrived")
            return f"{duration} of attempts that failed: {reason}"
        case "tokenize":
            return f"{duration} for the template and {view.prompt_tokens:,} tokens"
        case "decode wait":
            return _decode_wait_detail(view, part_ns)
        case "batch wait":
            worker = _worker(view, schema.SPAN_PREFILL, "the prefill worker")
            return f"the task waited {duration} on {worker} for a forward pass"
        case "first step":
            worker = _worker(view, schema.SPAN_DECODE, "the decode worker")
            return f"the step on {worker} took {duration}"
    return _WORDS.get(part, "{}").format(duration)


_WORDS: Final = {
    "admission": "{} until the router had a place and decode workers had a slot",
    "route": "{} to choose the workers",
    "reserve": "{} until the decode worker had reserved blocks",
    "queue": "{} until a prefill worker had room",
    "network": "{} of messages between the processes and to the client",
    "unaccounted": "no step explains {}",
}


def _decode_wait_detail(view: TraceView, part_ns: int) -> str:
    """The router waits for a slot before it chooses workers, and a decode worker after the KV cache has arrived."""
    duration = format_ms(part_ns)
    route_ns = min(
        (step.start_ns for step in view.steps if step.name == schema.SPAN_ROUTE), default=0
    )
    if 2 * route_ns > part_ns:
        return f"the decode workers had no free slot for {duration}"
    worker = _worker(view, schema.SPAN_DECODE, "the decode worker")
    return f"the request was ready, and {worker} took {duration} to start a step with it"


def _transfer_detail(view: TraceView, duration: str) -> str:
    link = view.last_link
    if link is None:
        return f"{duration} from the end of computing to the arrival of the KV cache"
    if len(view.links) > 1 and 0 < link.gb_s < SLOW_LINK * view.median_gb_s:
        middle = format_gb_s(view.median_gb_s)
        return f"link {link.name} moved at {format_gb_s(link.gb_s)} GB/s, median is {middle}"
    write = link.last_write
    if write is not None and write.cause in _WAITS:
        waited = f"for {format_ms(write.cause_ns)}"
        return f"layer {write.layer} of link {link.name} {_WAITS[write.cause]} {waited}"
    return f"link {link.name} moved {_moved(link)}"


def _moved(link: Link) -> str:
    text = format_bytes(link.payload_bytes)
    if link.moving_ns > 0:
        text += f" in {format_ms(link.moving_ns)}, {format_gb_s(link.gb_s)} GB/s"
    if link.bandwidth_share > 0:
        text += f", {100 * link.bandwidth_share:.0f} % of its bandwidth"
    return text


def _prefill_detail(view: TraceView, part_ns: int) -> str:
    remote = any(step.name == schema.SPAN_PREFILL for step in view.steps)
    name = schema.SPAN_PREFILL if remote else schema.SPAN_DECODE
    worker = _worker(view, name, "the worker")
    slow = _slow_layer(view, part_ns)
    if slow is not None:
        layer, took_ns, middle_ns = slow
        return (
            f"layer {layer} took {format_ms(took_ns)} on {worker}, median is {format_ms(middle_ns)}"
        )
    return f"{worker} computed for {format_ms(part_ns)}"


def _slow_layer(view: TraceView, part_ns: int) -> tuple[int, int, int] | None:
    """The layer that took longest, its time and the median, if it took very long. Read from when layers were ready."""
    link = view.last_link
    if link is None:
        return None
    writes = sorted(link.writes, key=lambda write: write.ready_ns)
    gaps = [(later.ready_ns - earlier.ready_ns, later.layer) for earlier, later in pairwise(writes)]
    if len(gaps) < 2:
        return None
    took_ns, layer = max(gaps)
    middle_ns = round(median(gap for gap, _ in gaps))
    slow = took_ns > SLOW_LAYER * middle_ns and took_ns > _SLOW_LAYER_SHARE * part_ns
    return (layer, took_ns, middle_ns) if slow else None


def _worker(view: TraceView, name: str, otherwise: str) -> str:
    """The worker of the last attempt's step of this name."""
    workers = [step.worker for step in view.steps if step.name == name and step.worker]
    return workers[-1] if workers else otherwise
