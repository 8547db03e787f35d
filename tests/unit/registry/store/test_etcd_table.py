"""Answers of etcd that the installed version does not give."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from headrace_registry.store.etcd_table import EtcdTable


class _Refused(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    def __init__(self, status: grpc.StatusCode) -> None:
        self._status = status

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return "as a test wants it"


# grpc.Call is abstract in methods that no caller uses here.
_Refused.__abstractmethods__ = frozenset()


class _Client:
    def __init__(self, status: grpc.StatusCode) -> None:
        self._status = status

    def get_lease_info(self, lease: int) -> Any:
        raise _Refused(self._status)


def test_a_lease_with_keys_that_the_user_may_not_read_has_no_member() -> None:
    # Newer versions of etcd check the permission for the keys of a lease.
    assert not EtcdTable(_Client(grpc.StatusCode.PERMISSION_DENIED), "/mine/").has_member(7)
    with pytest.raises(grpc.RpcError):
        EtcdTable(_Client(grpc.StatusCode.UNAVAILABLE), "/mine/").has_member(7)
