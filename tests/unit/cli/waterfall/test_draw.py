"""The drawing of a request: it fits the terminal, names the culprit, and no part is larger than its whole."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from google.protobuf.json_format import ParseDict
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.inference.v1 import trace_pb2
from headrace_cli.commands.trace import chosen_names
from headrace_cli.waterfall.canvas import BLOCKS, Scale, shade_line, spread
from headrace_cli.waterfall.compare import conclusion, draw_comparison
from headrace_cli.waterfall.draw import LINKS_DRAWN, clamp_width, draw_layers, draw_trace
from headrace_common.errors import ConfigError
from headrace_common.telemetry import schema
from headrace_common.trace_view.model import LayerWrite, Link, PartTime, Step, TraceView
from headrace_common.trace_view.reading import read_trace

MS = 10**6
GOLDEN = Path(__file__).parent / "golden"
RECORDED = sorted(path.stem for path in GOLDEN.glob("*.json"))


def link(number: int, mb: int = 2, ms: int = 1, layers: int = 61, start_ms: int = 20) -> Link:
    each_ns = ms * MS // layers
    return Link(
        *("prefill-1", number % 8, "decode-0", number // 8, "mooncake/rdma", "direct"),
        payload_bytes=mb * 10**6,
        moving_ns=ms * MS,
        writes=tuple(
            LayerWrite(
                layer,
                start_ms * MS + layer * each_ns,
                start_ms * MS + layer * each_ns,
                start_ms * MS + layer * each_ns,
                start_ms * MS + (layer + 1) * each_ns,
                mb * 10**6 // layers,
                "move",
                each_ns,
            )
            for layer in range(layers)
        ),
    )


def view(parts: dict[str, float], **changes: object) -> TraceView:
    times = tuple(PartTime(name, int(ms * MS)) for name, ms in parts.items())
    ttft_ns = sum(part.duration_ns for part in times)
    fields = {
        "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
        "request_id": "ask-1",
        "start_unix_ns": 0,
        "complete": True,
        "ttft_ns": ttft_ns,
        "total_ns": ttft_ns,
        "parts": times,
        "links": (),
        "steps": (),
    }
    return TraceView(**{**fields, **changes})  # type: ignore[arg-type]


def text_of(one: TraceView, width: int = 80, ascii_only: bool = True) -> str:
    return "\n".join(line.plain for line in draw_trace(one, width=width, ascii_only=ascii_only))


def numbers_of(line: str) -> list[float]:
    return [float(text.replace(",", "")) for text in re.findall(r"([\d,.]+) ms", line)]


def test_the_first_screen_has_the_sum_and_its_culprit() -> None:
    links = (*(link(n, mb=2) for n in range(7)), link(7, mb=2, ms=7))
    shown = text_of(view({"queue": 20, "prefill": 30, "transfer exposed": 100}, links=links))
    lines = shown.splitlines()
    assert lines[0].startswith("trace 4bf92f3577b34da6a3ce929d0e0e4736")
    assert " ".join(lines[1:3]).startswith(
        "67 % transfer exposed: link prefill-1/r7 -> decode-0/r0 moved at 0.29 GB/s, median is 2"
    )
    sum_at = next(number for number, line in enumerate(lines) if "time to first token" in line)
    assert sum_at < 24
    assert numbers_of(lines[sum_at]) == [150.0]


def test_a_long_answer_does_not_squeeze_the_time_to_first_token() -> None:
    steps = (
        Step(1, schema.SPAN_QUEUE, "queue", "router", "", 10 * MS, 40 * MS),
        Step(1, schema.SPAN_STREAM, "stream", "router", "", 100 * MS, 10_000 * MS),
        Step(1, schema.SPAN_DECODE, "decode", "decode", "decode-0", 5 * MS, 10_095 * MS),
    )
    shown = text_of(view({"queue": 40, "unaccounted": 60}, steps=steps, total_ns=10_100 * MS))
    queue = [line for line in shown.splitlines() if " queue" in line][-1]
    assert queue.count("#") in (14, 15)
    decode = next(line for line in shown.splitlines() if line.startswith("decode-0"))
    assert decode[32:].rstrip().split()[0].endswith(">")
    assert "stream" not in shown
    assert "after the first token: 10,000 ms" in shown


def test_many_links_share_the_screen_and_every_layer_has_a_line_on_request() -> None:
    one = view({"transfer exposed": 100}, links=tuple(link(n) for n in range(64)))
    shown = text_of(one)
    assert len(shown.splitlines()) < 45
    assert shown.count("GB/s\n") >= LINKS_DRAWN
    assert "and 56 more links" in shown
    assert "its layers 0-60" in shown
    layers = [line.plain for line in draw_layers(one, width=80)]
    assert sum(bool(re.match(r" +\d+ +\d", line)) for line in layers) == 64 * 61


names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=50)
times = st.integers(-(10**6), 10**13)
writes = st.builds(
    LayerWrite,
    *(st.integers(0, 500), times, times, times, times, st.integers(0, 2**40)),
    *(st.sampled_from(["", "move", "gather", "unfinished", "compute"]), times, st.booleans()),
)
links = st.builds(
    Link,
    *(names, st.integers(0, 99), names, st.integers(0, 99), names, names, st.integers(0, 2**40)),
    moving_ns=st.integers(0, 10**12),
    bandwidth_share=st.floats(0, 2),
    error=names,
    writes=st.lists(writes, max_size=8).map(tuple),
)
steps = st.builds(
    Step,
    *(st.integers(0, 40), st.sampled_from([schema.SPAN_PREFILL, schema.SPAN_ATTEMPT, "x"])),
    *(names, st.sampled_from(["router", "prefill", "decode", ""]), names, times),
    *(st.integers(0, 10**13), names),
)
parts = st.lists(
    st.builds(
        PartTime,
        st.sampled_from(["queue", "prefill", "transfer exposed", "retry", "network", "?"]) | names,
        st.integers(0, 10**12),
    ),
    max_size=14,
)
views = st.builds(
    lambda parts, **fields: TraceView(
        parts=tuple(parts), ttft_ns=sum(part.duration_ns for part in parts), **fields
    ),
    parts,
    trace_id=st.just("0" * 32),
    request_id=names,
    start_unix_ns=st.just(0),
    complete=st.booleans(),
    total_ns=st.integers(0, 10**13),
    links=st.lists(links, max_size=12).map(tuple),
    steps=st.lists(steps, max_size=8).map(tuple),
    answered=st.booleans(),
    second_parts=parts.map(tuple),
    hidden_ns=st.integers(0, 10**9),
    error=names,
)


@settings(max_examples=60)
@given(one=views, width=st.integers(0, 200), ascii_only=st.booleans())
def test_every_line_fits_whatever_the_trace_says(
    one: TraceView, width: int, ascii_only: bool
) -> None:
    lines = draw_trace(one, width=width, ascii_only=ascii_only)
    lines += draw_layers(one, width=width, ascii_only=ascii_only)
    lines += draw_comparison(one, one, width=width, ascii_only=ascii_only)
    for line in lines:
        assert len(line.plain) <= clamp_width(width), line.plain
        assert "\n" not in line.plain


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=13))
def test_no_line_of_the_sum_is_larger_than_the_sum(durations: list[int]) -> None:
    one = view({f"part {n}": duration / MS for n, duration in enumerate(durations)})
    lines = text_of(one).splitlines()
    total = next((numbers_of(line)[0] for line in lines if "time to first token" in line), 0.0)
    for line in lines[1:]:
        if line.startswith("  part"):
            assert numbers_of(line)[0] <= total


def test_a_comparison_names_the_part_that_made_the_difference() -> None:
    fast = view({"queue": 10, "prefill": 30})
    slow = view({"queue": 500, "prefill": 20})
    assert conclusion(fast, slow) == "B is 480 ms slower: queue 490 ms"
    assert conclusion(slow, fast) == "B is 480 ms faster: queue 490 ms"
    assert conclusion(fast, fast) == "both took the same time"
    rows = [line.plain for line in draw_comparison(fast, slow, width=80)]
    assert rows[-3].split() == ["queue", "10.00", "ms", "500", "ms", "+490", "ms"]


def test_bars_and_shades() -> None:
    scale = Scale(100, 10)
    assert scale.bar(0, 50, BLOCKS) == "█" * 5 + " " * 5
    assert scale.bar(90, 91, BLOCKS) == " " * 9 + "▎"
    assert scale.bar(50, 300, BLOCKS) == " " * 5 + "████▸"
    assert spread([(0, 20, 10.0)], scale)[:3] == [5.0, 5.0, 0.0]
    assert shade_line([0, 1, 2, 4], 4, BLOCKS) == " ▒▓█"
    assert Scale(123 * MS, 48).axis().split() == ["0", "50", "100", "123"]


def test_the_words_choose_one_trace_or_two() -> None:
    assert chosen_names(["last"]) == ["last"]
    assert chosen_names(["compare", "a", "b"]) == ["a", "b"]
    for words in (["a", "b"], ["compare"], ["compare", "a"], ["compare", "a", "b", "c"]):
        with pytest.raises(ConfigError, match="name one trace, or two after compare"):
            chosen_names(words)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_traces_are_drawn_as_before(name: str) -> None:
    trace = ParseDict(json.loads((GOLDEN / f"{name}.json").read_text()), trace_pb2.Trace())
    lines = draw_trace(read_trace(trace), width=80)
    shown = "\n".join(line.plain.rstrip() for line in lines) + "\n"
    assert shown == (GOLDEN / f"{name}.txt").read_text()
