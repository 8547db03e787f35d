"""The roles of a deployment, and the caller of the RPC that is being handled."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from headrace_common.errors import PermissionDenied

TOKEN_KEY: Final = "headrace-token"
"""The metadata key of role tokens. API keys of clients have `authorization`."""
PROOF_KEY: Final = "headrace-proof"
"""The metadata key of the proof that the holder of the token has signed for this receiver."""
REGISTRY_AUDIENCE: Final = "role registry"
"""The registry, as the receiver of proofs. No endpoint has a space."""
STATUS_AUDIENCE: Final = "status page"
"""The receiver of proofs that browsers send."""


class Role(StrEnum):
    """What a credential stands for. The value stands in certificates and tokens."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    WORKER = "worker"
    """A worker of both roles. It may what PREFILL and DECODE may."""
    REGISTRY = "registry"
    OPERATOR = "operator"
    PLANNER = "planner"
    """Reads the load of a deployment. It changes nothing there."""
    GATEWAY = "gateway"
    """An HTTP gateway that asks the Endpoint Picker."""


ALL_ROLES: Final = frozenset(Role)


@dataclass(frozen=True, slots=True)
class Caller:
    """The proven identity of a caller. An empty `name` means that the credential names no worker."""

    roles: frozenset[Role]
    name: str = ""


def caller_with(role: Role, name: str = "") -> Caller:
    """The caller with a credential of one role."""
    included = (Role.PREFILL, Role.DECODE) if role is Role.WORKER else ()
    return Caller(frozenset((role, *included)), name)


ANONYMOUS: Final = Caller(frozenset())
"""A caller of a public RPC without a credential of a role."""
TRUSTED: Final = Caller(ALL_ROLES)
"""Every caller of a service with the setting `insecure`."""

_current: ContextVar[Caller] = ContextVar("headrace_caller", default=TRUSTED)


def current_caller() -> Caller:
    """The caller of the RPC that the current task handles. TRUSTED outside a server that checks roles."""
    return _current.get()


def set_current_caller(caller: Caller) -> None:
    """Sets the caller for the rest of the current task."""
    _current.set(caller)


def require_own_name(worker_id: str) -> None:
    """Raises PermissionDenied when the current caller's credential names another member than `worker_id`."""
    caller = current_caller()
    if caller.name not in ("", worker_id):
        raise PermissionDenied(
            f"the credential is for {caller.name}, so its holder cannot act as {worker_id}",
            metadata={"worker_id": worker_id, "name": caller.name},
        )
