"""Workers with equal layouts share one object, so that tables of many workers stay cheap."""

from __future__ import annotations

import pytest

from headrace.registry.v1 import registry_pb2
from headrace_kv.layout.compatibility import fingerprint
from headrace_kv.layout.layout import KvLayout
from headrace_kv.layout.proto import layout_to_proto
from headrace_router.workers import table
from headrace_router.workers.directory import worker_from_member
from headrace_router.workers.table import LoadTable


def _member(number: int, layers: int) -> registry_pb2.Member:
    layout = KvLayout.attention(
        model="sim",
        dtype="float32",
        layer_count=layers,
        kv_head_count=2,
        block_tokens=16,
        parts={"kv": 64},
    )
    return registry_pb2.Member(
        worker_id=f"d-{number}", incarnation="i", layout=layout_to_proto(layout)
    )


def test_equal_layouts_are_one_object() -> None:
    one, other, third = (worker_from_member(_member(*args)) for args in ((1, 2), (2, 2), (3, 4)))
    assert one.layout is other.layout
    assert third.layout != one.layout


def test_a_table_computes_one_fingerprint_for_each_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[KvLayout] = []

    def counted(layout: KvLayout) -> KvLayout:
        asked.append(layout)
        return fingerprint(layout)

    monkeypatch.setattr(table, "fingerprint", counted)
    made = LoadTable(worker_from_member(_member(number, 2 + number % 2)) for number in range(40))
    assert len(asked) == 2
    assert len(made.layouts) == 2
    assert [int(index) for index in made.layout_of] == [
        made.layouts.index(fingerprint(worker.layout)) for worker in made.workers
    ]
