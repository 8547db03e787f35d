"""Who makes a request's first token. Pure."""

from __future__ import annotations

from headrace.inference.v1 import first_token_pb2
from headrace.registry.v1 import registry_pb2
from headrace_router.placement import Decision
from headrace_router.validate import PreparedRequest


def made_by_prefill(
    request: PreparedRequest, policy: registry_pb2.Policy, decision: Decision, generated_tokens: int
) -> bool:
    """Whether the next attempt's prefill worker is to make it: what the client says counts, else the policy.

    Decode workers make it of what they prefill themselves; once a token is generated there is none to make.
    """
    if not decision.remote or generated_tokens:
        return False
    wanted = request.first_token or policy.first_token
    return wanted == first_token_pb2.FIRST_TOKEN_POLICY_PREFILL
