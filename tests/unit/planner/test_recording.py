"""Recordings: a line becomes an interval, and a wrong line is named."""

from __future__ import annotations

import json

import pytest

from headrace_common.errors import ConfigError
from headrace_planner.observation import (
    LINE_BYTES_MAX,
    ClassCounts,
    WorkerCounts,
    interval_line,
    read_intervals,
)
from tests.unit.planner.samples import PROFILE, interval, requests

LINE = {
    "start_unix_s": 10,
    "duration_s": 30,
    "samples": [{"prefill_workers": 1, "queued_prompts": 3, "decode": [{"kv_usage": 0.5}]}],
}


def test_a_line_becomes_an_interval() -> None:
    (read,) = read_intervals(["\n", json.dumps(LINE) + "\n"])
    assert read.start_unix_s == 10
    assert read.samples[0].queue_per_worker() == 3
    assert read.samples[0].decode_load == 0.5
    assert read.requests is None


@pytest.mark.parametrize("line", ["{", "[]", "x" * (LINE_BYTES_MAX + 1)])
def test_what_is_no_interval_is_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="line 1"):
        list(read_intervals([line]))


def test_workers_of_both_roles_are_workers_that_generate() -> None:
    line = json.loads(json.dumps(LINE))
    line["samples"][0] |= {"prefill_workers": 0, "both_workers": 1}
    (read,) = read_intervals([json.dumps(line)])
    assert read.counts == WorkerCounts(0, 0, 1)
    line["samples"][0]["both_workers"] = 2
    with pytest.raises(ConfigError, match="both_workers counts workers of decode"):
        list(read_intervals([json.dumps(line)]))


REQUESTS = {
    "request_count": 2,
    "prompt_tokens": 3.5,
    "answer_tokens": 1,
    "ttft_s": 0.1,
    "itl_s": 0.0,
    "duration_s": 1,
    "cached_share": 0.5,
}


@pytest.mark.parametrize("requests", [None, REQUESTS])
def test_a_written_interval_is_read_again(requests: dict[str, float] | None) -> None:
    line = json.loads(json.dumps(LINE))
    line["samples"][0]["decode"].append(
        {"kv_usage": 0.1, "waiting_requests": 4, "slot_usage": 0.75}
    )
    line["samples"][0]["queued_by_class"] = {"high": 1, "low": 2}
    if requests is not None:
        line["requests"] = requests
    (interval,) = read_intervals([json.dumps(line)])
    assert interval.samples[0].decode[1].load == pytest.approx(0.75 + 4 * 0.02)
    assert interval.samples[0].queued_by_class == ClassCounts(high=1, low=2)
    assert list(read_intervals([interval_line(interval)])) == [interval]


def test_a_recording_has_what_the_workers_had_learned() -> None:
    learned = interval(requests=requests(), profile=PROFILE)
    (read,) = read_intervals([interval_line(learned)])
    assert read == learned
    (read,) = read_intervals([interval_line(interval())])
    assert read.profile is None
