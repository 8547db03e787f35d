"""Measurements, statistics and their report."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from headrace_cli.load.bench import BenchOptions, run_bench
from headrace_cli.load.http_target import request_body
from headrace_cli.load.report import as_json, draw, lines, times_table
from headrace_cli.load.run import Clock, run_load
from headrace_cli.load.sample import RequestFailure, RequestSample
from headrace_cli.load.summary import meets, parse_objectives, percentile, summarize
from headrace_cli.load.workload import PlannedRequest
from headrace_common.errors import ConfigError

OPTIONS = BenchOptions(
    router="127.0.0.1:1",
    url="",
    model="",
    requests=2,
    concurrency=1,
    rate=0,
    burstiness=1,
    dataset=None,
    trace_speed=1,
    input_tokens=4,
    output_tokens=4,
    range_ratio=0,
    prefix_tokens=0,
    prefixes=1,
    warmup=0,
    goodput=(),
    seed=0,
    timeout=1,
    output=None,
    picture=None,
)


def sample(start_s: float, *arrivals_s: float, tokens: int = 0, failure: str = "") -> RequestSample:
    found = RequestSample(start_s, start_s, list(arrivals_s))
    found.end_s = arrivals_s[-1] if arrivals_s else start_s
    found.output_tokens = tokens or len(arrivals_s)
    found.prompt_tokens = 10
    found.failure = failure
    return found


def test_times_of_a_request() -> None:
    one = sample(1.0, 1.5, 1.6, 2.0, tokens=6)
    assert one.ttft_s == 0.5
    assert one.e2el_s == 1.0
    # Half a second for the five tokens after the first.
    assert one.tpot_s == pytest.approx(0.1)
    assert one.itl_s == pytest.approx([0.1, 0.4])
    assert sample(1.0).ttft_s is None
    assert sample(1.0, 2.0).tpot_s is None


def test_a_summary_counts_complete_requests_only() -> None:
    samples = [
        sample(0.0, 0.1, 0.2),
        sample(0.0, 0.3, 0.4),
        sample(0.0, 9.0, failure="QUEUE_FULL"),
        sample(0.0, failure="QUEUE_FULL"),
        sample(0.0, failure="HTTP_500"),
    ]
    summary = summarize(samples, 2.0, parse_objectives(["ttft:200"]))
    assert summary.completed == 2
    assert summary.failures == {"QUEUE_FULL": 2, "HTTP_500": 1}
    assert (summary.prompt_tokens, summary.output_tokens) == (20, 4)
    assert (summary.request_rate, summary.output_token_rate, summary.total_token_rate) == (1, 2, 12)
    assert summary.goodput == 0.5
    assert summary.times["ttft"].mean_ms == pytest.approx(200)
    assert summary.times["ttft"].percentiles[50] == pytest.approx(100)
    assert summary.times["ttft"].max_ms == pytest.approx(300)
    assert summary.times["itl"].count == 2
    assert summarize(samples, 2.0, {}).goodput is None


def test_percentiles_are_measured_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 2.0], 50) == 1.0
    assert percentile([float(n) for n in range(1, 101)], 99) == 99.0
    assert percentile([5.0], 99) == 5.0
    assert percentile([], 99) == 0.0


def test_every_objective_must_be_met() -> None:
    one = sample(0.0, 0.1, 0.2, 0.5)
    assert meets(one, parse_objectives(["ttft:100", "itl:301", "tpot:200", "e2el:500"]))
    for text in ("ttft:99", "itl:299", "tpot:199", "e2el:499"):
        assert not meets(one, parse_objectives(["ttft:100", text]))


@pytest.mark.parametrize("text", ["ttft", "ttft:0", "ttft:x", "first:10", "ttft:-5", "ttft:nan"])
def test_wrong_objectives_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write NAME:MILLISECONDS"):
        parse_objectives([text])


class Scripted:
    """Answers after its events, and counts the requests in flight."""

    def __init__(self) -> None:
        self.in_flight = self.most = 0

    async def send(self, request: PlannedRequest, sample: RequestSample, clock: Clock) -> None:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
                sample.arrivals_s.append(clock())
            if request.text == "bad":
                raise RequestFailure("HTTP_400", "no")
            sample.output_tokens = 3
        finally:
            self.in_flight -= 1


async def test_no_more_requests_are_in_flight_than_asked_and_failures_are_counted() -> None:
    target, ended = Scripted(), list[RequestSample]()
    requests = [PlannedRequest(text="bad" if number % 4 == 0 else "x") for number in range(20)]
    samples, duration_s = await run_load(target, requests, concurrency=3, on_end=ended.append)
    assert target.most == 3
    assert len(samples) == len(ended) == 20
    assert [one.failure for one in samples[:5]] == ["HTTP_400", "", "", "", "HTTP_400"]
    assert all(one.end_s <= duration_s for one in samples)


async def test_requests_wait_for_their_start_time() -> None:
    waits: list[float] = []

    async def sleep(wait_s: float) -> None:
        waits.append(wait_s)

    requests = [PlannedRequest(text="x", start_s=10.0 * number) for number in range(3)]
    samples, _ = await run_load(Scripted(), requests, concurrency=1, sleep=sleep)
    assert [round(wait_s) for wait_s in waits] == [0, 10, 20]
    assert [one.planned_s for one in samples] == [0.0, 10.0, 20.0]


def test_the_report_shows_what_was_measured() -> None:
    samples = [sample(0.0, 0.1, 0.2), sample(0.0, failure="HTTP_500")]
    summary = summarize(samples, 2.0, parse_objectives(["ttft:200"]))
    console = Console(width=100)
    with console.capture() as captured:
        console.print(times_table(summary))
    assert "time to first token" in captured.get()
    assert "100.0" in captured.get()
    text = "\n".join(lines(summary))
    for words in ("1 complete in 2.0 s, 1 failed (1 HTTP_500)", "0.50 requests/s", "goodput: 0.50"):
        assert words in text
    record = json.loads(json.dumps(as_json({"rate": 1.0}, summary, samples)))
    assert record["summary"]["times"]["ttft"]["percentiles"]["99"] == pytest.approx(100)
    assert [one["failure"] for one in record["requests"]] == ["", "HTTP_500"]
    late = [sample(1.0, 1.1) for _ in range(3)]
    for one in late:
        one.planned_s = 0.0
    assert "1,000 ms late" in "\n".join(lines(summarize(late, 2.0, {})))


@pytest.mark.parametrize("count", [0, 1, 5_000])
def test_the_picture_is_valid_and_bounded(count: int) -> None:
    samples = [sample(0.0, 0.01 * n + 0.001, 0.01 * n + 0.003) for n in range(count)]
    picture = draw(samples, "a <b> & c")
    root = ET.fromstring(picture)
    assert "a <b> & c" in "".join(root.itertext())
    assert len(picture) < 60_000
    assert picture.count('stroke="#1b6ca8"') == (4 if count else 0)


def test_bodies_of_http_requests() -> None:
    path, body = request_body(PlannedRequest(token_ids=(1, 2), output_tokens=5), "m")
    assert path == "/v1/completions"
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"]) == ([1, 2], 5, True)
    path, body = request_body(PlannedRequest(messages=(("user", "Hi"),), exact=False), "m")
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "Hi"}]
    assert "ignore_eos" not in body


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"goodput": ("speed:5",)}, "write NAME:MILLISECONDS"),
        ({"url": "127.0.0.1:1"}, "write it as http://HOST:PORT"),
        ({"picture": Path("/absent/x.svg")}, "its folder does not exist"),
        ({"output": Path("/absent/x.json")}, "its folder does not exist"),
        ({"requests": 900_000, "input_tokens": 900_000}, "send fewer or shorter ones"),
        ({"input_tokens": 0}, "input_tokens"),
    ],
)
async def test_wrong_options_are_refused_before_anything_is_sent(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        await run_bench(replace(OPTIONS, **changes))
