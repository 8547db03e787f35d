"""Validates requests."""

from __future__ import annotations

from headrace_common.errors import InvalidRequest
from headrace_engine.interface import DecodeWork, PrefillWork, Sampling
from headrace_engine.sim.model.sampling import SUPPORTED_FORMS


def check_prefill(work: PrefillWork, max_model_len: int) -> None:
    """Raises InvalidRequest naming every wrong field."""
    target, count = work.target, len(work.token_ids)
    violations: dict[str, str] = {}
    if not 0 < count < max_model_len:
        violations["token_ids"] = f"give 1 to {max_model_len - 1} tokens"
    if not 0 <= target.start_token < target.end_token == count:
        violations["target.end_token"] = "it is the number of tokens, above start_token"
    violations |= _constraint_violations(work.sampling)
    if violations:
        raise InvalidRequest(violations)


def check_decode(work: DecodeWork, max_model_len: int) -> None:
    """Raises InvalidRequest naming the wrong field."""
    if not 0 < len(work.token_ids) < max_model_len:
        raise InvalidRequest({"token_ids": f"give 1 to {max_model_len - 1} tokens"})
    if work.sampling.max_tokens <= work.generated_tokens:
        least = work.generated_tokens + 1
        raise InvalidRequest({"sampling.max_tokens": f"take {least} or more"})
    violations = _constraint_violations(work.sampling)
    if violations:
        raise InvalidRequest(violations)


def _constraint_violations(sampling: Sampling | None) -> dict[str, str]:
    outputs = sampling.structured_outputs if sampling is not None else None
    if outputs is None or outputs.kind in SUPPORTED_FORMS:
        return {}
    return {
        f"sampling.structured_outputs.{outputs.kind}": f"the simulated engine supports {', '.join(SUPPORTED_FORMS)}; "
        "use one of these, or the engine vllm"
    }
