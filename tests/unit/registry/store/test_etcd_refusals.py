"""Statuses of etcd and what follows from them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from headrace_common.access.credentials import TlsFiles
from headrace_common.errors import RegistryUnavailable
from headrace_registry.store.etcd_connection import EtcdConnection
from headrace_registry.store.etcd_endpoint import EtcdAccess, EtcdEndpoint
from headrace_registry.store.etcd_table import EtcdTable
from tests.ports import free_port


def refusal(code: str, details: str) -> grpc.aio.AioRpcError:
    """A status that etcd sends."""
    return grpc.aio.AioRpcError(
        grpc.StatusCode[code], grpc.aio.Metadata(), grpc.aio.Metadata(), details
    )


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

    async def call(endpoint: EtcdEndpoint) -> None:
        raise refusal(code, details)

    try:
        with pytest.raises(RegistryUnavailable, match=details) as caught:
            await connection.call(call)
        assert remedy in caught.value.detail
    finally:
        await connection.close()


async def test_a_lease_with_keys_that_the_user_may_not_read_has_no_member() -> None:
    # Newer versions of etcd check the permission for the keys of a lease.
    async def has_member(code: str) -> bool:
        async def refuse(*_: object) -> None:
            raise refusal(code, "as a test wants it")

        endpoint: Any = SimpleNamespace(call=refuse)
        return await EtcdTable(endpoint, "/mine/").has_member(7)

    assert not await has_member("PERMISSION_DENIED")
    with pytest.raises(grpc.aio.AioRpcError):
        await has_member("UNAVAILABLE")
