"""Classes of requests: their weights, and which of them a tenant may use. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from headrace.inference.v1 import priority_pb2
from headrace_common.errors import InvalidRequest, PermissionDenied


class Priority(IntEnum):
    """A class. The smaller value goes first among equals."""

    HIGH = priority_pb2.PRIORITY_HIGH
    NORMAL = priority_pb2.PRIORITY_NORMAL
    LOW = priority_pb2.PRIORITY_LOW

    @property
    def label(self) -> str:
        """Its name in messages, metrics and traces."""
        return _LABELS[self]

    @property
    def weight(self) -> int:
        """Its weight in the shares of scarce capacity."""
        return _WEIGHTS[self]

    @classmethod
    def from_proto(cls, value: int) -> Priority:
        """The class of a message. Raises InvalidRequest for a value that is not a class."""
        if value == priority_pb2.PRIORITY_UNSPECIFIED:
            return cls.NORMAL
        try:
            return cls(value)
        except ValueError:
            raise InvalidRequest({"priority": "must be one of the named values"}) from None

    def to_proto(self) -> priority_pb2.Priority.ValueType:
        """The value for a message. A normal request has none."""
        if self is Priority.NORMAL:
            return priority_pb2.PRIORITY_UNSPECIFIED
        return priority_pb2.Priority.ValueType(self.value)


_LABELS: Final = {one: one.name.lower() for one in Priority}
_WEIGHTS: Final = {Priority.HIGH: 16, Priority.NORMAL: 4, Priority.LOW: 1}


def permitted_priority(
    requested: int, tenant: str, grants: Mapping[str, priority_pb2.Priority.ValueType]
) -> Priority:
    """The class of a tenant's request. `grants` has the highest class of tenants; NORMAL for the others.

    A request that names no class gets the normal one, or the tenant's highest if that is lower. Raises PermissionDenied
    for a class above the tenant's, and InvalidRequest for an unknown one.
    """
    highest = Priority.from_proto(grants.get(tenant, priority_pb2.PRIORITY_UNSPECIFIED))
    if requested == priority_pb2.PRIORITY_UNSPECIFIED:
        return max(Priority.NORMAL, highest)
    priority = Priority.from_proto(requested)
    if priority < highest:
        allowed = ", ".join(one.label for one in Priority if one >= highest)
        raise PermissionDenied(
            f"priority: {priority.label} is not granted to tenant {tenant}; use {allowed}, or ask the operator to set "
            f"tenant_priorities.{tenant} of the policy",
            metadata={"field": "priority", "tenant": tenant, "allowed": allowed},
        )
    return priority
