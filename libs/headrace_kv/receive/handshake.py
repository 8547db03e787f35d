"""Checks the Hello of a prefill rank. Pure."""

from __future__ import annotations

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import ProtocolViolation, StaleIncarnation
from headrace_kv.compatibility import require_compatible
from headrace_kv.layout import KvLayout, WorkerRef, layout_from_proto
from headrace_kv.shard_map import shards


def validate_handshake(
    hello: handoff_pb2.Hello, ref: WorkerRef, layout: KvLayout
) -> tuple[WorkerRef, KvLayout]:
    """The prefill worker and its layout. `ref` and `layout` are decode's.

    Raises StaleIncarnation, LayoutMismatch naming the fields, or ProtocolViolation for an impossible rank.
    """
    meant = WorkerRef(hello.decode_worker_id, hello.decode_incarnation)
    if meant != ref:
        raise StaleIncarnation(
            f"the handoff is meant for {meant}, but this is {ref}",
            metadata={"meant": str(meant), "actual": str(ref)},
        )
    prefill_layout = layout_from_proto(hello.layout)
    require_compatible(layout, prefill_layout)
    for group in prefill_layout.groups:
        shards(prefill_layout.tensor_parallel_size, group.head_count)
    prefill = WorkerRef(hello.worker_id, hello.incarnation)
    if not hello.worker_id or not hello.incarnation:
        raise ProtocolViolation("the Hello names no worker and incarnation")
    if hello.rank >= prefill_layout.rank_count:
        raise ProtocolViolation(
            f"{prefill} has no rank {hello.rank}: its layout has {prefill_layout.rank_count} ranks"
        )
    return prefill, prefill_layout
