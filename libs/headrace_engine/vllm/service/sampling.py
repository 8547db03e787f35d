"""Converts sampling settings to vLLM's, and vLLM's outputs to tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, Final

from headrace_common.callers.priority import Priority
from headrace_common.errors import InvalidRequest
from headrace_engine.interface import (
    DecodeTokens,
    Sampling,
    StructuredOutputs,
    TokenLogprobs,
)
from headrace_engine.step_budget import NO_BOUNDS, TokenBounds
from headrace_engine.vllm.settings import (
    BOUNDS_KEY,
    COMPARISON_KEY,
    GENERATED_KEY,
    KEEP_KEY,
    PRIORITY_KEY,
    STEP_KEY,
    TENANT_KEY,
)
from headrace_kv.tiers.promises import KeepTerms
from headrace_text.constraints import closed_schema

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams


def sampling_params(
    sampling: Sampling,
    kv_transfer_params: Mapping[str, Any] | None,
    generated: Sequence[int] = (),
    step_of: str = "",
    priority: Priority = Priority.NORMAL,
    bounds: TokenBounds = NO_BOUNDS,
    keep: KeepTerms | None = None,
    compares: tuple[str, int | None] | None = None,
    tenant_salt: str = "",
) -> SamplingParams:
    """vLLM's settings for a stream of new tokens that contains stop tokens. `generated` tokens precede them.

    `step_of`: id under which the scheduler reports the first step, empty for no report. `priority`, `bounds`: see
    PrefillWork. `keep`, `tenant_salt`: see DecodeWork. `compares`: a comparison and its received block. Raises
    InvalidRequest when vLLM rejects them.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    extra: dict[str, Any] = {}
    if kv_transfer_params:
        extra["kv_transfer_params"] = dict(kv_transfer_params)
    if generated:
        extra[GENERATED_KEY] = list(generated)
    if step_of:
        extra[STEP_KEY] = step_of
    if priority is not Priority.NORMAL:
        extra[PRIORITY_KEY] = int(priority)
    if bounds != NO_BOUNDS:
        extra[BOUNDS_KEY] = list(astuple(bounds))
    if keep is not None:
        extra[KEEP_KEY] = list(astuple(keep))
    if compares is not None:
        extra[COMPARISON_KEY] = list(compares)
    if tenant_salt and sampling.structured_outputs is not None:
        extra[TENANT_KEY] = tenant_salt
    try:
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            # `stop_token_ids` are all that count: vLLM must not add the model's own.
            ignore_eos=True,
            logprobs=sampling.logprobs,
            min_tokens=min(sampling.min_tokens, sampling.max_tokens),
            logit_bias=dict(sampling.logit_bias) or None,
            allowed_token_ids=list(sampling.allowed_token_ids) or None,
            structured_outputs=_structured_outputs(sampling.structured_outputs),
            # With it, vLLM reads no cached prefix.
            prompt_logprobs=sampling.prompt_logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra or None,
        )
    except request_errors() as exc:
        raise rejected(exc, sampling) from exc
    if sampling.bad_token_sequences:
        # vLLM sets them from the words of `bad_words`, which have been tokenized already.
        params._bad_words_token_ids = [list(ids) for ids in sampling.bad_token_sequences]  # noqa: SLF001
    return params


STEP_LIMIT: Final = (
    "takes more work for a token than the engine's limit for a step of its grammar, or the grammars of all your "
    "answers together take more than its time for a step; simplify it, or ask for fewer answers at a time"
)


def request_errors() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that it rejects."""
    from vllm.exceptions import VLLMClientError

    return (ValueError, VLLMClientError)


def rejected(
    error: Exception, sampling: Sampling, default_field: str = "sampling"
) -> InvalidRequest:
    """The error for a request that vLLM rejects. vLLM does not name the field, so this guesses it."""
    outputs = sampling.structured_outputs
    if outputs is not None:
        return InvalidRequest(
            {
                f"sampling.structured_outputs.{outputs.kind}": f"vLLM rejects it: {error}; simplify it"
            }
        )
    return InvalidRequest({default_field: f"vLLM rejects it: {error}"})


def _structured_outputs(outputs: StructuredOutputs | None) -> StructuredOutputsParams | None:
    from vllm.sampling_params import StructuredOutputsParams

    if outputs is None:
        return None
    if outputs.kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if outputs.kind == "choice":
        return StructuredOutputsParams(choice=list(outputs.choices))
    if outputs.kind == "json":
        return StructuredOutputsParams(json=closed_schema(outputs.text))
    return StructuredOutputsParams(**{outputs.kind: outputs.text})


def tokens_of(
    output: CompletionOutput, logprob_count: int | None, step_start_ns: int = 0
) -> DecodeTokens:
    """The new tokens of an output, with `logprob_count` alternatives each. `step_start_ns`: see DecodeTokens."""
    token_ids = tuple(output.token_ids)
    if logprob_count is None or output.logprobs is None:
        return DecodeTokens(token_ids, step_start_ns=step_start_ns)
    logprobs = _logprobs(token_ids, output.logprobs, logprob_count)
    return DecodeTokens(token_ids, logprobs, step_start_ns)


def prompt_logprobs_of(
    output: RequestOutput, prompt: Sequence[int], count: int
) -> tuple[TokenLogprobs, ...]:
    """Those of the prompt's tokens after the first, which vLLM reports once, with the first output."""
    rows = output.prompt_logprobs
    if not rows:
        return ()
    # vLLM has none for the first token.
    pairs = [(token_id, row) for token_id, row in zip(prompt, rows, strict=True) if row]
    return tuple(
        TokenLogprobs(float(row[token_id].logprob), _likeliest(row, count), row[token_id].rank or 0)
        for token_id, row in pairs
    )


def _logprobs(
    token_ids: Sequence[int], rows: Sequence[Mapping[int, Any]], count: int
) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(float(row[token_id].logprob), _likeliest(row, count))
        for token_id, row in zip(token_ids, rows, strict=True)
    )


def _likeliest(row: Mapping[int, Any], count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest alternatives. vLLM's row also has the chosen token, whatever its rank."""
    ranked = sorted(row.items(), key=lambda item: item[1].rank)
    return tuple((token_id, float(entry.logprob)) for token_id, entry in ranked[:count])
