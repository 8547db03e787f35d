"""Names what made a request slow, or what most of its time went to, in one sentence. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Final

from headrace_common.telemetry import schema
from headrace_common.telemetry.layer_stamps import LayerStamps
from headrace_common.trace_view.model import TRANSFER_EXPOSED, Link, TokenGap, TraceStep, TraceView


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
    ratio = culprit.time_ns / usual_ns
    times = f"{ratio:.2g}" if ratio < 100 else f"{ratio:,.0f}"
    return f", {times} times its usual {format_ms(usual_ns)}"


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
            fetches = 2 * _spent_ns(view, schema.SPAN_IMAGE_FETCH) > part_ns
            what = f"for the template and {view.prompt_tokens:,} tokens"
            return f"{duration}, most of it to fetch images" if fetches else f"{duration} {what}"
        case "decode wait":
            return _decode_wait_detail(view, part_ns)
        case "batch wait":
            worker = _worker(view, schema.SPAN_PREFILL, "the prefill worker")
            note = _note(view, schema.SPAN_PREFILL)
            return f"the task waited {duration} on {worker} for a forward pass{note}"
        case "first step":
            worker = _worker(view, schema.SPAN_DECODE, "the decode worker")
            return f"the step on {worker} took {duration}"
    note = _note(view, schema.SPAN_QUEUE, "; prompts meanwhile: ") if part == "queue" else ""
    return _WORDS.get(part, "{}").format(duration) + note


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
    paused_ns = _spent_ns(view, schema.SPAN_BACK_OFF)
    if 2 * paused_ns > part_ns:
        return f"back-off for {format_ms(paused_ns)} after an attempt that failed: {reason}"
    return f"{format_ms(part_ns)} of attempts that failed: {reason}"


def _failed_attempts(view: TraceView) -> list[TraceStep]:
    return [step for step in view.steps if step.name == schema.SPAN_ATTEMPT and step.error]


def _decode_wait_detail(view: TraceView, part_ns: int) -> str:
    """The router waits for a slot before it chooses workers, and a decode worker after the KV cache has arrived."""
    duration = format_ms(part_ns)
    if 2 * _spent_ns(view, schema.SPAN_SLOT_WAIT) > part_ns:
        return f"the decode workers had no free slot for {duration}"
    worker = _worker(view, schema.SPAN_DECODE, "the decode worker")
    note = _note(view, schema.SPAN_DECODE)
    return f"the request was ready, and {worker} took {duration} to start a step with it{note}"


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


def _spent_ns(view: TraceView, name: str) -> int:
    return sum(step.duration_ns for step in view.steps if step.name == name)


def _note(view: TraceView, name: str, before: str = ", with ") -> str:
    """That of the last step of this name, after `before`."""
    notes = [step.note for step in view.steps if step.name == name]
    return before + notes[-1] if notes and notes[-1] else ""


def _worker(view: TraceView, name: str, otherwise: str) -> str:
    """The worker of the last attempt's step of this name."""
    workers = [step.worker for step in view.steps if step.name == name and step.worker]
    return workers[-1] if workers else otherwise


SLOW_LINK: Final = 0.5
"""A link below this share of the median speed is called slow."""
SLOW_LAYER: Final = 3.0
"""A layer that took this many times the median is called slow, if it also is a large share of the computation."""
_SLOW_LAYER_SHARE: Final = 0.2
# Less than this share of a part, or of the time to the token, varies by itself.
_EXCESS_OF_PART: Final = 1 / 3
_EXCESS_OF_WHOLE: Final = 0.15
_GAP_NS_MIN: Final = 100_000_000
_OF_TWO_CLOCKS: Final = frozenset(("network", TRANSFER_EXPOSED, "unaccounted"))


@dataclass(frozen=True, slots=True)
class Culprit:
    """One part of `whole_ns`, or a gap between tokens. `usual_ns` is None while that is not known.

    `second`: the part is one of the time from the first token to the second.
    """

    part: str
    time_ns: int
    whole_ns: int
    usual_ns: int | None = None
    second: bool = False
    gap: TokenGap | None = None


def culprit_of(view: TraceView) -> Culprit | None:
    """The one that exceeds the usual most. None where nothing does by much."""
    return max(_candidates(view), key=lambda pair: pair[0], default=(0, None))[1]


def largest_part(view: TraceView) -> Culprit:
    """The part that took longest, if the clocks' error does not explain it."""
    certain = {part: ns for part, ns in view.parts.items() if ns > _doubt_ns(view, part)}
    part = max(certain or view.parts, key=view.parts.__getitem__)
    return Culprit(part, view.parts[part], view.ttft_ns)


def _doubt_ns(view: TraceView, part: str) -> int:
    """How much of a part the error of the clocks may be."""
    return view.clock_error_ns if part in _OF_TWO_CLOCKS else 0


def _candidates(view: TraceView) -> Iterator[tuple[float, Culprit]]:
    """Each with the nanoseconds by which it exceeds the usual."""
    sums = ((view.parts, view.usual, False), (view.second_parts, view.second_usual, True))
    explained_ns = 0
    for parts, usual, second in sums:
        whole_ns = sum(parts.values())
        for part, time_ns in parts.items():
            usual_ns = usual.get(part, 0) if usual else None
            known_ns = time_ns - usual_ns if usual_ns is not None else 0
            excess_ns = max(known_ns, _evident_ns(view, part, parts))
            until_token_ns = whole_ns + second * view.ttft_ns
            least_ns = max(_EXCESS_OF_PART * time_ns, _EXCESS_OF_WHOLE * until_token_ns)
            if excess_ns > max(least_ns, _doubt_ns(view, part)):
                explained_ns = second * until_token_ns
                yield excess_ns, Culprit(part, time_ns, whole_ns, usual_ns, second)
    for gap in view.gaps:
        least_ns = 0 if gap.cause == "failure" else _EXCESS_OF_WHOLE * view.total_ns
        # The time to the second token has a part that says more.
        explained = gap.start_ns < explained_ns and gap.cause not in ("failure", "client")
        if gap.duration_ns > max(_GAP_NS_MIN, least_ns) and not explained:
            culprit = Culprit("without a token", gap.duration_ns, view.total_ns, gap=gap)
            yield gap.duration_ns, culprit


def _evident_ns(view: TraceView, part: str, parts: Mapping[str, int]) -> float:
    """What this request alone shows to be lost in a part."""
    match part:
        case "retry":
            return parts[part]
        case "transfer exposed":
            link = slow_link(view)
            return parts[part] * (1 - link.gb_s / view.median_gb_s) if link is not None else 0
        case "prefill":
            slow = slow_layer(view, parts[part])
            return slow[1] - slow[2] if slow is not None else 0
    return 0


def slow_link(view: TraceView) -> Link | None:
    """The link that ended last, if it was far slower than the others."""
    link = view.last_link
    slow = link is not None and 0 < link.gb_s < SLOW_LINK * view.median_gb_s
    return link if slow else None


def slow_layer(view: TraceView, part_ns: int) -> tuple[int, int, int] | None:
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
