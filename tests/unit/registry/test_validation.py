"""Valid and invalid requests of the registry."""

from __future__ import annotations

import math

import pytest
from google.protobuf.duration_pb2 import Duration

from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.limits import DESCRIPTOR_BYTES_MAX
from headrace_registry import validation
from tests.component.registry.harness import kv_descriptor, kv_layout, worker


@pytest.mark.parametrize(
    "field,value",
    [
        ("worker_id", ""),
        ("worker_id", "x" * 64),
        ("worker_id", "a/b"),
        ("incarnation", "0" * 15),
        ("incarnation", "G" * 16),
        ("role", registry_pb2.Member.ROLE_UNSPECIFIED),
        ("role", 17),
        ("endpoint", "host"),
        ("endpoint", "host:0"),
        ("endpoint", "a b:1"),
        ("client_endpoint", "host:0"),
        ("http_endpoint", "host:0"),
        ("model", ""),
        ("model", "m" * 256),
        ("transport", "t" * 64),
        ("version", "v" * 64),
        ("version", "0.2\n"),
        ("max_model_len", 0),
        ("max_num_seqs", 0),
        ("start_unix_ns", 0),
    ],
)
def test_each_wrong_field_is_named(field: str, value: str | int | bytes) -> None:
    member = worker()
    setattr(member, field, value)
    assert set(validation.member_violations(member, "member")) == {f"member.{field}"}


def test_a_workers_place_is_checked() -> None:
    record = worker()
    record.place.rack = "r 1"
    assert list(validation.member_violations(record, "member")) == ["member.place.rack"]


def test_a_workers_layout_is_checked() -> None:
    member = worker()
    group = layout_pb2.CacheGroup(
        name="g",
        layers=[1],
        kind=layout_pb2.CacheGroup.KIND_STATE,
        block_tokens=3,
        parts=[layout_pb2.Part(name="ssm", block_format="token_outer")],
    )
    layout = layout_pb2.KvLayout(
        model="m", tensor_parallel_size=1, groups=[group, layout_pb2.CacheGroup()]
    )
    member.layout.CopyFrom(layout)
    first, second = "member.layout.groups[0]", "member.layout.groups[1]"
    assert set(validation.member_violations(member, "member")) == {
        "member.layout.stage_starts",
        "member.layout.groups",
        f"{first}.head_count",
        f"{first}.block_tokens",
        f"{first}.parts[0].dtype",
        f"{first}.parts[0].unit_bytes",
        f"{second}.name",
        f"{second}.head_count",
        f"{second}.kind",
        f"{second}.parts",
    }


def test_a_descriptor_needs_every_rank_in_order() -> None:
    descriptor = kv_descriptor()
    descriptor.layout.CopyFrom(kv_layout(tensor_parallel_size=2))
    assert "descriptor.ranks" in validation.descriptor_violations(descriptor, "descriptor")
    descriptor.ranks.add().CopyFrom(descriptor.ranks[0])
    descriptor.ranks[1].rank = 1
    assert validation.descriptor_violations(descriptor, "descriptor") == {}
    del descriptor.ranks[0].regions[:]
    descriptor.ranks[1].session = ""
    assert set(validation.descriptor_violations(descriptor, "descriptor")) == {
        "descriptor.ranks[0].regions",
        "descriptor.ranks[1].session",
    }


def test_a_descriptor_has_a_size_limit() -> None:
    descriptor = kv_descriptor()
    descriptor.ranks[0].session = "s" * DESCRIPTOR_BYTES_MAX
    assert "descriptor" in validation.descriptor_violations(descriptor, "descriptor")


@pytest.mark.parametrize(
    "seconds,nanos,good",
    [(1, 0, True), (300, 0, True), (0, 999_999_999, False), (300, 1, False), (-5, 0, False)],
)
def test_the_ttl_is_bounded(seconds: int, nanos: int, good: bool) -> None:
    ttl = Duration(seconds=seconds, nanos=nanos)
    assert (validation.ttl_violations(ttl, "ttl") == {}) is good


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        (registry_pb2.Policy(retry_budget=11), "retry_budget"),
        (registry_pb2.Policy(overlap_weight=-0.1), "overlap_weight"),
        (registry_pb2.Policy(overlap_weight=math.nan), "overlap_weight"),
        (registry_pb2.Policy(temperature=10.5), "temperature"),
        (registry_pb2.Policy(far_weight=-1), "far_weight"),
        (registry_pb2.Policy(divide_gain=1.1), "divide_gain"),
        (registry_pb2.Policy(far_weight=math.inf), "far_weight"),
        (registry_pb2.Policy(pair_level=4), "pair_level"),  # type: ignore[arg-type]
        (registry_pb2.Policy(pair_rule=3), "pair_rule"),  # type: ignore[arg-type]
        (registry_pb2.Policy(max_queue_wait=Duration(seconds=-1)), "max_queue_wait"),
        (registry_pb2.Policy(max_queue_wait=Duration(seconds=3_601)), "max_queue_wait"),
        (registry_pb2.Policy(ttft_target=Duration(seconds=0)), "ttft_target"),
        (registry_pb2.Policy(ttft_target=Duration(seconds=3_601)), "ttft_target"),
        (registry_pb2.Policy(tpot_target=Duration(seconds=0)), "tpot_target"),
        (registry_pb2.Policy(tpot_target=Duration(seconds=3_601)), "tpot_target"),
        (registry_pb2.Policy(tenant_weights={"batch": 0.0}), "tenant_weights[batch]"),
        (registry_pb2.Policy(tenant_weights={"No Name": 1.0}), "tenant_weights[No Name]"),
        (registry_pb2.Policy(tenant_priorities={"chat": 0}), "tenant_priorities[chat]"),  # type: ignore[dict-item]
        (registry_pb2.Policy(tenant_priorities={"No Name": 1}), "tenant_priorities[No Name]"),  # type: ignore[dict-item]
        (registry_pb2.Policy(worker_roles={"w0": 0}), "worker_roles[w0]"),  # type: ignore[dict-item]
        (registry_pb2.Policy(worker_roles={"w0": 4}), "worker_roles[w0]"),  # type: ignore[dict-item]
        (registry_pb2.Policy(worker_roles={"No Name": 1}), "worker_roles[No Name]"),  # type: ignore[dict-item]
    ],
)
def test_an_invalid_policy_is_rejected_by_field(policy: registry_pb2.Policy, field: str) -> None:
    assert list(validation.policy_violations(policy, "policy")) == [f"policy.{field}"]
