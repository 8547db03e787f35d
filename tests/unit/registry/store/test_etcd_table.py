"""Answers of etcd that the installed version does not give."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from headrace_registry.store.etcd_table import EtcdTable


class _Refused(grpc.RpcError, grpc.Call):
    """gRPC's errors are calls too. Only `code` is called here."""

    def __init__(self, status: grpc.StatusCode) -> None:
        self._status = status

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return "as a test wants it"

    def initial_metadata(self) -> Any: ...

    def trailing_metadata(self) -> Any: ...

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> float:
        return 0.0

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: Any) -> bool:
        return False


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
