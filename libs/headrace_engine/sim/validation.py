"""Validates requests."""

from __future__ import annotations

from headrace_common.errors import InvalidRequest
from headrace_engine.interface import DecodeWork, PrefillWork
from headrace_engine.sim.model.sampling import SUPPORTED_FORMS


def check(work: PrefillWork | DecodeWork, max_model_len: int) -> None:
    """Raises InvalidRequest naming every wrong field."""
    count = len(work.token_ids)
    violations: dict[str, str] = {}
    if not 0 < count < max_model_len:
        violations["token_ids"] = f"give 1 to {max_model_len - 1} tokens"
    if isinstance(work, PrefillWork):
        if not 0 <= work.target.start_token < work.target.end_token == count:
            violations["target.end_token"] = "it is the number of tokens, above start_token"
    elif work.sampling.max_tokens <= work.generated_tokens:
        violations["sampling.max_tokens"] = f"take {work.generated_tokens + 1} or more"
    outputs = work.sampling.structured_outputs if work.sampling is not None else None
    if outputs is not None and outputs.kind not in SUPPORTED_FORMS:
        violations[f"sampling.structured_outputs.{outputs.kind}"] = (
            f"the simulated engine supports {', '.join(SUPPORTED_FORMS)}; use one of these, or the engine vllm"
        )
    if violations:
        raise InvalidRequest(violations)
