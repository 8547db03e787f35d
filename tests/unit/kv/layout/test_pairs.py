"""Pairs of workers that cannot hand KV over, with the fields that differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.registry.v1 import registry_pb2
from headrace_kv.compatibility import PairSide, pair_faults, pair_faults_of
from headrace_kv.layout import CacheGroup, KvLayout, layout_to_proto

LAYOUT = KvLayout.attention(
    model="m:1",
    dtype="float32",
    layer_count=2,
    kv_head_count=4,
    block_tokens=16,
    parts={"k": 256, "v": 256},
)


def of_blocks(block_tokens: int, block_format: str) -> KvLayout:
    return KvLayout.attention(
        model="m:1",
        dtype="float32",
        layer_count=2,
        kv_head_count=4,
        block_tokens=block_tokens,
        parts={"k": 256, "v": 256},
        block_format=block_format,
    )


def side(name: str, layout: KvLayout = LAYOUT, transport: str = "mooncake") -> PairSide:
    return PairSide(name, "m", layout, transport)


def test_equal_workers_have_no_fault() -> None:
    assert pair_faults([side("p")], [side("d"), side("e", transport="mooncake")]) == []


def test_what_may_differ_is_no_fault() -> None:
    other = replace(of_blocks(32, "token_outer"), tensor_parallel_size=2)
    assert pair_faults([side("p")], [side("d", other)]) == []


def test_the_identity_of_the_weights_is_named() -> None:
    (fault,) = pair_faults([side("p")], [side("d", replace(LAYOUT, model="m:2"))])
    assert fault.fields == {"model": "m:1 != m:2"}
    assert "p cannot hand KV over to d" in str(fault)
    assert "model (m:1 != m:2)" in str(fault)


def with_part(**changes: Any) -> CacheGroup:
    (group,) = LAYOUT.groups
    return replace(group, parts=(replace(group.parts[0], **changes), *group.parts[1:]))


@pytest.mark.parametrize(
    ("group", "field"),
    [
        (with_part(dtype="int8"), "attention.k.dtype"),
        (with_part(unit_bytes=8), "attention.k.unit_bytes"),
        (with_part(name="x"), "attention.parts"),
        (with_part(block_format="token_inner"), "attention.k.block_format"),
        (replace(LAYOUT.groups[0], head_count=2), "attention.head_count"),
        (replace(LAYOUT.groups[0], layers=(0,)), "attention.layers"),
        (replace(LAYOUT.groups[0], name="index"), "groups"),
    ],
)
def test_every_field_of_a_cache_is_named(group: CacheGroup, field: str) -> None:
    (fault,) = pair_faults([side("p")], [side("d", replace(LAYOUT, groups=(group,)))])
    assert field in fault.fields


def test_the_block_size_is_named_where_tokens_are_not_addressable() -> None:
    prefill, decode = side("p", of_blocks(16, "x")), side("d", of_blocks(32, "x"))
    (fault,) = pair_faults([prefill], [decode])
    assert fault.fields == {"attention.block_tokens": "16 != 32"}


def test_workers_that_are_alike_share_a_fault() -> None:
    decodes = [side(f"d{n}", replace(LAYOUT, model="m:2")) for n in range(9)]
    (fault,) = pair_faults([side("q"), side("p")], decodes)
    assert fault.prefill_ids == ("p", "q")
    assert len(fault.decode_ids) == 9
    assert "d0, d1, d2, d3 and 5 more" in str(fault)


def test_workers_of_different_models_are_no_pair() -> None:
    other = PairSide("d", "n", replace(LAYOUT, model="n:1"), "in_memory")
    assert pair_faults([side("p")], [other]) == []


def test_pairs_are_found_among_the_members_of_a_registry() -> None:
    role = registry_pb2.Member
    members = [
        role(worker_id="r", role=role.ROLE_ROUTER),
        role(worker_id="p", role=role.ROLE_PREFILL, layout=layout_to_proto(LAYOUT)),
        role(
            worker_id="d",
            role=role.ROLE_DECODE,
            layout=layout_to_proto(replace(LAYOUT, model="m:2")),
        ),
    ]
    (fault,) = pair_faults_of(members)
    assert (fault.prefill_ids, fault.decode_ids) == (("p",), ("d",))
