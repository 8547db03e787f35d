"""The messages with which an attempt asks a decode and a prefill worker, and the error of a lost one. Pure."""

from __future__ import annotations

from copy import deepcopy
from typing import Final, TypeAlias

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import first_token_pb2, inference_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.errors import HeadraceError, WorkerGone
from headrace_frontend.request.validation import PreparedRequest
from headrace_kv.layout import WorkerRef
from headrace_router.placement import Decision

Policy: TypeAlias = first_token_pb2.FirstTokenPolicy.ValueType

BY_DECODE: Final = first_token_pb2.FIRST_TOKEN_POLICY_DECODE
BY_PREFILL: Final = first_token_pb2.FIRST_TOKEN_POLICY_PREFILL
FROM_HIDDEN_STATE: Final = first_token_pb2.FIRST_TOKEN_POLICY_HIDDEN


def first_token_maker(
    request: PreparedRequest, policy: registry_pb2.Policy, generated: int, attempt: int
) -> Policy:
    """The maker of the first token in attempt number `attempt`, from 1, if the prefill is remote.

    The client's choice overrides the policy. Decode continues a response that has tokens already. Only the first
    attempt uses a hidden state: a later attempt must not depend on what was lost once.
    """
    if generated:
        return BY_DECODE
    wanted = request.first_token or policy.first_token or BY_PREFILL
    if wanted == BY_PREFILL or (wanted == FROM_HIDDEN_STATE and attempt == 1):
        return wanted
    # Also for a value of another release, which a stored policy may have.
    return BY_DECODE


def begins_early(request: decode_pb2.GenerateRequest, decision: Decision) -> bool:
    """Whether prefill may begin while decode allocates the blocks.

    Not where decode has a part of the prompt, which prefill may fetch. Not with a constraint, which decode may reject.
    """
    constrained = request.sampling.HasField("structured_outputs")
    return decision.remote and not decision.decode_cached_tokens and not constrained


def prefill_task(
    request: decode_pb2.GenerateRequest,
    token_ids: inference_pb2.TokenIds,
    decision: Decision,
    *,
    start_token: int,
    end_token: int,
    first_token: Policy,
    traceparent: str,
) -> prefill_pb2.PrefillTask:
    """The task that computes the KV cache for `request` and its tokens, of the reservation's [start_token, end_token).

    Its terms have the images. Decode computes the KV cache of the last token itself when it makes the first token, and
    that of more tokens if it says so.
    """
    worker = decision.worker
    sampling = None
    if first_token == BY_PREFILL:
        sampling = deepcopy(request.sampling)
        sampling.stop_token_ids.extend(request.stop_token_ids)
    task = prefill_pb2.PrefillTask(
        transfer_id=request.transfer_id,
        request_id=request.request_id,
        token_ids=token_ids.ids,
        start_token=start_token,
        decode_worker_id=worker.ref.worker_id,
        decode_incarnation=worker.ref.incarnation,
        decode_endpoint=worker.endpoint,
        traceparent=traceparent,
        sampling=sampling,
        send_hidden_state=first_token == FROM_HIDDEN_STATE,
        cache_salt=request.cache_salt,
        adapter=request.adapter if request.HasField("adapter") else None,
        bounds=request.bounds if request.HasField("bounds") else None,
    )
    if request.computes_from and end_token == request.computes_from:
        del task.token_ids[end_token:]
    elif first_token == BY_DECODE:
        del task.token_ids[-1]
    return task


def worker_gone(ref: WorkerRef, problem: str, cause: HeadraceError) -> WorkerGone:
    """Names the decode worker."""
    metadata = {**cause.metadata, "worker_id": ref.worker_id}
    return WorkerGone(f"decode worker {ref} {problem}", metadata=metadata)
