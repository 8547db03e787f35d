"""The drawing of a request: it fits the terminal, names the culprit, and no part is larger than its whole."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from headrace.inference.v1 import trace_pb2
from headrace_cli.waterfall import clamp_width, draw_comparison, draw_layers, draw_trace
from headrace_common.telemetry import schema
from headrace_common.telemetry.layer_stamps import LayerStamps
from headrace_common.trace_view.model import Link, TokenGap, TraceStep, TraceView
from headrace_common.trace_view.reading import read_trace

MS = 10**6
GOLDEN = Path(__file__).parent / "golden"
RECORDED = sorted(path.stem for path in GOLDEN.glob("*.json"))


def link(number: int, mb: int = 2, ms: int = 1, layers: int = 61, start_ms: int = 20) -> Link:
    each_ns = ms * MS // layers
    return Link(
        source="prefill-1",
        source_rank=number % 8,
        destination="decode-0",
        destination_rank=number // 8,
        transport="mooncake/rdma",
        strategy="direct",
        payload_bytes=mb * 10**6,
        moving_ns=ms * MS,
        writes=tuple(
            LayerStamps(
                layer,
                *(start_ms * MS + layer * each_ns,) * 3,
                start_ms * MS + (layer + 1) * each_ns,
                mb * 10**6 // layers,
                "move",
                each_ns,
            )
            for layer in range(layers)
        ),
    )


def view(parts: dict[str, float], **changes: object) -> TraceView:
    times = {name: int(ms * MS) for name, ms in parts.items()}
    ttft_ns = sum(times.values())
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


class RandomViews:
    """Traces as no deployment would make them, so that no drawing relies on sense."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def name(self) -> str:
        return "".join(self._random.choices("aZ 9-/\u00e9\u2603", k=self._random.randrange(60)))

    def time(self) -> int:
        return self._random.choice((-MS, 0, 1, 5 * MS, int(10 ** self._random.uniform(0, 13.3))))

    def write(self) -> LayerStamps:
        times = (self.time(), self.time(), self.time(), self.time())
        cause: Any = self._random.choice(("", "move", "gather", "unfinished", "compute"))
        layer = self._random.randrange(500)
        finished = self._random.random() < 0.8
        return LayerStamps(layer, *times, self.time(), cause, self.time(), finished)

    def link(self) -> Link:
        ranks = self._random.randrange(99), self._random.randrange(99)
        return Link(
            source=self.name(),
            source_rank=ranks[0],
            destination=self.name(),
            destination_rank=ranks[1],
            transport=self.name(),
            strategy=self.name(),
            payload_bytes=abs(self.time()),
            moving_ns=abs(self.time()),
            runs=abs(self.time()),
            expected_ns=abs(self.time()),
            bandwidth_share=self._random.random(),
            error=self.name() if self._random.random() < 0.2 else "",
            writes=tuple(self.write() for _ in range(self._random.randrange(9))),
        )

    def step(self) -> TraceStep:
        kinds = (schema.SPAN_PREFILL, schema.SPAN_ATTEMPT, schema.SPAN_DECODE, "x")
        return TraceStep(
            depth=self._random.randrange(40),
            name=self._random.choice(kinds),
            label=self.name(),
            service=self._random.choice(("router", "prefill", "decode", "")),
            worker=self.name(),
            start_ns=self.time(),
            duration_ns=abs(self.time()),
            error=self.name() if self._random.random() < 0.3 else "",
        )

    def parts(self) -> dict[str, int]:
        known = ("queue", "prefill", "transfer exposed", "retry", "network", "decode wait")
        return {
            self._random.choice((*known, self.name())): abs(self.time())
            for _ in range(self._random.randrange(9))
        }

    def view(self) -> TraceView:
        parts = self.parts()
        return TraceView(
            trace_id="0" * 32,
            request_id=self.name(),
            start_unix_ns=0,
            complete=self._random.random() < 0.5,
            ttft_ns=sum(parts.values()),
            total_ns=abs(self.time()),
            parts=parts,
            links=tuple(self.link() for _ in range(self._random.randrange(12))),
            steps=tuple(self.step() for _ in range(self._random.randrange(9))),
            answered=self._random.random() < 0.7,
            second_parts=self.parts(),
            hidden_ns=abs(self.time()),
            clock_error_ns=abs(self.time()),
            prompt_tokens=self._random.randrange(10**6),
            error=self.name() if self._random.random() < 0.3 else "",
        )


@pytest.mark.parametrize("first_seed", range(0, 400, 100))
def test_every_line_fits_whatever_the_trace_says(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 100):
        one, width = RandomViews(seed).view(), seed * 7 % 160
        lines = draw_trace(one, width=width)
        lines += draw_layers(one, width=width)
        lines += draw_comparison(one, one, width=width)
        for line in lines:
            assert len(line.plain) <= clamp_width(width), (seed, line.plain)
            assert "\n" not in line.plain


def test_an_attempt_after_the_first_token_is_drawn() -> None:
    def step(name: str, label: str, start_ms: int, ms: int, error: str = "") -> TraceStep:
        return TraceStep(1, name, label, "router", "", start_ms * MS, ms * MS, error)

    steps = (
        step(schema.SPAN_ATTEMPT, "attempt 1", 0, 400, "worker gone"),
        step(schema.SPAN_GAP, "no token: failure", 300, 500),
        step(schema.SPAN_ATTEMPT, "attempt 2", 410, 590),
    )
    gaps = (TokenGap(300 * MS, 500 * MS, "failure"),)
    one = view({"prefill": 100.0}, steps=steps, gaps=gaps, total_ns=1_000 * MS)
    shown = "\n".join(line.plain.rstrip() for line in draw_trace(one, width=80))
    assert "50 % without a token: 500 ms after attempt 1 failed: worker gone" in shown
    *_, axis, first, reason, gap, second = shown.splitlines()
    assert axis.split() == ["ms", "0", "500", "1,000"]
    assert (first.count("█"), gap.count("█"), second.count("█")) == (15, 19, 22)
    assert reason.strip() == "! worker gone"


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_traces_are_drawn_as_before(name: str) -> None:
    trace = ParseDict(json.loads((GOLDEN / f"{name}.json").read_text()), trace_pb2.Trace())
    lines = draw_trace(read_trace(trace), width=80)
    shown = "\n".join(line.plain.rstrip() for line in lines) + "\n"
    assert shown == (GOLDEN / f"{name}.txt").read_text()
