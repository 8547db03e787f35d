"""Ranges and defaults of the sampling parameters. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.inference.v1 import sampling_pb2
from headrace_common.limits import STOP_STRING_CHARACTERS_MAX, STOP_STRINGS_MAX, STOP_TOKENS_MAX

LOGPROBS_MAX = 20
SEED_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class _Range:
    low: float
    high: float
    default: float
    low_included: bool = True

    def contains(self, value: float) -> bool:
        """False for NaN and infinities, too."""
        return (self.low <= value if self.low_included else self.low < value) and value <= self.high

    def __str__(self) -> str:
        return f"{'from' if self.low_included else 'above'} {self.low:g} to {self.high:g}"


_RANGES = {
    "temperature": _Range(0, 2, 1),
    "top_p": _Range(0, 1, 1, low_included=False),
    "min_p": _Range(0, 1, 0),
    "presence_penalty": _Range(-2, 2, 0),
    "frequency_penalty": _Range(-2, 2, 0),
    "repetition_penalty": _Range(0, 2, 1, low_included=False),
}


def sampling_violations(sampling: sampling_pb2.SamplingParams) -> dict[str, str]:
    """Remedies by path of the invalid field. Needs no knowledge of the model."""
    violations: dict[str, str] = {}
    for name, allowed in _RANGES.items():
        value = getattr(sampling, name)
        if sampling.HasField(name) and not allowed.contains(value):  # type: ignore[arg-type]
            violations[f"sampling.{name}"] = f"must be {allowed}, not {value:g}"
    if sampling.seed > SEED_MAX:
        violations["sampling.seed"] = f"must be from 0 to {SEED_MAX}, not {sampling.seed}"
    if sampling.HasField("max_tokens") and sampling.max_tokens < 1:
        violations["sampling.max_tokens"] = (
            "must be 1 or more; leave it out to use the rest of the context"
        )
    if sampling.logprobs > LOGPROBS_MAX:
        violations["sampling.logprobs"] = (
            f"must be from 0 to {LOGPROBS_MAX}, not {sampling.logprobs}"
        )
    if len(sampling.stop) > STOP_STRINGS_MAX:
        violations["sampling.stop"] = (
            f"must hold at most {STOP_STRINGS_MAX} strings, not {len(sampling.stop)}"
        )
    for index, stop in enumerate(sampling.stop[:STOP_STRINGS_MAX]):
        if not stop:
            violations[f"sampling.stop[{index}]"] = "must not be empty; leave it out"
        elif len(stop) > STOP_STRING_CHARACTERS_MAX:
            violations[f"sampling.stop[{index}]"] = (
                f"must have at most {STOP_STRING_CHARACTERS_MAX} characters, not {len(stop)}"
            )
    if len(sampling.stop_token_ids) > STOP_TOKENS_MAX:
        violations["sampling.stop_token_ids"] = (
            f"must hold at most {STOP_TOKENS_MAX} tokens, not {len(sampling.stop_token_ids)}"
        )
    return violations


def with_defaults(
    sampling: sampling_pb2.SamplingParams, max_tokens: int
) -> sampling_pb2.SamplingParams:
    """The parameters for the decode worker, with every default filled in.

    They have no stops: the router finds stop strings, and stop tokens have a field of their own.
    """
    filled = sampling_pb2.SamplingParams()
    filled.CopyFrom(sampling)
    for name, allowed in _RANGES.items():
        if not filled.HasField(name):  # type: ignore[arg-type]
            setattr(filled, name, allowed.default)
    if not filled.HasField("top_k"):
        filled.top_k = 0
    filled.max_tokens = max_tokens
    filled.ClearField("stop")
    filled.ClearField("stop_token_ids")
    return filled
