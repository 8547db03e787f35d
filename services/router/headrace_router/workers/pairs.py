"""Logs the pairs of prefill and decode workers that cannot hand KV over."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from headrace.registry.v1 import registry_pb2
from headrace_common.errors import LayoutMismatch
from headrace_common.registry.duties import COMPUTE_PROMPTS, GENERATE, WORKERS
from headrace_kv.compatibility import PairSide, layout_hash, pair_faults, pair_side
from headrace_kv.layout import WorkerRef

_LOG = logging.getLogger(__name__)
# A deployment with as many kinds of layouts is wrong in another way.
_LINES_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker. Those with an equal `kind` are in the same pairs."""

    kind: tuple[int, str, bytes, str]
    side: PairSide


class PairReporter:
    """Warns once of each kind of pair that cannot hand KV over, for as long as it exists. One event loop owns it."""

    def __init__(self) -> None:
        self._workers: dict[WorkerRef, _Worker] = {}
        self._reported: frozenset[tuple[tuple[str, str], ...]] = frozenset()

    def update(self, members: Iterable[registry_pb2.Member]) -> None:
        """Compares the workers of the registry with each other. Must be called on every change."""
        before = {worker.kind for worker in self._workers.values()}
        self._workers = dict(self._convert(members))
        if before != {worker.kind for worker in self._workers.values()}:
            self._report()

    def _convert(
        self, members: Iterable[registry_pb2.Member]
    ) -> Iterable[tuple[WorkerRef, _Worker]]:
        for member in members:
            if member.role not in WORKERS:
                continue
            ref = WorkerRef(member.worker_id, member.incarnation)
            known = self._workers.get(ref)
            if known is not None:
                yield ref, known
                continue
            try:
                side = pair_side(member)
            except LayoutMismatch as error:
                _LOG.warning("the KV layout of %s is not used: %s", ref, error)
                continue
            kind = (int(member.role), side.model, layout_hash(side.layout), side.transport)
            yield ref, _Worker(kind, side)

    def _report(self) -> None:
        workers = self._workers.values()
        faults = pair_faults(
            [worker.side for worker in workers if worker.kind[0] in COMPUTE_PROMPTS],
            [worker.side for worker in workers if worker.kind[0] in GENERATE],
        )[:_LINES_MAX]
        found = {tuple(fault.fields.items()): fault for fault in faults}
        for key, fault in found.items():
            if key not in self._reported:
                _LOG.warning("%s", fault)
        self._reported = frozenset(found)
