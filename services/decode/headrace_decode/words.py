"""Between the decode contract's messages and the engine's values. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import sampling_pb2
from headrace_common.errors import InvalidRequest
from headrace_engine.interface import DecodeTokens, DecodeWork, Sampling

TRANSFER_ID_CHARACTERS_MAX = 64


def work_from_proto(request: decode_pb2.GenerateRequest) -> DecodeWork:
    """Raises InvalidRequest naming every field that the router should have set."""
    violations: dict[str, str] = {}
    if not 0 < len(request.transfer_id) <= TRANSFER_ID_CHARACTERS_MAX:
        violations["transfer_id"] = f"must be 1 to {TRANSFER_ID_CHARACTERS_MAX} characters"
    if not request.token_ids:
        violations["token_ids"] = "must hold at least one token"
    if request.sampling.max_tokens < 1:
        violations["sampling.max_tokens"] = "must be 1 or more"
    if violations:
        raise InvalidRequest(violations)
    return DecodeWork(
        transfer_id=request.transfer_id,
        token_ids=tuple(request.token_ids),
        sampling=sampling_from_proto(request.sampling, request.stop_token_ids),
        remote_kv=request.remote_prefill and len(request.token_ids) > 1,
    )


def sampling_from_proto(
    params: sampling_pb2.SamplingParams, stop_token_ids: Sequence[int]
) -> Sampling:
    """The engine's sampling; absent fields take the defaults that sampling.proto names."""
    defaults = Sampling()
    return Sampling(
        temperature=params.temperature if params.HasField("temperature") else defaults.temperature,
        top_p=params.top_p if params.HasField("top_p") else defaults.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty
        if params.HasField("repetition_penalty")
        else defaults.repetition_penalty,
        seed=params.seed if params.HasField("seed") else None,
        max_tokens=params.max_tokens,
        stop_token_ids=tuple(stop_token_ids),
        logprobs=params.logprobs if params.HasField("logprobs") else None,
    )


def tokens_to_proto(pieces: Sequence[DecodeTokens]) -> decode_pb2.Tokens:
    """All pieces as one message, in order."""
    message = decode_pb2.Tokens()
    for piece in pieces:
        message.token_ids.extend(piece.token_ids)
        for entry in piece.logprobs:
            message.logprobs.add(
                logprob=entry.logprob,
                alternatives=[
                    sampling_pb2.TokenAlternative(token_id=token_id, logprob=logprob)
                    for token_id, logprob in entry.alternatives
                ],
            )
    return message
