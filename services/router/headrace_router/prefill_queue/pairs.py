"""What the queue asks of the policy for pairs of prefill and decode workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from headrace.prefill.v1 import prefill_pb2
from headrace_kv.layout.layout import KvLayout, WorkerRef
from headrace_router.placement import PairCosts
from headrace_router.workers.table import LoadTable

Pulling = Mapping[KvLayout, frozenset[WorkerRef]]
"""Prefill workers that take tasks, by layout fingerprint."""


ComputeTime = Callable[[str], float]
"""The time in which a prefill worker of a model computes a token, 0 while it is unknown."""


class PairPolicy(Protocol):
    """Judges pairs of workers. `compute_s` relates the time of a hand-over to computing."""

    def fits(self, decode: WorkerRef) -> Callable[[WorkerRef], bool] | None:
        """Whether a prefill worker may hand KV over to a decode worker. None when every one may."""
        ...

    def extra_tokens(
        self, decode: WorkerRef, tokens: int, compute_s: ComputeTime
    ) -> Callable[[WorkerRef], float] | None:
        """Cost of handing `tokens` over by prefill worker, in computed tokens. None when it is 0 for each."""
        ...

    def costs(
        self, table: LoadTable, pulling: Pulling, model: str, compute_s: ComputeTime
    ) -> PairCosts | None:
        """For each decode worker of the table, the cheapest hand-over to it. None when all are equal."""
        ...

    def task_done(
        self, prefill: WorkerRef, decode: WorkerRef, tokens: int, done: prefill_pb2.TaskDone
    ) -> None:
        """A prefill worker has handed `tokens` over."""
        ...


class AnyPair:
    """The policy without rules."""

    def fits(self, decode: WorkerRef) -> Callable[[WorkerRef], bool] | None:
        """See PairPolicy."""
        return None

    def extra_tokens(
        self, decode: WorkerRef, tokens: int, compute_s: ComputeTime
    ) -> Callable[[WorkerRef], float] | None:
        """See PairPolicy."""
        return None

    def costs(
        self, table: LoadTable, pulling: Pulling, model: str, compute_s: ComputeTime
    ) -> PairCosts | None:
        """See PairPolicy."""
        return None

    def task_done(
        self, prefill: WorkerRef, decode: WorkerRef, tokens: int, done: prefill_pb2.TaskDone
    ) -> None:
        """See PairPolicy."""
