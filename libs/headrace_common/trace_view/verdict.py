"""Names what made a request slow, or what most of its time went to, in one sentence. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from headrace_common.telemetry import schema
from headrace_common.telemetry.layer_stamps import LayerStamps
from headrace_common.trace_view.culprit import (
    Culprit,
    culprit_of,
    largest_part,
    slow_layer,
    slow_link,
)
from headrace_common.trace_view.model import Link, TokenGap, TraceStep, TraceView


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


_USUAL_NS_MIN: Final = 100_000
_WAITS: Final = {
    "compute": "was ready late: the link was idle",
    "window": "waited for room in the write window",
    "queue": "waited for the sender's thread",
    "staging_slot": "waited for a staging slot",
    "gather": "was copied to staging memory",
    "unfinished": "did not land",
}


def verdict(view: TraceView) -> str:
    """Such as "68 % transfer exposed: link prefill-1/r2 -> decode-0/r1 moved at 0.3 GB/s, median is 2.1"."""
    attempted = any(step.name == schema.SPAN_ATTEMPT for step in view.steps)
    if view.error_reason not in ("", "DEADLINE_EXCEEDED") and not attempted:
        return f"refused after {format_ms(view.total_ns)} by {view.error_reason}: {view.error}"
    failed = f"failed: {view.error}; " if view.error else ""
    culprit = culprit_of(view)
    if culprit is None:
        if view.ttft_ns <= 0:
            return f"{failed}no times have arrived"
        failed += "nothing unusual, " if view.usual and not view.error else ""
        culprit = largest_part(view)
    failed += "second token: " if culprit.second else ""
    share = format_percent(culprit.time_ns, culprit.whole_ns)
    gap = culprit.gap
    detail = _gap_detail(view, gap) if gap else _detail(view, culprit.part, culprit.time_ns)
    return f"{failed}{share} {culprit.part}{_compared(culprit)}: {detail}"


def _compared(culprit: Culprit) -> str:
    """Such as ", 26 times its usual 3.30 ms"."""
    usual_ns = culprit.usual_ns
    if usual_ns is None or culprit.time_ns < 1.5 * usual_ns:
        return ""
    if usual_ns < _USUAL_NS_MIN:
        return ", usually none"
    return f", {culprit.time_ns / usual_ns:.2g} times its usual {format_ms(usual_ns)}"


def _gap_detail(view: TraceView, gap: TokenGap) -> str:
    duration, end_ns = format_ms(gap.duration_ns), gap.start_ns + gap.duration_ns
    if gap.cause == "client":
        return f"the client did not read for {duration}"
    before = replace(view, steps=tuple(one for one in view.steps if one.start_ns < end_ns))
    if gap.cause == "failure":
        failed = _failed_attempts(before)
        reason = f"{failed[-1].label} failed: {failed[-1].error}" if failed else "a failure"
        return f"{duration} after {reason}"
    worker = _worker(before, schema.SPAN_DECODE, "the decode worker")
    return f"no token came from {worker} for {duration}: {gap.cause}".removesuffix(": ")


def _detail(view: TraceView, part: str, part_ns: int) -> str:
    duration = format_ms(part_ns)
    match part:
        case "transfer exposed":
            return _transfer_detail(view, duration)
        case "prefill":
            return _prefill_detail(view, part_ns)
        case "retry":
            return _retry_detail(view, part_ns)
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


def _retry_detail(view: TraceView, part_ns: int) -> str:
    """Whether attempts took the time, or the pauses after them."""
    failed = _failed_attempts(view)
    reason = failed[0].error if failed else "no reason has arrived"
    paused = [step.duration_ns for step in view.steps if step.name == schema.SPAN_BACK_OFF]
    if 2 * sum(paused) > part_ns:
        return f"back-off for {format_ms(sum(paused))} after an attempt that failed: {reason}"
    return f"{format_ms(part_ns)} of attempts that failed: {reason}"


def _failed_attempts(view: TraceView) -> list[TraceStep]:
    return [step for step in view.steps if step.name == schema.SPAN_ATTEMPT and step.error]


def _decode_wait_detail(view: TraceView, part_ns: int) -> str:
    """The router waits for a slot before it chooses workers, and a decode worker after the KV cache has arrived."""
    duration = format_ms(part_ns)
    routes_ns = [step.start_ns for step in view.steps if step.name == schema.SPAN_ROUTE]
    if 2 * min(routes_ns, default=0) > part_ns:
        return f"the decode workers had no free slot for {duration}"
    worker = _worker(view, schema.SPAN_DECODE, "the decode worker")
    return f"the request was ready, and {worker} took {duration} to start a step with it"


def _transfer_detail(view: TraceView, duration: str) -> str:
    link = view.last_link
    if link is None:
        return f"{duration} from the end of computing to the arrival of the KV cache"
    if slow_link(view) is not None:
        middle = format_gb_s(view.median_gb_s)
        return f"link {link.name} moved at {format_gb_s(link.gb_s)} GB/s, median is {middle}"
    write = link.last_write
    if write is not None and write.cause in _WAITS:
        waited = f"for {format_ms(write.cause_ns)}"
        return f"layer {write.layer} of link {link.name} {_WAITS[write.cause]} {waited}"
    if write is not None and write.cause == "lease":
        return _lease_detail(view, link, write)
    return f"link {link.name} moved {_moved(link)}"


def _lease_detail(view: TraceView, link: Link, write: LayerStamps) -> str:
    """Whether the write waited for decode's blocks, or for the first messages between the workers after that."""
    reserved = [step for step in view.steps if step.name == schema.SPAN_DECODE_RESERVE]
    end_ns = max((step.start_ns + step.duration_ns for step in reserved), default=0)
    reserving_ns = min(write.cause_ns, max(0, end_ns - write.ready_ns))
    handshake_ns = write.cause_ns - reserving_ns
    if handshake_ns >= reserving_ns:
        return f"link {link.name} waited {format_ms(handshake_ns)} for the handshake with {link.destination}"
    return f"link {link.name} waited {format_ms(reserving_ns)} for decode's reservation"


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
    slow = slow_layer(view, part_ns)
    if slow is not None:
        layer, took_ns, middle_ns = slow
        return (
            f"layer {layer} took {format_ms(took_ns)} on {worker}, median is {format_ms(middle_ns)}"
        )
    return f"{worker} computed for {format_ms(part_ns)}"


def _worker(view: TraceView, name: str, otherwise: str) -> str:
    """The worker of the last attempt's step of this name."""
    workers = [step.worker for step in view.steps if step.name == name and step.worker]
    return workers[-1] if workers else otherwise
