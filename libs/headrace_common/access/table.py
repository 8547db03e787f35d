"""The RPCs of each listener, and the roles that may call them. A listener refuses every RPC that is missing here."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, TypeAlias

from headrace_common.access.roles import Role


class Listener(StrEnum):
    """The addresses of a service. The value is the setting with the address."""

    CLIENT = "listen"
    """For clients. It checks no roles: its RPCs are guarded by API keys."""
    INTERNAL = "internal_listen"
    """For the services of the deployment and its operators."""
    PICKER = "endpoint_picker_listen"
    """For HTTP gateways."""
    HEALTH = "health_listen"
    """For the probes of container platforms."""


PICKER_METHOD: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
"""The RPC by which gateways ask the Endpoint Picker."""
_Methods: TypeAlias = Mapping[str, tuple[Role, ...]]

_ROUTER, _PREFILL, _DECODE = Role.ROUTER, Role.PREFILL, Role.DECODE
_OPERATOR, _PLANNER = Role.OPERATOR, Role.PLANNER
_MEMBERS = (_ROUTER, _PREFILL, _DECODE)
_EVERY_CALLER: Final = ()

_COMMON: Final[Mapping[str, _Methods]] = {
    "grpc.health.v1.Health": dict.fromkeys(("Check", "List", "Watch"), _EVERY_CALLER),
    "grpc.reflection.v1.ServerReflection": {"ServerReflectionInfo": _EVERY_CALLER},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": _EVERY_CALLER},
}

_BY_SERVICE: Final[Mapping[Listener, Mapping[str, _Methods]]] = {
    Listener.CLIENT: {
        **_COMMON,
        # API keys guard these, where api_keys_file names some.
        "headrace.inference.v1.InferenceService": dict.fromkeys(
            ("Generate", "Keep", "ListModels"), _EVERY_CALLER
        ),
    },
    Listener.INTERNAL: {
        **_COMMON,
        "headrace.inference.v1.InferenceService": {
            "ListModels": (_OPERATOR,),
            "Route": (_OPERATOR,),
            "MoveAnswer": (_OPERATOR,),
        },
        "headrace.inference.v1.AdapterService": dict.fromkeys(
            ("LoadAdapter", "UnloadAdapter"), (_OPERATOR,)
        ),
        "headrace.inference.v1.LoadService": {
            "GetLoad": (_OPERATOR, _PLANNER),
            "RecordLoad": (_OPERATOR,),
        },
        # Routers ask each other for what their clients have stored.
        "headrace.inference.v1.StoreService": {"UseEntry": (_ROUTER,)},
        "headrace.inference.v1.TraceService": dict.fromkeys(
            ("GetTrace", "ListTraces"), (_OPERATOR,)
        ),
        # Every service has it.
        "headrace.incident.v1.IncidentService": {"ListEvents": (_OPERATOR,)},
        "headrace.prefill.v1.PrefillQueueService": {"Pull": (_PREFILL,), "Enqueue": (_DECODE,)},
        "opentelemetry.proto.collector.trace.v1.TraceService": {"Export": _MEMBERS},
        "headrace.planner.v1.PlannerService": dict.fromkeys(
            ("GetStatus", "ListDecisions", "WatchTargets", "AcknowledgeTarget"), (_OPERATOR,)
        ),
        "headrace.registry.v1.RegistryService": {
            "Register": _MEMBERS,
            "KeepAlive": _MEMBERS,
            "Deregister": _MEMBERS,
            "Watch": (*_MEMBERS, _OPERATOR, _PLANNER),
            "ListMembers": (*_MEMBERS, _OPERATOR, _PLANNER),
            # Decode and prefill workers write into the memory of the prefill workers that fetch prefixes.
            "PutKvDescriptor": (_PREFILL, _DECODE),
            "GetKvDescriptor": (_PREFILL, _DECODE),
            "GetPolicy": (*_MEMBERS, _OPERATOR),
            "SetPolicy": (_OPERATOR,),
        },
        "headrace.decode.v1.DecodeService": dict.fromkeys(
            ("Link", "SetFirstToken", "Keep"), (_ROUTER,)
        ),
        # A decode worker serves prefill workers only, and a prefill worker decode workers only. One of
        # both roles serves both, where it fetches prefixes: HandoffServicer.
        "headrace.kv.v1.HandoffService": {"Handoff": (_PREFILL, _DECODE)},
        "headrace.kv.v1.PrefixService": {"SendPrefix": (_PREFILL, _ROUTER)},
        # Stock vLLM has no credentials: docs/stock-vllm.md.
        "headrace.kv.v1.PairService": {"Fetch": _EVERY_CALLER},
        "headrace.worker.v1.WorkerService": {
            "WatchStatus": (_ROUTER, _OPERATOR, _PLANNER),
            "SubscribeKvEvents": (_ROUTER,),
            "ResetPrefixCache": (_OPERATOR,),
            "Drain": (_OPERATOR,),
            # Operators ask a router, which changes all workers or none.
            "ChangeAdapter": (_ROUTER,),
        },
    },
    Listener.PICKER: {
        **_COMMON,
        "envoy.service.ext_proc.v3.ExternalProcessor": {"Process": (Role.GATEWAY,)},
    },
    # It checks no roles, and its probes have none.
    Listener.HEALTH: {"grpc.health.v1.Health": {"Check": _EVERY_CALLER}},
}

ROLES: Final[Mapping[Listener, Mapping[str, frozenset[Role]]]] = {
    listener: {
        f"/{service}/{name}": frozenset(roles)
        for service, methods in services.items()
        for name, roles in methods.items()
    }
    for listener, services in _BY_SERVICE.items()
}
"""The roles that may call each RPC of a listener, such as "/package.Service/Method"."""

# Both listeners have the methods of _COMMON, with the same roles.
_GUARDED: Final = {**ROLES[Listener.PICKER], **ROLES[Listener.INTERNAL]}


def is_served(method: str, listener: Listener) -> bool:
    """Whether a listener may serve a method. The internal one may also serve methods that no table names."""
    if method in ROLES[listener]:
        return True
    return listener is Listener.INTERNAL and not any(method in roles for roles in ROLES.values())


def needs_role(method: str) -> bool:
    """Whether the listeners with roles serve a method to callers with a role only, or not at all."""
    return _GUARDED.get(method) != frozenset()


def roles_of(method: str) -> frozenset[Role]:
    """The roles that may call a method on the listeners with roles. Empty for an unknown one."""
    return _GUARDED.get(method, frozenset())
