"""The roles that may call each RPC. An RPC that is missing here is refused to all callers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace_common.access.roles import Role

_ROUTER, _PREFILL, _DECODE = Role.ROUTER, Role.PREFILL, Role.DECODE
_OPERATOR = Role.OPERATOR
_MEMBERS = (_ROUTER, _PREFILL, _DECODE)

PUBLIC: Final = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/List",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        # API keys guard these, where api_keys_file names some.
        "/headrace.inference.v1.InferenceService/Generate",
        "/headrace.inference.v1.InferenceService/ListModels",
        "/headrace.inference.v1.InferenceService/Prefill",
        "/headrace.inference.v1.InferenceService/Route",
        # The handler requires the role router or a router's ticket.
        "/headrace.decode.v1.DecodeService/Generate",
        # Stock vLLM has no credentials: docs/stock-vllm.md.
        "/headrace.kv.v1.PairService/Describe",
        "/headrace.kv.v1.PairService/Fetch",
    }
)
"""RPCs that need no role."""

_BY_SERVICE: Final[Mapping[str, Mapping[str, tuple[Role, ...]]]] = {
    "headrace.registry.v1.RegistryService": {
        "Register": _MEMBERS,
        "KeepAlive": _MEMBERS,
        "Deregister": _MEMBERS,
        "Watch": (*_MEMBERS, _OPERATOR),
        "ListMembers": (*_MEMBERS, _OPERATOR),
        # Prefill workers write into the memory of decode workers, and no worker into theirs.
        "PutKvDescriptor": (_DECODE,),
        "GetKvDescriptor": (_PREFILL,),
        "GetPolicy": (*_MEMBERS, _OPERATOR),
        "SetPolicy": (_OPERATOR,),
    },
    "headrace.prefill.v1.PrefillQueueService": {"Pull": (_PREFILL,)},
    "headrace.inference.v1.TraceService": {"GetTrace": (_OPERATOR,), "ListTraces": (_OPERATOR,)},
    "opentelemetry.proto.collector.trace.v1.TraceService": {"Export": _MEMBERS},
    "headrace.decode.v1.DecodeService": {"SetFirstToken": (_ROUTER,)},
    "headrace.kv.v1.HandoffService": {"Handoff": (_PREFILL,)},
    "headrace.worker.v1.WorkerService": {
        "WatchStatus": (_ROUTER, _OPERATOR),
        "SubscribeKvEvents": (_ROUTER,),
        "ResetPrefixCache": (_OPERATOR,),
        "Drain": (_OPERATOR,),
    },
}

_ROLES: Final[Mapping[str, frozenset[Role]]] = {
    f"/{service}/{name}": frozenset(roles)
    for service, methods in _BY_SERVICE.items()
    for name, roles in methods.items()
}

GUARDED: Final = frozenset(_ROLES)
"""RPCs that need a role."""


def roles_of(method: str) -> frozenset[Role]:
    """The roles that may call a method, such as "/package.Service/Method". Empty for an unknown one."""
    return _ROLES.get(method, frozenset())
