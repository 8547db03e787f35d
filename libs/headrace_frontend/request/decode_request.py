"""The request to a decode worker. Pure."""

from __future__ import annotations

from array import array

from headrace.decode.v1 import decode_pb2
from headrace_common.registry.adapters import adapter_to_proto
from headrace_common.rpc.token_ids import token_ids_message
from headrace_frontend.promises import terms_to_proto
from headrace_frontend.request.validation import PreparedRequest


def decode_request(
    request: PreparedRequest,
    transfer_id: str,
    generated: tuple[int, ...] = (),
    *,
    incarnation: str,
    remote_prefill: bool,
) -> decode_pb2.GenerateRequest:
    """The request to one incarnation of a decode worker, without a ticket, for a first token from decode.

    `generated` is the completion so far.
    """
    call = decode_pb2.GenerateRequest(
        request_id=request.request_id,
        transfer_id=transfer_id,
        incarnation=incarnation,
        token_ids=token_ids_message(request.token_ids + array("I", generated)).ids,
        generated_token_count=len(generated),
        sampling=request.sampling,
        stop_token_ids=request.stop_token_ids,
        remote_prefill=remote_prefill,
        cache_salt=request.cache_salt,
        tenant_salt=request.tenant_salt,
        adapter=None if request.adapter is None else adapter_to_proto(request.adapter),
        priority=request.priority.to_proto(),
        keep=None if request.keep_s is None else terms_to_proto(request.tenant, request.keep_s),
        images=request.images,
    )
    if generated:
        # They came with the first token.
        call.sampling.ClearField("prompt_logprobs")
    return call
