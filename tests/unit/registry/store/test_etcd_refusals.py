"""Statuses of etcd and what follows from them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from headrace_common.access.credentials import TlsFiles
from headrace_common.errors import RegistryUnavailable
from headrace_registry.store.etcd_connection import EtcdConnection
from headrace_registry.store.etcd_endpoint import EtcdAccess
from headrace_registry.store.etcd_table import EtcdTable
from tests.ports import free_port


class Refusal(grpc.RpcError):
    """A status that etcd sends."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__()
        self._status = (code, details)

    def code(self) -> grpc.StatusCode:
        return self._status[0]

    def details(self) -> str:
        return self._status[1]


grpc.Call.register(Refusal)


@pytest.mark.parametrize(
    ("code", "details", "remedy"),
    [
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", "etcdctl alarm disarm"),
        ("PERMISSION_DENIED", "etcdserver: permission denied", "check its user"),
        ("UNAVAILABLE", "etcdserver: no leader", "does it have a leader"),
    ],
)
async def test_the_remedy_fits_the_cause(code: str, details: str, remedy: str) -> None:
    connection = EtcdConnection(
        EtcdAccess((("127.0.0.1", free_port()),), timeout_s=1.0, tls=TlsFiles())
    )

    def call(client: Any) -> None:
        raise Refusal(grpc.StatusCode[code], details)

    try:
        with pytest.raises(RegistryUnavailable, match=details) as caught:
            await connection.call(call)
        assert remedy in caught.value.detail
    finally:
        connection.close()


def test_a_lease_with_keys_that_the_user_may_not_read_has_no_member() -> None:
    # Newer versions of etcd check the permission for the keys of a lease.
    def has_member(code: grpc.StatusCode) -> bool:
        def refuse(lease: int) -> Any:
            raise Refusal(code, "as a test wants it")

        return EtcdTable(SimpleNamespace(get_lease_info=refuse), "/mine/").has_member(7)

    assert not has_member(grpc.StatusCode.PERMISSION_DENIED)
    with pytest.raises(grpc.RpcError):
        has_member(grpc.StatusCode.UNAVAILABLE)
