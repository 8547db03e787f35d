"""Which class a tenant's request gets. Without a grant, no tenant gets a class above normal."""

from __future__ import annotations

import pytest

from headrace.inference.v1 import priority_pb2
from headrace_common.callers.priority import Priority, permitted_priority
from headrace_common.errors import InvalidRequest, PermissionDenied

_GRANTS = {"chat": priority_pb2.PRIORITY_HIGH, "batch": priority_pb2.PRIORITY_LOW}
_NONE = priority_pb2.PRIORITY_UNSPECIFIED


@pytest.mark.parametrize(
    "tenant,allowed,default",
    [
        ("chat", {Priority.HIGH, Priority.NORMAL, Priority.LOW}, Priority.NORMAL),
        ("other", {Priority.NORMAL, Priority.LOW}, Priority.NORMAL),
        ("default", {Priority.NORMAL, Priority.LOW}, Priority.NORMAL),
        ("batch", {Priority.LOW}, Priority.LOW),
    ],
)
def test_a_tenant_gets_the_granted_class_and_those_below(
    tenant: str, allowed: set[Priority], default: Priority
) -> None:
    assert permitted_priority(_NONE, tenant, _GRANTS) is default
    for priority in Priority:
        if priority in allowed:
            assert permitted_priority(priority, tenant, _GRANTS) is priority
            continue
        with pytest.raises(PermissionDenied) as caught:
            permitted_priority(priority, tenant, _GRANTS)
        assert caught.value.metadata["field"] == "priority"
        names = caught.value.metadata["allowed"].split(", ")
        assert names == [one.label for one in Priority if one in allowed]
        assert f"tenant_priorities.{tenant}" in caught.value.detail


@pytest.mark.parametrize("value", [-1, 4, 99])
def test_an_unknown_class_is_named(value: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        permitted_priority(value, "chat", _GRANTS)
    assert list(caught.value.violations) == ["priority"]


def test_a_class_survives_its_message_and_a_normal_one_costs_no_byte() -> None:
    for priority in Priority:
        assert Priority.from_proto(priority.to_proto()) is priority
    assert Priority.NORMAL.to_proto() == _NONE
    assert [one.weight for one in Priority] == [16, 4, 1]
