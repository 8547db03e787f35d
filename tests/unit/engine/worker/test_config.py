"""Settings of a process with several workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.registry.v1 import registry_pb2
from headrace_engine.worker.config import WorkerConfig, engine_config, worker_configs, worker_member
from headrace_kv.layout import KvLayout, WorkerRef
from headrace_kv.tiers.tiers import TierSettings

FLEET = {"worker_id": "w", "workers_per_process": 4, "model": "sim"}
POOL = {"kv_pool_address": "127.0.0.1:1"}


def config(**settings: Any) -> WorkerConfig:
    return WorkerConfig.model_validate(FLEET | settings)


def test_each_worker_has_its_name_and_its_share_of_the_memory() -> None:
    workers = worker_configs(config(kv_cache_gib=2.0, port_file="ports"))
    assert [worker.worker_id for worker in workers] == ["w-0", "w-1", "w-2", "w-3"]
    assert {
        (worker.workers_per_process, worker.port_file, worker.kv_cache_gib) for worker in workers
    } == {(1, "", 0.5)}


def test_a_single_worker_keeps_its_settings() -> None:
    alone = config(workers_per_process=1, model="/m", internal_listen="127.0.0.1:7003")
    assert worker_configs(alone) == (alone,)


@pytest.mark.parametrize(("lease_s", "member_s"), [(0.4, 3.0), (5, 10), (299, 300)])
def test_the_registry_waits_twice_as_long_as_a_lease(lease_s: float, member_s: float) -> None:
    assert config(lease_ttl_s=lease_s).member_ttl_s == member_s


def test_a_member_has_its_place() -> None:
    layout = KvLayout.attention(
        model="sim",
        dtype="float32",
        layer_count=1,
        kv_head_count=1,
        block_tokens=16,
        parts={"k": 4},
    )
    engine: Any = SimpleNamespace(descriptor=SimpleNamespace(layout=layout), max_model_len=1)
    ref = WorkerRef("w", "1")
    for labels, place in (
        (
            {"place": "zone=eu-1a, rack=R_7, host=h"},
            registry_pb2.Place(zone="eu-1a", rack="R_7", host="h"),
        ),
        ({}, registry_pb2.Place()),
    ):
        member = worker_member(
            config(**labels),
            role=registry_pb2.Member.ROLE_DECODE,
            ref=ref,
            endpoint="127.0.0.1:1",
            http_endpoint="",
            engine=engine,
            adapters=(),
            start_unix_ns=1,
        )
        assert member.place == place
        assert member.HasField("place") == bool(labels)


def test_blocks_on_disk_have_a_folder() -> None:
    alone = WorkerConfig.model_validate(
        {"worker_id": "w", "model": "m", "kv_host_gib": 1, "kv_disk_gib": 2, "kv_disk_folder": "/n"}
    )
    ref = WorkerRef("w", "1")
    tiers = engine_config(alone, role="decode", ref=ref).tiers
    assert tiers == TierSettings(1, 2, "/n", pool_timeout_s=2)


def test_prefill_workers_store_blocks_in_the_pool_and_decode_workers_do_not() -> None:
    worker = WorkerConfig.model_validate(
        FLEET
        | {"workers_per_process": 1, "kv_host_gib": 1, "kv_pool_address": "10.0.0.1:2"}
        | {"kv_fetch_timeout_s": 3}
    )
    ref = WorkerRef("w", "1")
    prefill = engine_config(worker, role="prefill", ref=ref).tiers
    assert (prefill.pool_address, prefill.pool_timeout_s) == ("10.0.0.1:2", 3)
    assert prefill.pooled
    assert prefill.publishes
    assert not engine_config(worker, role="decode", ref=ref).tiers.publishes


@pytest.mark.parametrize(
    "settings,remedy",
    [
        ({"model": "/m"}, "set model to sim, or start 4 processes"),
        ({"internal_listen": "127.0.0.1:7003"}, "give internal_listen the port 0"),
        ({"health_listen": "0.0.0.0:7059"}, "give health_listen the port 0"),
        ({"internal_advertise": "127.0.0.1:7003"}, "give internal_advertise the port 0"),
        ({"worker_id": "w" * 62}, "choose a shorter worker_id"),
        ({"kv_disk_gib": 2.0}, "kv_disk_gib is 2 without kv_host_gib"),
        (POOL, "kv_pool_address is set without kv_host_gib"),
        ({"kv_host_gib": 1, "kv_pool_address": "store"}, "kv_pool_address: write it as host:port"),
        (POOL | {"kv_host_gib": 1}, "set workers_per_process to 1, or leave kv_pool_address empty"),
        ({"place": "zone=a b"}, r"place\s.*give at most 63 characters"),
        ({"place": f"rack={'z' * 64}"}, r"place\s.*give at most 63 characters"),
        ({"place": "eu-1a"}, r"place\s.*give each of zone, rack and host once"),
        ({"place": "zone=a,zone=b"}, r"place\s.*give each of zone, rack and host once"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValidationError, match=remedy):
        config(**settings)
