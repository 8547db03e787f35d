"""Least-loaded placement, as a table of situations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.inference.v1 import inference_pb2
from headrace_common.errors import NoDecodeWorker
from headrace_kv.layout import KvLayout, WorkerRef
from headrace_router.placement import (
    Candidates,
    LeastLoaded,
    PlacementRequest,
    PrefillCandidate,
)
from headrace_router.view import Worker, WorkerLoad

_LAYOUT = KvLayout.attention(
    model="sim", dtype="float32", layer_count=4, kv_head_count=2, block_tokens=16, parts={"kv": 64}
)
_PREFILL = PrefillCandidate(WorkerRef("p0", "a"), replace(_LAYOUT, tensor_parallel_size=2))
_REQUEST = PlacementRequest("sim", 100, inference_pb2.PREFILL_PLACEMENT_UNSPECIFIED, 0)


def _load(
    name: str,
    requests: int = 0,
    *,
    share: float = 0.0,
    reachable: bool = True,
    layout: KvLayout = _LAYOUT,
) -> WorkerLoad:
    worker = Worker(WorkerRef(name, "i"), f"{name}:1", "sim", 4_096, 10, layout)
    return WorkerLoad(worker, reachable, requests, share)


def _choose(
    request: PlacementRequest, *decode: WorkerLoad, prefill: tuple[PrefillCandidate, ...] = ()
) -> tuple[str, bool, str]:
    decision = LeastLoaded().choose(request, Candidates(decode, prefill))
    return decision.worker.ref.worker_id, decision.remote, decision.explanation


def test_the_least_loaded_worker_is_chosen_by_requests_and_by_blocks() -> None:
    assert _choose(_REQUEST, _load("d0", 5), _load("d1", 4), _load("d2", 1, share=0.9))[0] == "d1"


def test_unreachable_workers_come_last() -> None:
    assert _choose(_REQUEST, _load("d0", reachable=False), _load("d1", 9))[0] == "d1"
    assert _choose(_REQUEST, _load("d0", reachable=False))[0] == "d0"


def test_failed_workers_are_never_chosen_and_suspects_only_alone() -> None:
    d0, d1 = _load("d0"), _load("d1", 9)
    assert _choose(replace(_REQUEST, suspect=frozenset({d0.worker.ref})), d0, d1)[0] == "d1"
    assert _choose(replace(_REQUEST, suspect=frozenset({d0.worker.ref})), d0)[0] == "d0"
    with pytest.raises(NoDecodeWorker, match="sim, less 1 that failed"):
        _choose(replace(_REQUEST, failed=frozenset({d0.worker.ref})), d0)


def test_only_matching_layouts_are_paired() -> None:
    other = replace(_LAYOUT, model="other")
    name, remote, _ = _choose(
        _REQUEST, _load("d0", layout=other), _load("d1", 9), prefill=(_PREFILL,)
    )
    assert (name, remote) == ("d1", True)
    name, remote, why = _choose(_REQUEST, _load("d0", layout=other), prefill=(_PREFILL,))
    assert (name, remote) == ("d0", False)
    assert "no prefill worker with a matching KV layout" in why


@pytest.mark.parametrize(
    "change,remote,why",
    [
        ({}, True, "policy"),
        ({"local_prefill_max_tokens": 100}, False, "99 tokens are below 100"),
        ({"local_prefill_max_tokens": 99}, True, "policy"),
        ({"wish": inference_pb2.PREFILL_PLACEMENT_LOCAL}, False, "asked for"),
        (
            {"wish": inference_pb2.PREFILL_PLACEMENT_REMOTE, "local_prefill_max_tokens": 999},
            True,
            "asked for",
        ),
        ({"prompt_tokens": 1}, False, "nothing to prefill"),
        ({"local_only": True}, False, "last resort"),
        ({"failed": frozenset({_PREFILL.ref})}, False, "no prefill worker"),
    ],
)
def test_where_the_prompt_is_prefilled(change: dict[str, object], remote: bool, why: str) -> None:
    request = replace(_REQUEST, **change)  # type: ignore[arg-type]
    _, chosen_remote, explanation = _choose(request, _load("d0"), prefill=(_PREFILL,))
    assert chosen_remote is remote
    assert why in explanation
