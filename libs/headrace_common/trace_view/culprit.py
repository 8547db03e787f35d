"""Finds what made a request slow: the part or the gap that exceeds what is usual most. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from headrace_common.trace_view.model import TRANSFER_EXPOSED, Link, TokenGap, TraceView

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
    for parts, usual, second in sums:
        whole_ns = sum(parts.values())
        for part, time_ns in parts.items():
            usual_ns = usual.get(part, 0) if usual else None
            known_ns = time_ns - usual_ns if usual_ns is not None else 0
            excess_ns = max(known_ns, _evident_ns(view, part, parts))
            until_token_ns = whole_ns + second * view.ttft_ns
            least_ns = max(_EXCESS_OF_PART * time_ns, _EXCESS_OF_WHOLE * until_token_ns)
            if excess_ns > max(least_ns, _doubt_ns(view, part)):
                yield excess_ns, Culprit(part, time_ns, whole_ns, usual_ns, second)
    for gap in view.gaps:
        least_ns = 0 if gap.cause == "failure" else _EXCESS_OF_WHOLE * view.total_ns
        if gap.duration_ns > max(_GAP_NS_MIN, least_ns):
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
