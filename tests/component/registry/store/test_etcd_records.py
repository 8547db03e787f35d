"""Records that other programs change: corrupt ones are skipped, and lost ones are logged."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.registry.v1 import registry_pb2
from headrace_common.config import ServiceConfig
from headrace_common.errors import NotFound
from headrace_common.telemetry import schema
from headrace_registry.main import recorded_metrics
from headrace_registry.store.etcd_store import EtcdStore
from tests.collector import collecting
from tests.component.registry.harness import EtcdServer, kv_descriptor, reference, worker
from tests.ports import free_port
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.etcd

GARBAGE = b"\xff\xff\xff"


async def put(store: EtcdStore, key: str, value: bytes, **options: Any) -> None:
    """Writes a key of the store as another program would."""
    await store._connection.call(
        lambda client: client.put(f"{store._prefix}{key}", value, **options)
    )


async def test_corrupt_records_are_skipped_and_counted(
    shared_etcd: EtcdServer, etcd_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = shared_etcd.store(etcd_prefix)
    await store.start()
    registration = await store.register(worker("decode-0"), 30)
    await store.put_descriptor(registration.lease_id, reference(worker()), kv_descriptor())
    await store.set_policy(registry_pb2.Policy(retry_budget=5), 0)
    wrong_policy = registry_pb2.Policy(retry_budget=1_000).SerializeToString()
    corrupt = {
        "members/decode-1": GARBAGE,
        # Valid messages with invalid content.
        "members/decode-2": worker("another-id").SerializeToString(),
        "members/decode-3": registry_pb2.Member(worker_id="decode-3").SerializeToString(),
        "descriptors/decode-0/0000000000000009": GARBAGE,
        "policy": wrong_policy,
        "prefix_hash_key": b"secret, but no number",
    }
    for key, value in corrupt.items():
        await put(store, key, value)
    await until(
        lambda: store.corrupt_record_count == len(corrupt), PATIENCE_S, "the corrupt records"
    )
    # This registry and one that starts now serve the other records.
    other = shared_etcd.store(etcd_prefix)
    await other.start()
    assert other.corrupt_record_count == len(corrupt)
    for one in (store, other):
        assert set(one.feed.members) == {"decode-0"}
        assert await one.get_descriptor(reference(worker())) == kv_descriptor()
    # The last valid policy stays in force.
    assert store.feed.policy.policy.retry_budget == 5
    for key in corrupt:
        assert f"{key!r} in etcd is corrupt" in caplog.text
    assert "secret" not in caplog.text
    with pytest.raises(NotFound):
        await store.get_descriptor(
            registry_pb2.MemberRef(worker_id="decode-0", incarnation="0000000000000009")
        )
    # New writes replace corrupt records.
    for number in (1, 2, 3):
        await store.register(worker(f"decode-{number}"), 30)
    assert await store.ensure_prefix_hash_key(77) == 77
    await store.set_policy(registry_pb2.Policy(retry_budget=6), store.feed.policy.revision)
    await until(lambda: store.corrupt_record_count == 1, PATIENCE_S, "the replaced records")
    await store._connection.call(
        lambda client: client.delete(f"{etcd_prefix}descriptors/decode-0/0000000000000009")
    )
    await until(lambda: not store.corrupt_record_count, PATIENCE_S, "the deleted record")
    await store.close()
    await other.close()


async def test_corrupt_records_are_a_metric(shared_etcd: EtcdServer, etcd_prefix: str) -> None:
    store = shared_etcd.store(etcd_prefix)
    await store.start()
    async with (
        collecting() as (collector, endpoint),
        recorded_metrics(store, ServiceConfig(otlp_endpoint=endpoint)) as metrics,
    ):

        async def exported(count: int) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while collector.value(schema.METRIC_CORRUPT_RECORDS) != count:
                    await asyncio.to_thread(metrics.force_flush)

        await exported(0)
        await put(store, "members/decode-1", GARBAGE)
        await exported(1)
    await store.close()


async def test_lost_data_is_logged(etcd: EtcdServer, caplog: pytest.LogCaptureFixture) -> None:
    store = etcd.store()
    await store.start()
    await store.register(worker("decode-0"), 60)
    await store.register(worker("decode-1"), 60)
    etcd.kill()
    # The same member of the same cluster, without its data.
    etcd.folder = etcd.folder.parent / "other"
    await asyncio.to_thread(etcd.start)
    await until(lambda: "its revision went back" in caplog.text, PATIENCE_S, "the message")
    assert "2 members are missing" in caplog.text
    etcd.kill()
    etcd.folder = etcd.folder.parent / "third"
    # Members with other addresses are another cluster.
    etcd.peer_port = free_port()
    await asyncio.to_thread(etcd.start)
    await until(lambda: "it is another cluster" in caplog.text, PATIENCE_S, "the message")
    await store.close()
