"""Converts sampling settings to vLLM's, and vLLM's outputs to tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace_common.errors import InvalidRequest
from headrace_engine.interface import DecodeTokens, Sampling, TokenLogprobs
from headrace_engine.vllm.settings import GENERATED_KEY, LOGITS_KEY

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.sampling_params import SamplingParams


def sampling_params(
    sampling: Sampling,
    kv_transfer_params: Mapping[str, Any] | None,
    generated: Sequence[int] = (),
    logits_for: str = "",
) -> SamplingParams:
    """vLLM's settings for a stream of new tokens that contains stop tokens. `generated` tokens precede them.

    `logits_for`: id of the transfer that carries the logits before the first token, empty for none.
    Raises InvalidRequest when vLLM rejects them.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    extra: dict[str, Any] = {}
    if kv_transfer_params:
        extra["kv_transfer_params"] = dict(kv_transfer_params)
    if generated:
        extra[GENERATED_KEY] = list(generated)
    if logits_for:
        extra[LOGITS_KEY] = logits_for
    try:
        return SamplingParams(
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
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra or None,
        )
    except ValueError as exc:
        raise InvalidRequest({"sampling": f"vLLM rejects it: {exc}"}) from exc


def tokens_of(output: CompletionOutput, logprob_count: int | None) -> DecodeTokens:
    """The new tokens of an output, with `logprob_count` alternatives each."""
    token_ids = tuple(output.token_ids)
    if logprob_count is None or output.logprobs is None:
        return DecodeTokens(token_ids)
    return DecodeTokens(token_ids, _logprobs(token_ids, output.logprobs, logprob_count))


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
