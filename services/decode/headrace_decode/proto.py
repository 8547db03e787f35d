"""Converts between the decode service's messages and the engine's values. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import first_token_pb2, keep_pb2
from headrace_common.callers.priority import Priority
from headrace_common.durations import duration_from_seconds, seconds_from_duration
from headrace_common.errors import InvalidRequest
from headrace_common.limits import KEEP_MAX_S, TRANSFER_ID_CHARACTERS_MAX
from headrace_common.registry.adapters import Adapter
from headrace_engine.interface import DecodeWork
from headrace_engine.proto import (
    bounds_from_proto,
    images_from_proto,
    requested_adapter,
    sampling_from_proto,
)
from headrace_kv.prefix.cache_salt import salt_violations
from headrace_kv.tiers.promises import KeepTerms, Kept

_POLICIES: Final = frozenset(first_token_pb2.FirstTokenPolicy.values())


def work_from_proto(
    request: decode_pb2.GenerateRequest, adapters: Collection[Adapter] = ()
) -> DecodeWork:
    """`adapters` are the engine's. Raises InvalidRequest naming every wrong or missing field."""
    violations = salt_violations(request.cache_salt)
    if salt_violations(request.tenant_salt):
        violations["tenant_salt"] = "must be as the router sets it"
    if not 0 < len(request.transfer_id) <= TRANSFER_ID_CHARACTERS_MAX:
        violations["transfer_id"] = f"must be 1 to {TRANSFER_ID_CHARACTERS_MAX} characters"
    # A slice is copied without a Python step for each token.
    token_ids, generated = tuple(request.token_ids[:]), request.generated_token_count
    if not token_ids:
        violations["token_ids"] = "must hold at least one token"
    elif generated >= len(token_ids):
        violations["generated_token_count"] = "must leave a token of token_ids for the prompt"
    if request.sampling.max_tokens <= generated:
        violations["sampling.max_tokens"] = f"must be {generated + 1} or more"
    if request.first_token not in _POLICIES:
        violations["first_token"] = "must be one of the named values"
    from_hidden_state = request.first_token == first_token_pb2.FIRST_TOKEN_POLICY_HIDDEN
    by_prefill = (
        from_hidden_state or request.first_token == first_token_pb2.FIRST_TOKEN_POLICY_PREFILL
    )
    if by_prefill and (generated or not request.remote_prefill):
        violations["first_token"] = "needs remote_prefill and no generated tokens"
    if request.sampling.HasField("prompt_logprobs") and (generated or request.remote_prefill):
        violations["sampling.prompt_logprobs"] = "needs a local prefill and no generated tokens"
    if request.computes_from and not (
        request.remote_prefill
        and not by_prefill
        and not request.images
        and request.computes_from < len(token_ids)
    ):
        violations["computes_from"] = "needs remote_prefill by decode, no images, and a token"
    if request.HasField("keep"):
        violations |= _keep_violations(request.keep)
    if violations:
        raise InvalidRequest(violations)
    return DecodeWork(
        transfer_id=request.transfer_id,
        token_ids=token_ids,
        sampling=sampling_from_proto(request.sampling, request.stop_token_ids),
        remote_kv=request.remote_prefill and (by_prefill or len(token_ids) > 1),
        generated_tokens=generated,
        awaits_first_token=by_prefill,
        from_hidden_state=from_hidden_state,
        cache_salt=request.cache_salt,
        tenant_salt=request.tenant_salt,
        adapter=requested_adapter(request, adapters),
        priority=Priority.from_proto(request.priority),
        bounds=bounds_from_proto(request.bounds),
        keep=_terms(request.transfer_id, request.keep) if request.HasField("keep") else None,
        images=images_from_proto(request.images, len(token_ids) - generated - 1),
        computes_from=request.computes_from,
    )


def keep_terms(request: decode_pb2.KeepRequest) -> KeepTerms:
    """Raises InvalidRequest naming every wrong or missing field."""
    violations = _keep_violations(request.keep)
    if violations:
        raise InvalidRequest(violations)
    return _terms(request.transfer_id, request.keep)


def kept_to_proto(kept: Kept | None) -> keep_pb2.Kept:
    """`kept`: see DecodeEnded."""
    if kept is None:
        return keep_pb2.Kept(reason="the decode worker keeps no KV below its KV memory")
    if not kept.tokens:
        return keep_pb2.Kept(reason="no whole block, or no room for another promise")
    return keep_pb2.Kept(
        tokens=kept.tokens,
        tier=kept.tier.name.lower(),
        duration=duration_from_seconds(kept.seconds),
    )


def _terms(transfer_id: str, keep: decode_pb2.Keep) -> KeepTerms:
    return KeepTerms(transfer_id, keep.owner, seconds_from_duration(keep.duration))


def _keep_violations(keep: decode_pb2.Keep) -> dict[str, str]:
    violations: dict[str, str] = {}
    if not keep.owner or salt_violations(keep.owner):
        violations["keep.owner"] = "must be as the router sets it"
    if not 0 <= seconds_from_duration(keep.duration) <= KEEP_MAX_S:
        violations["keep.duration"] = f"must be at most {KEEP_MAX_S} s"
    return violations
