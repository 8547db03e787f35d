"""What a client sends to the decode worker that Route named. Clients import it, so it needs no cryptography."""

from __future__ import annotations

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2


def decode_request_of(direct: inference_pb2.DirectRequest) -> decode_pb2.GenerateRequest:
    """The request that a client sends to the decode worker, with the ticket."""
    return decode_pb2.GenerateRequest(
        request_id=direct.request_id,
        transfer_id=direct.transfer_id,
        incarnation=direct.incarnation,
        token_ids=direct.token_ids,
        sampling=direct.sampling,
        stop_token_ids=direct.stop_token_ids,
        remote_prefill=direct.remote_prefill,
        ticket=direct.ticket,
        generated_token_count=direct.generated_token_count,
        cache_salt=direct.cache_salt,
        adapter=direct.adapter if direct.HasField("adapter") else None,
        priority=direct.priority,
    )
