"""Several endpoints of one etcd."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.registry.v1 import registry_pb2
from headrace_common.errors import Conflict, RegistryUnavailable
from tests.component.registry.harness import ETCD, EtcdServer, running_cluster, worker
from tests.ports import free_port
from tests.waiting import PATIENCE_S

pytestmark = [
    pytest.mark.etcd,
    pytest.mark.skipif(not ETCD.exists(), reason=f"needs {ETCD}: apt-get install etcd-server"),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[EtcdServer]]:
    with running_cluster(tmp_path) as servers:
        yield servers


@pytest.mark.parametrize("how", ["kill", "pause"])
async def test_a_lost_endpoint_is_replaced_by_the_next(
    cluster: list[EtcdServer], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    endpoints = ",".join(f"127.0.0.1:{server.port}" for server in cluster)
    store = cluster[0].store(store=f"etcd://{endpoints}", store_start_timeout_s=20.0)
    await store.start()
    lease_id = (await store.register(worker(), 60)).lease_id
    watch = store.watch(0)
    await anext(watch)
    used = next(one for one in cluster if store._connection.endpoint.name.endswith(f":{one.port}"))
    getattr(used, how)()
    try:
        # The lost member may have been the leader. The others elect one within some seconds.
        async with asyncio.timeout(30):
            while True:
                try:
                    registration = await store.register(worker("decode-1"), 60)
                except RegistryUnavailable:
                    continue
                break
        assert await store.keep_alive(lease_id) is not None
        # The watch moves as well, and loses nothing.
        response = await asyncio.wait_for(anext(watch), PATIENCE_S)
        assert [change.member_put.worker_id for change in response.changes] == ["decode-1"]
        assert response.revision == registration.revision
        assert set(store.feed.members) == {"decode-0", "decode-1"}
        assert "serves in place of" in caplog.text
        assert "lost data" not in caplog.text
    finally:
        if how == "pause":
            used.resume()
        await store.close()


async def test_refusals_use_no_other_endpoint(shared_etcd: EtcdServer, etcd_prefix: str) -> None:
    endpoints = f"127.0.0.1:{shared_etcd.port},127.0.0.1:{free_port()}"
    store = shared_etcd.store(etcd_prefix, store=f"etcd://{endpoints}")
    await store.start()
    first = store._connection.endpoint
    await store.set_policy(registry_pb2.Policy(), 0)
    with pytest.raises(Conflict):
        await store.set_policy(registry_pb2.Policy(), 1)

    def refused(client: Any) -> None:
        client.get_response(b"")

    with pytest.raises(RegistryUnavailable, match="INVALID_ARGUMENT"):
        await store._connection.call(refused)
    assert store._connection.endpoint is first
    await store.close()
