"""Converts between the sampling messages and the engine's values. Pure."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import bounds_pb2, image_pb2, receipt_pb2, sampling_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace.worker.v1 import time_model_pb2
from headrace_common.durations import seconds_from_duration
from headrace_common.errors import InvalidRequest
from headrace_common.registry.adapters import Adapter, adapter_violations
from headrace_engine.interface import PromptImage, Sampling, StructuredOutputs, TokenLogprobs
from headrace_engine.receipts import EngineTime, RequestCost
from headrace_engine.step_budget import NO_BOUNDS, TokenBounds
from headrace_kv.layout import KvDescriptor
from headrace_kv.prefix.events import Tier
from headrace_kv.prefix.images import CONTENT_HASH_BYTES
from headrace_kv.tiers.promises import Kept

_DEFAULTS: Final = Sampling()


def sampling_from_proto(
    params: sampling_pb2.SamplingParams, stop_token_ids: Sequence[int]
) -> Sampling:
    """The engine's sampling. Absent fields get the defaults of sampling.proto."""
    return Sampling(
        temperature=params.temperature if params.HasField("temperature") else _DEFAULTS.temperature,
        top_p=params.top_p if params.HasField("top_p") else _DEFAULTS.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty
        if params.HasField("repetition_penalty")
        else _DEFAULTS.repetition_penalty,
        seed=params.seed if params.HasField("seed") else None,
        max_tokens=params.max_tokens,
        stop_token_ids=tuple(stop_token_ids),
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        min_tokens=params.min_tokens,
        logit_bias=tuple(sorted(params.logit_bias.items())),
        bad_token_sequences=tuple(tuple(one.ids) for one in params.bad_token_sequences),
        allowed_token_ids=tuple(params.allowed_token_ids),
        structured_outputs=_structured_outputs_from_proto(params.structured_outputs),
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
    )


def requested_adapter(
    request: decode_pb2.GenerateRequest | prefill_pb2.PrefillTask, adapters: Collection[Adapter]
) -> Adapter | None:
    """The adapter that a request names, one of the engine's `adapters`. None for the model alone.

    Raises InvalidRequest.
    """
    if not request.HasField("adapter"):
        return None
    violations = adapter_violations(request.adapter, "adapter")
    wanted = Adapter(request.adapter.name, request.adapter.digest)
    if not violations and wanted not in adapters:
        same_name = any(one.name == wanted.name for one in adapters)
        what = "with another digest than" if same_name else "that is not among"
        violations["adapter"] = f"{wanted.name!r} is an adapter {what} this worker's"
    if not request.cache_salt:
        violations["cache_salt"] = "must not be empty beside an adapter, as the router sets it"
    if violations:
        raise InvalidRequest(violations)
    return wanted


def require_vocabulary(
    token_ids: Sequence[int], images: Iterable[PromptImage], vocabulary_size: int
) -> None:
    """Raises InvalidRequest for a token beyond the vocabulary, which would end an engine. Placeholders may be."""
    if max(token_ids) < vocabulary_size:
        return
    spans = [range(one.start_token, one.start_token + one.token_count) for one in images]
    for index, token_id in enumerate(token_ids):
        if token_id >= vocabulary_size and not any(index in one for one in spans):
            remedy = f"must be below {vocabulary_size}, the model's vocabulary, not {token_id}"
            raise InvalidRequest({f"token_ids[{index}]": remedy})


def images_from_proto(
    messages: Iterable[image_pb2.PromptImage], end_token: int
) -> tuple[PromptImage, ...]:
    """The images of a prompt. All placeholders must lie before `end_token`. Raises InvalidRequest."""
    images = tuple(
        PromptImage(one.data, one.content_hash, one.start_token, one.token_count)
        for one in messages
    )
    violations: dict[str, str] = {}
    free_token = 0
    for number, image in enumerate(images):
        field = f"images[{number}]"
        if not image.data:
            violations[f"{field}.data"] = "must not be empty"
        if len(image.content_hash) != CONTENT_HASH_BYTES:
            violations[f"{field}.content_hash"] = f"must be {CONTENT_HASH_BYTES} bytes"
        if image.start_token < free_token:
            violations[f"{field}.start_token"] = f"must be {free_token} or more"
        free_token = image.start_token + image.token_count
        if not image.token_count or free_token > end_token:
            violations[f"{field}.token_count"] = (
                f"must be 1 or more, with all placeholders before token {end_token}"
            )
    if violations:
        raise InvalidRequest(violations)
    return images


def _structured_outputs_from_proto(
    outputs: sampling_pb2.StructuredOutputs,
) -> StructuredOutputs | None:
    kind = outputs.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == "json_object":
        return StructuredOutputs(kind)
    if kind == "choice":
        return StructuredOutputs(kind, choices=tuple(outputs.choice.texts))
    return StructuredOutputs(kind, getattr(outputs, kind))


def logprobs_to_proto(logprobs: TokenLogprobs) -> sampling_pb2.TokenLogprobs:
    """The logprobs of one token."""
    return sampling_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        alternatives=[
            sampling_pb2.TokenAlternative(token_id=token_id, logprob=logprob)
            for token_id, logprob in logprobs.alternatives
        ],
        rank=logprobs.rank,
    )


_ABSENT: Final = bounds_pb2.TokenBounds()


def bounds_from_proto(bounds: bounds_pb2.TokenBounds) -> TokenBounds:
    """When tokens are due, counted from now."""
    if bounds == _ABSENT:
        return NO_BOUNDS
    due_s = 0.0
    if bounds.HasField("first_token_remaining"):
        due_s = time.monotonic() + seconds_from_duration(bounds.first_token_remaining)
    return TokenBounds(
        first_due_s=due_s,
        first_s=seconds_from_duration(bounds.ttft_target),
        tpot_s=seconds_from_duration(bounds.tpot_target),
    )


def receipt_to_proto(
    cost: RequestCost, descriptor: KvDescriptor, cached_tokens: int, kept: Kept | None = None
) -> receipt_pb2.Receipt:
    """What a request has cost an engine with these devices and this KV, and what its KV is promised to take."""
    devices, token_bytes = len(descriptor.ranks), descriptor.layout.token_bytes
    token_s = {Tier.DEVICE: cost.kv_token_s}
    if kept is not None and kept.tokens:
        token_s[kept.tier] = token_s.get(kept.tier, 0.0) + kept.tokens * kept.seconds
    return receipt_pb2.Receipt(
        prefill_device_us=round(1e6 * devices * cost.prefill_s),
        decode_device_us=round(1e6 * devices * cost.decode_s),
        kv=[
            receipt_pb2.KvUse(tier=tier.name.lower(), byte_seconds=token_bytes * one)
            for tier, one in token_s.items()
        ],
        computed_tokens=cost.computed_tokens,
        cached_tokens=cached_tokens,
    )


def device_time_to_proto(time: EngineTime, devices: int = 1) -> time_model_pb2.DeviceTime:
    """Of all devices together."""
    return time_model_pb2.DeviceTime(
        idle_us=round(1e6 * devices * time.idle_s),
        computing_us=round(1e6 * devices * time.computing_s),
        billed_us=round(1e6 * devices * time.billed_s),
    )


def device_time_from_proto(message: time_model_pb2.DeviceTime) -> EngineTime:
    """Of one device."""
    return EngineTime(1e-6 * message.idle_us, 1e-6 * message.computing_us, 1e-6 * message.billed_us)
