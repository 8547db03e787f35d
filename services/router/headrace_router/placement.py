"""Where a request goes. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.inference.v1 import inference_pb2
from headrace_common.errors import NoDecodeWorker
from headrace_kv.layout import KvLayout, WorkerRef, layout_differences
from headrace_router.view import Worker, WorkerLoad


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """A prefill worker that pulls from this router's queue."""

    ref: WorkerRef
    layout: KvLayout


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What is to be placed. `failed` may not be chosen again; `suspect` only when nothing else is left.

    `local_only` forces the last resort: prefill on the decode worker.
    """

    model: str
    prompt_tokens: int
    wish: inference_pb2.PrefillPlacement.ValueType
    local_prefill_max_tokens: int
    failed: frozenset[WorkerRef] = frozenset()
    suspect: frozenset[WorkerRef] = frozenset()
    local_only: bool = False


@dataclass(frozen=True, slots=True)
class Candidates:
    """Everyone who could take it, at one moment."""

    decode: tuple[WorkerLoad, ...]
    prefill: tuple[PrefillCandidate, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """A decode worker, whether a prefill worker computes the prompt, and why."""

    worker: Worker
    remote: bool
    explanation: str


class Placement(ABC):
    """Chooses by what it is given alone, so that a decision can be replayed."""

    @abstractmethod
    def choose(self, request: PlacementRequest, candidates: Candidates) -> Decision:
        """Raises NoDecodeWorker when nobody may take it."""


class LeastLoaded(Placement):
    """The reachable decode worker with the smallest share of its requests and blocks taken."""

    def choose(self, request: PlacementRequest, candidates: Candidates) -> Decision:
        usable = [load for load in candidates.decode if load.worker.ref not in request.failed]
        if not usable:
            raise NoDecodeWorker(
                f"no live decode worker serves {request.model}"
                + (f", less {len(request.failed)} that failed" if request.failed else ""),
                metadata={"model": request.model},
            )
        wants_remote, why = _wants_remote(request)
        paired = {
            load.worker.ref: _has_partner(load.worker, candidates.prefill, request)
            for load in usable
        }
        best = min(
            usable,
            key=lambda load: (
                load.worker.ref in request.suspect,
                not load.reachable,
                wants_remote and not paired[load.worker.ref],
                _taken_share(load),
                load.worker.ref.worker_id,
            ),
        )
        remote = wants_remote and paired[best.worker.ref]
        if wants_remote and not remote:
            why = "no prefill worker with a matching KV layout pulls"
        return Decision(best.worker, remote, _explain(best, len(usable), remote, why))


def _wants_remote(request: PlacementRequest) -> tuple[bool, str]:
    missing_tokens = request.prompt_tokens - 1
    if request.local_only:
        return False, "last resort"
    if request.wish == inference_pb2.PREFILL_PLACEMENT_LOCAL:
        return False, "asked for"
    if missing_tokens < 1:
        return False, "nothing to prefill"
    if request.wish == inference_pb2.PREFILL_PLACEMENT_REMOTE:
        return True, "asked for"
    if missing_tokens < request.local_prefill_max_tokens:
        return False, f"{missing_tokens} tokens are below {request.local_prefill_max_tokens}"
    return True, "policy"


def _has_partner(
    worker: Worker, prefill: Sequence[PrefillCandidate], request: PlacementRequest
) -> bool:
    return any(
        candidate.ref not in request.failed
        and not layout_differences(candidate.layout, worker.layout)
        for candidate in prefill
    )


def _taken_share(load: WorkerLoad) -> float:
    return max(load.requests / max(1, load.worker.max_requests), load.reserved_share)


def _explain(load: WorkerLoad, usable_count: int, remote: bool, why: str) -> str:
    return (
        f"least loaded of {usable_count}: {load.requests} of {load.worker.max_requests} requests, "
        f"{load.reserved_share:.0%} of blocks; {'remote' if remote else 'local'} prefill: {why}"
    )
