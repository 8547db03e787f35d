"""Statuses of etcd and what follows from them."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from headrace_common.access.credentials import TlsFiles
from headrace_common.errors import RegistryUnavailable
from headrace_registry.store.etcd_client import EtcdAccess, EtcdClient
from headrace_registry.store.etcd_table import EtcdTable
from tests.ports import free_port


class RefusingEtcd(EtcdClient):
    """An etcd that ends every call with a status."""

    def __init__(self, code: str, details: str = "as a test wants it") -> None:
        super().__init__(EtcdAccess((f"127.0.0.1:{free_port()}",), 1.0, TlsFiles()))
        none = grpc.aio.Metadata()
        self._error = grpc.aio.AioRpcError(grpc.StatusCode[code], none, none, details)

    async def call(self, *arguments: Any, **options: Any) -> Any:
        async def refuse(*call: Any) -> None:
            raise self._error

        return await self.at_endpoints(refuse)


@pytest.mark.parametrize(
    ("code", "details", "remedy"),
    [
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", "etcdctl alarm disarm"),
        ("PERMISSION_DENIED", "etcdserver: permission denied", "check its user"),
        ("UNAVAILABLE", "etcdserver: no leader", "does it have a leader"),
    ],
)
async def test_the_remedy_fits_the_cause(code: str, details: str, remedy: str) -> None:
    with pytest.raises(RegistryUnavailable, match=details) as caught:
        await RefusingEtcd(code, details).call()
    assert remedy in caught.value.detail


async def test_a_lease_with_keys_that_the_user_may_not_read_has_no_member() -> None:
    # Newer versions of etcd check the permission for the keys of a lease.
    assert not await EtcdTable(RefusingEtcd("PERMISSION_DENIED"), "/mine/").has_member(7)
    with pytest.raises(RegistryUnavailable):
        await EtcdTable(RefusingEtcd("UNAVAILABLE"), "/mine/").has_member(7)
