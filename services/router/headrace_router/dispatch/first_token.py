"""How the first token of a request is generated. Pure."""

from __future__ import annotations

from typing import Final, TypeAlias

from headrace.inference.v1 import first_token_pb2
from headrace.registry.v1 import registry_pb2
from headrace_frontend.request.validation import PreparedRequest
from headrace_router.placement import Decision

Policy: TypeAlias = first_token_pb2.FirstTokenPolicy.ValueType

BY_DECODE: Final = first_token_pb2.FIRST_TOKEN_POLICY_DECODE
BY_PREFILL: Final = first_token_pb2.FIRST_TOKEN_POLICY_PREFILL
FROM_HIDDEN_STATE: Final = first_token_pb2.FIRST_TOKEN_POLICY_HIDDEN


def first_token_maker(
    request: PreparedRequest,
    policy: registry_pb2.Policy,
    decision: Decision,
    generated_tokens: int,
    attempt: int,
) -> Policy:
    """The maker of the first token in attempt number `attempt`, from 1. The client's choice overrides the policy.

    Decode makes it after a local prefill, and continues a response that has tokens already. Only the first attempt
    uses a hidden state: a later attempt must not depend on what was lost once.
    """
    if not decision.remote or generated_tokens:
        return BY_DECODE
    wanted = request.first_token or policy.first_token or BY_DECODE
    if wanted == BY_PREFILL or (wanted == FROM_HIDDEN_STATE and attempt == 1):
        return wanted
    # Also for a value of another release, which a stored policy may have.
    return BY_DECODE
