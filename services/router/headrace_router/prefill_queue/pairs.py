"""Which prefill and decode workers hand KV over, by the places where they run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from headrace.registry.v1 import registry_pb2
from headrace_common.errors import LayoutMismatch
from headrace_common.registry.duties import COMPUTE_PROMPTS, GENERATE, WORKERS
from headrace_common.registry.place import Level, Place, place_from_proto
from headrace_kv.compatibility import PairSide, layout_hash, pair_faults, pair_side
from headrace_kv.layout import KvLayout, WorkerRef
from headrace_router.costs import PairCosts
from headrace_router.workers.table import LoadTable

_DEFAULT_FAR_WEIGHT: Final = 0.5
_NO_POLICY: Final = registry_pb2.Policy()

Pulling = Mapping[KvLayout, frozenset[WorkerRef]]
"""Prefill workers that take tasks, by layout fingerprint."""


@dataclass(frozen=True, slots=True)
class PairRules:
    """The part of the deployment's policy for pairs. See Policy in registry.proto."""

    level: Level = Level.NONE
    required: bool = False
    far_weight: float = _DEFAULT_FAR_WEIGHT

    @classmethod
    def from_proto(cls, policy: registry_pb2.Policy) -> PairRules:
        """Converts a policy. Absent fields get their defaults. A level of a later version counts as none."""
        known = policy.pair_level in registry_pb2.PairLevel.values()
        return cls(
            level=Level(policy.pair_level) if known else Level.NONE,
            required=policy.pair_rule == registry_pb2.PAIR_RULE_REQUIRE,
            far_weight=policy.far_weight if policy.HasField("far_weight") else _DEFAULT_FAR_WEIGHT,
        )


@dataclass(frozen=True, slots=True)
class _Costs:
    """`result` holds for these arguments."""

    table: LoadTable
    pulling: tuple[tuple[KvLayout, frozenset[WorkerRef]], ...]
    result: PairCosts


class Pairing:
    """Judges pairs of workers by their places at the policy's level. One event loop owns it.

    `update` must be called with every change of the registry's members. Without a level, every pair is equal.
    """

    def __init__(self, policy: Callable[[], registry_pb2.Policy] = lambda: _NO_POLICY) -> None:
        """`policy` returns the policy in force."""
        self._policy = policy
        self._read_policy: registry_pb2.Policy | None = None
        self._rules = PairRules()
        self._members: dict[WorkerRef, Place] = {}
        self._places: dict[WorkerRef, Place] = {}
        """Of the workers with a known place, at the level of the rules."""
        self._costs: _Costs | None = None

    def update(self, members: Iterable[registry_pb2.Member]) -> None:
        """Replaces the workers by the registry's."""
        self._members = {
            WorkerRef(member.worker_id, member.incarnation): place_from_proto(member.place)
            for member in members
            if member.HasField("place")
        }
        self._find_places()

    def fits(self, decode: WorkerRef) -> Callable[[WorkerRef], bool] | None:
        """Whether a prefill worker may hand KV over to a decode worker. None when every one may."""
        if not self._has_level() or not self._rules.required:
            return None
        return lambda prefill: self._is_near(prefill, decode)

    def far_weight(self, decode: WorkerRef) -> Callable[[WorkerRef], float] | None:
        """Cost of a token that a prefill worker hands over, relative to computing it. None without a level."""
        if not self._has_level():
            return None
        return lambda prefill: 0.0 if self._is_near(prefill, decode) else self._rules.far_weight

    def costs(self, table: LoadTable, pulling: Pulling) -> PairCosts | None:
        """For each decode worker of the table, the cheapest hand-over to it. None without a level."""
        if not self._has_level():
            return None
        items, known = tuple(pulling.items()), self._costs
        if known is None or known.table is not table or known.pulling != items:
            known = self._costs = _Costs(table, items, self._computed_costs(table, pulling))
        return known.result

    def _computed_costs(self, table: LoadTable, pulling: Pulling) -> PairCosts:
        places = [
            {self._places.get(ref) for ref in pulling.get(layout, ())} for layout in table.layouts
        ]
        sources = [places[layout] for layout in table.layout_of]
        own = [self._places.get(worker.ref) for worker in table.workers]
        near = np.array(
            [
                place is not None and place in found
                for place, found in zip(own, sources, strict=True)
            ],
            np.bool_,
        )
        allowed = (
            near if self._rules.required else np.array([bool(one) for one in sources], np.bool_)
        )
        return PairCosts(allowed, np.where(near, 0.0, self._rules.far_weight))

    def _has_level(self) -> bool:
        policy = self._policy()
        if policy is not self._read_policy:
            self._read_policy = policy
            rules = PairRules.from_proto(policy)
            if rules != self._rules:
                self._rules = rules
                self._find_places()
        return self._rules.level is not Level.NONE

    def _find_places(self) -> None:
        found = ((ref, place.at(self._rules.level)) for ref, place in self._members.items())
        self._places = {ref: place for ref, place in found if place is not None}
        self._costs = None

    def _is_near(self, prefill: WorkerRef, decode: WorkerRef) -> bool:
        """Unknown places are equal to none."""
        place = self._places.get(decode)
        return place is not None and self._places.get(prefill) == place


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
