"""Statistics of a run. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headrace_cli.load.sample import RequestSample
from headrace_common.errors import ConfigError

PERCENTILES: Final = (50, 90, 95, 99)
OBJECTIVES: Final = ("ttft", "tpot", "itl", "e2el")
"""Names of times that an objective may bound, as vLLM's goodput option has them."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Times of one kind, in milliseconds. `percentiles` by their number."""

    count: int
    mean_ms: float
    max_ms: float
    percentiles: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Summary:
    """`times`: by name of OBJECTIVES. `goodput`: complete requests a second that met the objectives, if there are any.

    `send_delay_ms`: 99th percentile of the time by which requests were sent late: the load generator was the limit.
    """

    duration_s: float
    completed: int
    failures: Mapping[str, int]
    prompt_tokens: int
    output_tokens: int
    request_rate: float
    output_token_rate: float
    total_token_rate: float
    goodput: float | None
    send_delay_ms: float
    times: Mapping[str, Distribution]


def parse_objectives(texts: Sequence[str]) -> dict[str, float]:
    """Objectives in seconds by name, from texts such as "ttft:200" in milliseconds. Raises ConfigError."""
    objectives: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            bound_ms = float(value)
        except ValueError:
            bound_ms = math.nan
        if name not in OBJECTIVES or not bound_ms > 0:
            raise ConfigError(
                f"goodput {text!r}: write NAME:MILLISECONDS with a name of {', '.join(OBJECTIVES)}, such as ttft:200",
                metadata={"field": "goodput"},
            )
        objectives[name] = bound_ms / 1e3
    return objectives


def summarize(
    samples: Sequence[RequestSample], duration_s: float, objectives: Mapping[str, float]
) -> Summary:
    """`objectives` as parse_objectives returns them."""
    complete = [sample for sample in samples if not sample.failure]
    prompt_tokens = sum(sample.prompt_tokens for sample in complete)
    output_tokens = sum(sample.output_tokens for sample in complete)
    duration_s = max(duration_s, 1e-9)
    met = sum(meets(sample, objectives) for sample in complete)
    delays = [sample.start_s - sample.planned_s for sample in samples]
    return Summary(
        duration_s=duration_s,
        completed=len(complete),
        failures=dict(Counter(sample.failure for sample in samples if sample.failure)),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        request_rate=len(complete) / duration_s,
        output_token_rate=output_tokens / duration_s,
        total_token_rate=(prompt_tokens + output_tokens) / duration_s,
        goodput=met / duration_s if objectives else None,
        send_delay_ms=1e3 * percentile(delays, 99),
        times={name: _distribution(values(complete, name)) for name in OBJECTIVES},
    )


def values(samples: Sequence[RequestSample], name: str) -> list[float]:
    """All times of one kind, in seconds."""
    if name == "itl":
        return [gap for sample in samples for gap in sample.itl_s]
    if name == "e2el":
        return [sample.e2el_s for sample in samples]
    found = [sample.ttft_s if name == "ttft" else sample.tpot_s for sample in samples]
    return [value for value in found if value is not None]


def meets(sample: RequestSample, objectives: Mapping[str, float]) -> bool:
    """Whether a complete request met every objective. Of its gaps, each must."""
    return all(
        value <= bound for name, bound in objectives.items() for value in values([sample], name)
    )


def percentile(numbers: Sequence[float], percent: float) -> float:
    """The smallest number that at least `percent` of them do not exceed. 0 without numbers."""
    if not numbers:
        return 0.0
    ordered = sorted(numbers)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def _distribution(seconds: Sequence[float]) -> Distribution:
    if not seconds:
        return Distribution(0, 0.0, 0.0, dict.fromkeys(PERCENTILES, 0.0))
    return Distribution(
        count=len(seconds),
        mean_ms=1e3 * math.fsum(seconds) / len(seconds),
        max_ms=1e3 * max(seconds),
        percentiles={percent: 1e3 * percentile(seconds, percent) for percent in PERCENTILES},
    )
