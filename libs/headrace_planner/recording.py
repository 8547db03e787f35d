"""Observations as JSON lines, one interval a line.

A recording of a deployment can be planned again with other settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace_common.config import NonNegativeCount, NonNegativeSeconds, PositiveSeconds
from headrace_common.errors import ConfigError
from headrace_planner.observation import (
    ClassCounts,
    DecodeLoad,
    Interval,
    LoadSample,
    RequestStatistics,
)

LINE_BYTES_MAX = 1 << 20
INTERVALS_MAX = 1_000_000
_WORKERS_MAX = 10_000
_SAMPLES_MAX = 1_000
_Mean = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _DecodeWorker(_Line):
    kv_usage: Annotated[float, Field(ge=0, le=1)]
    waiting_requests: NonNegativeCount = 0
    slot_usage: Annotated[float, Field(ge=0, le=1)] = 0.0


class _ClassCounts(_Line):
    high: NonNegativeCount = 0
    normal: NonNegativeCount = 0
    low: NonNegativeCount = 0


class _Sample(_Line):
    prefill_workers: NonNegativeCount
    queued_prompts: NonNegativeCount
    decode: Annotated[tuple[_DecodeWorker, ...], Field(max_length=_WORKERS_MAX)]
    queued_by_class: _ClassCounts = _ClassCounts()


class _Requests(_Line):
    request_count: NonNegativeCount
    prompt_tokens: _Mean
    answer_tokens: _Mean
    ttft_s: NonNegativeSeconds
    itl_s: NonNegativeSeconds
    duration_s: NonNegativeSeconds
    cached_share: Annotated[float, Field(ge=0, le=1)] = 0.0


class _Interval(_Line):
    start_unix_s: NonNegativeSeconds
    duration_s: PositiveSeconds
    samples: Annotated[tuple[_Sample, ...], Field(min_length=1, max_length=_SAMPLES_MAX)]
    requests: _Requests | None = None


def read_intervals(lines: Iterable[str]) -> Iterator[Interval]:
    """Parses a recording. Empty lines are skipped.

    Raises ConfigError that names the line and every wrong field of it.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if number > INTERVALS_MAX or len(line) > LINE_BYTES_MAX:
            raise ConfigError(
                f"line {number}: a recording has at most {INTERVALS_MAX} lines of {LINE_BYTES_MAX} characters: "
                "split it"
            )
        try:
            parsed = _Interval.model_validate_json(line)
        except ValidationError as error:
            raise ConfigError(_detail(number, error)) from None
        yield _interval(parsed)


def interval_line(interval: Interval) -> str:
    """The line of a recording for this interval, without the end of the line."""
    content = asdict(interval)
    if interval.requests is None:
        del content["requests"]
    return json.dumps(content, allow_nan=False)


def _detail(number: int, error: ValidationError) -> str:
    problems = [
        f"{'.'.join(map(str, problem['loc'])) or 'the line'}: {problem['msg']}"
        for problem in error.errors(include_url=False, include_input=False)
    ]
    return f"line {number}: " + "; ".join(problems)


def _interval(parsed: _Interval) -> Interval:
    samples = tuple(
        LoadSample(
            sample.prefill_workers,
            sample.queued_prompts,
            tuple(DecodeLoad(**dict(worker)) for worker in sample.decode),
            ClassCounts(**dict(sample.queued_by_class)),
        )
        for sample in parsed.samples
    )
    requests = RequestStatistics(**dict(parsed.requests)) if parsed.requests is not None else None
    return Interval(parsed.start_unix_s, parsed.duration_s, samples, requests)
