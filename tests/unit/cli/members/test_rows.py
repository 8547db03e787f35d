"""The prefix faults that `headrace workers` reports."""

from __future__ import annotations

from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_cli.members import Row, prefix_faults

Role = registry_pb2.Member.Role


def row(name: str, key: int, size: int = 16, *, router: bool = False) -> Row:
    member = registry_pb2.Member(
        worker_id=name,
        role=Role.ROLE_ROUTER if router else Role.ROLE_DECODE,
        layout=layout_pb2.KvLayout(groups=[layout_pb2.CacheGroup(block_tokens=16)]),
    )
    return Row(member, hashing=worker_pb2.KvHashing(key_fingerprint=key, block_tokens=size))


def test_workers_that_hash_prefixes_differently_are_named() -> None:
    rows = [
        row("r0", 0xA, 0, router=True),
        row("good", 0xA),
        row("silent", 0, 0),
        row("foreign", 0xB),
        row("odd", 0xA, 32),
    ]
    assert prefix_faults(rows) == [
        "foreign gets no credit for its cache: it hashes prefixes under key 0000000b, but routers under 0000000a",
        "odd gets no credit for its cache: it hashes prefixes in blocks of 32 tokens, but routers of 16",
    ]


def test_without_a_router_no_fault_is_reported() -> None:
    assert prefix_faults([row("r0", 0, 0, router=True), row("w", 0xB)]) == []
