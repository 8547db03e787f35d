"""The decode workers of one model and their load, as columns: placement among hundreds of workers stays cheap."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.registry.v1 import registry_pb2
from headrace_common.registry.adapters import Adapter
from headrace_common.time_model.model import (
    FAR,
    NO_HANDOVERS,
    USUAL_STEP,
    HandoverTimes,
    StepTimes,
    TimeModel,
)
from headrace_kv.compatibility import fingerprint
from headrace_kv.layout import KvLayout, WorkerRef, engine_hash


@dataclass(frozen=True, slots=True)
class PromptWork:
    """Prompt tokens of one worker that are not known to be computed.

    `attended` sums over them the tokens before each. An engine computes prompts in the order of their arrival: the head
    is the first one, which has had its turn since `head_start_s` by the router's monotonic clock.
    """

    tokens: int = 0
    attended: float = 0.0
    head_tokens: int = 0
    head_attended: float = 0.0
    head_start_s: float = 0.0


NO_WORK: Final = PromptWork()


class PromptQueue:
    """Owns the prompts of one worker, in the order in which they came. One event loop owns it."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, float]] = {}
        self._tokens = 0
        self._attended = 0.0
        self._head_start_s = 0.0
        self._next = 0

    def add(self, tokens: int, now_s: float, cached_tokens: int = 0) -> int:
        """The worker gets a prompt of `tokens` after those that it has in its cache. Returns the prompt's number."""
        if not self._prompts:
            self._head_start_s = now_s
        self._next += 1
        attended = tokens * (cached_tokens + tokens / 2)
        self._prompts[self._next] = (tokens, attended)
        self._tokens += tokens
        self._attended += attended
        return self._next

    def remove(self, number: int, now_s: float) -> None:
        """A prompt is computed, or was given up. Repeats are ignored."""
        found = self._prompts.get(number)
        if found is None:
            return
        if number == next(iter(self._prompts)):
            self._head_start_s = now_s
        del self._prompts[number]
        self._tokens -= found[0]
        self._attended -= found[1]

    @property
    def work(self) -> PromptWork:
        """What is left."""
        head_tokens, head_attended = next(iter(self._prompts.values()), (0, 0.0))
        return PromptWork(
            self._tokens, self._attended, head_tokens, head_attended, self._head_start_s
        )


# One free slot in this many is left to other routers' next requests.
_SLOTS_PER_FREE_SLOT: Final = 20


@dataclass(frozen=True, slots=True)
class DecodeSlots:
    """`total`: `max_num_seqs` of all reachable decode workers of a model. `external`: requests of other routers there,
    as the workers reported them. `routers`: live routers, this one included.
    """

    total: int
    external: int = 0
    routers: int = 1

    def available(self) -> int:
        """The slots that this router may use, 0 when no worker is reachable.

        An equal part is always its own. Beyond that it may use slots that other routers leave idle, less a few: with a
        free slot, another router's next request starts and is reported, and then this router gives back.
        """
        if not self.total or self.routers <= 1:
            return self.total
        equal_part = max(1, self.total // self.routers)
        left_free = max(1, self.total // _SLOTS_PER_FREE_SLOT)
        return max(equal_part, self.total - self.external - left_free)


Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]
Key = TypeVar("Key")
NO_TIMES: Final = TimeModel()
GENERIC_STEPS: Final = StepTimes(fixed_s=0.01, s_per_prompt_token=1e-4, s_per_context_token=1e-8)
"""Where nothing is known."""
DEFAULT_TPOT_STEPS: Final = 4.0
"""Without a bound on the time per output token, steps may take this many times those of one answer."""
_PRIOR_AGE_S: Final = 0.5
# Of a step. What was learned may give all of its time to the context.
_FIXED_MIN_S: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Worker:
    """One incarnation of a decode worker, as it registered."""

    ref: WorkerRef
    endpoint: str
    model: str
    max_model_len: int
    max_num_seqs: int
    layout: KvLayout
    http_endpoint: str = ""
    """Of its OpenAI HTTP API. Empty: it has none."""
    adapters: frozenset[Adapter] = frozenset()
    earlier_adapters: frozenset[Adapter] = frozenset()
    """Those before the last change, which the worker keeps for requests that named them before."""
    computes_prompts: bool = False
    """Whether it has both roles."""
    step_tokens: int = 0
    """The most tokens of a step; 0 where it is unknown."""
    role: registry_pb2.WorkerRole.ValueType = registry_pb2.WORKER_ROLE_BOTH
    """What the policy leaves of both roles."""

    def serves(self, adapter: Adapter) -> bool:
        """Whether it has an adapter, which it may have ceased to announce."""
        return adapter in self.adapters or adapter in self.earlier_adapters


@dataclass(slots=True)
class Load:
    """A decode worker at one moment: what it reported, and what this router has reserved on it since.

    It must not be changed.

    `held_tokens` is the capacity of its reserved blocks, growth included, and `total_tokens` that of all its blocks.
    `external_requests` are those of other routers, as of the latest status. A `stalled` worker is not reachable.
    `times` is what the worker has learned. Answers are to leave a `leaving` worker.
    """

    requests: int = 0
    external_requests: int = 0
    held_tokens: int = 0
    total_tokens: int = 0
    reachable: bool = True
    draining: bool = False
    leaving: bool = False
    stalled: bool = False
    prompts: PromptWork = NO_WORK
    times: TimeModel = NO_TIMES

    @property
    def availability(self) -> tuple[bool, bool, bool, int]:
        """What the availability of a model and its slots depend on, and where requests must leave."""
        return self.reachable, self.draining, self.stalled, self.external_requests


# The part of a step or hand-over that each row of TimeColumns belongs to. A worker learns a part as a whole.
_PROMPTS = 1
_PART_OF: Final = np.array([0, 1, 1, 1, 2, 2, 1, 3, 3])
_STEP_ROWS: Final = attrgetter(
    *(name for name in StepTimes.__match_args__ if name.endswith("_s") or name.startswith("s_per_"))
)
_PROMPT_ROWS: Final = attrgetter(*PromptWork.__match_args__)
TOKEN_ROW, _ANSWER_ROW = 2, 4


class TimeColumns:
    """The times of workers, as columns with shape [worker]. See StepTimes, HandoverTimes and PromptWork.

    What a worker has not learned has a prior after `fill`.
    """

    def __init__(self, kind_of: NDArray[np.intp]) -> None:
        """`kind_of`: workers with equal numbers have equal engines."""
        count = len(kind_of)
        self._rows: Numbers = np.zeros((len(_PART_OF), count))
        self._known: Flags = np.zeros((len(_PART_OF), count), np.bool_)
        self.answers_known: Flags = self._known[_ANSWER_ROW]
        """The workers that have learned the times of steps with answers."""
        self.steps, self.handovers = self._rows[:7], self._rows[7:]
        self.mean_steps: list[float] | Numbers = []
        """As `steps`, of the workers of the same kind. Numbers where all are of one kind."""
        self.prompts: Numbers = np.zeros((5, count))
        self.with_prompts: set[int] = set()
        """The workers with prompts that are not known to be computed."""
        self._kinds = np.eye(max(kind_of, default=0) + 1)[kind_of]
        self._models: dict[int, TimeModel] = {}
        self._learned_s = 0.0
        self._filled_s = -math.inf

    @property
    def age_s(self) -> float:
        """Seconds since a worker learned something."""
        return time.monotonic() - self._learned_s

    def step_s(self, answers: Numbers | float, context_tokens: Numbers) -> Numbers:
        """The time of each worker's step with so many answers, which have so many tokens of context in all."""
        found: Numbers = self.steps[0] + self.steps[4] * answers + self.steps[5] * context_tokens
        return found

    def column(self, row: int) -> Numbers:
        """All times of a worker, in the order of `time_values`."""
        return self._rows[:, row]

    def all_known(self, usable: Flags) -> bool:
        """Whether all of these workers have learned the times of steps with prompts and with answers."""
        return bool(self._known[[TOKEN_ROW, _ANSWER_ROW]][:, usable].all())

    def set(self, row: int, prompts: PromptWork, model: TimeModel) -> None:
        """Sets the values of one worker."""
        if prompts.tokens or row in self.with_prompts:
            (self.with_prompts.add if prompts.tokens else self.with_prompts.discard)(row)
            self.prompts[:, row] = _PROMPT_ROWS(prompts)
        if (known_model := self._models.get(row)) is model or known_model == model:
            return
        self._models[row] = model
        self._learned_s = time.monotonic()
        steps = model.steps
        parts = (steps.knows_prompts, steps.knows_answers, model.handovers.count > 0)
        known = np.array((parts[0] or parts[1], *parts))[_PART_OF]
        self._rows[known, row] = np.array(time_values(steps, model.handovers))[known]
        if (self._known[:, row] != known).any():
            self._known[:, row] = known
            self._filled_s = -math.inf

    def fill(self, prefill: StepTimes) -> None:
        """Computes the means, and gives what a worker has not learned its prior: the mean. Anew after 0.5 s.

        Where no worker of a kind has learned it, the mean is that of all that have. Of prompts it is else `prefill`,
        where that is known. The rest is of a generic worker, as fast as what is known.
        """
        now_s = time.monotonic()
        if now_s < self._filled_s + _PRIOR_AGE_S:
            return
        self._filled_s = now_s
        votes = self._known & ~self._far()
        learned, counts = np.where(votes, self._rows, 0.0), votes.sum(1)
        generic = np.array(time_values(GENERIC_STEPS, NO_HANDOVERS))
        overall = np.where(counts, learned.sum(1) / np.maximum(1, counts), generic)
        prior = overall[0] / generic[0] * generic
        if prefill.knows_prompts:
            prior = np.where(_PART_OF == _PROMPTS, time_values(prefill, NO_HANDOVERS), prior)
        overall = np.where(counts, overall, prior)
        counts = votes @ self._kinds
        means = np.where(counts, learned @ self._kinds / np.maximum(1, counts), overall[:, None])
        columns = means @ self._kinds.T
        np.copyto(self._rows, columns, where=~self._known)
        self.mean_steps = columns[:7] if means.shape[1] > 1 else means[:7, 0].tolist()

    def _far(self) -> Flags:
        """The workers far from the median of their kind: they have no vote on what others are taken for."""
        usual_s = np.array(USUAL_STEP) @ self.steps
        far = np.zeros(len(usual_s), np.bool_)
        for of_kind in self._kinds.T > 0:
            found_s = np.sort(usual_s[of_kind & self._known.any(0)])
            if len(found_s) and (middle_s := found_s[(len(found_s) - 1) // 2]):
                far |= of_kind & ((usual_s > middle_s * FAR) | (usual_s < middle_s / FAR))
        return far


def time_values(steps: StepTimes, handovers: HandoverTimes) -> tuple[float, ...]:
    """One for each row of TimeColumns."""
    fixed_s, *others = _STEP_ROWS(steps)
    return (max(_FIXED_MIN_S, fixed_s), *others, handovers.fixed_s, handovers.s_per_byte)


class Pulling(NamedTuple):
    """What the workers that pull prompts, by layout fingerprint, are to those of a table. Columns have shape [worker].

    `paired`: those to which another one may hand over. `computing`: those that pull themselves. `within`: whether all
    that pull are in the table.
    """

    by_layout: tuple[tuple[KvLayout, frozenset[WorkerRef]], ...]
    paired: Flags
    computing: Flags
    within: bool


class LoadTable:
    """A row for each worker, sorted by worker id. Columns have shape [worker].

    The workers never change: when members join or leave, the directory makes a new table.
    """

    def __init__(self, workers: Iterable[Worker]) -> None:
        self.workers = tuple(sorted(workers, key=lambda worker: str(worker.ref)))
        count = len(self.workers)
        self.rows = np.arange(count)
        self.max_model_len = min((worker.max_model_len for worker in self.workers), default=0)
        """The most tokens that every worker accepts."""
        self.requests: Numbers = np.zeros(count)
        self.external_requests: Numbers = np.zeros(count)
        self.max_num_seqs: Numbers = np.array([w.max_num_seqs for w in self.workers], np.float64)
        self.held_tokens: Numbers = np.zeros(count)
        self.total_tokens: Numbers = np.zeros(count)
        self.computes_prompts: Flags = np.array([w.computes_prompts for w in self.workers], bool)
        self.prefill_only, self.decode_only = (
            np.array([w.role == role for w in self.workers], np.bool_)
            for role in (registry_pb2.WORKER_ROLE_PREFILL, registry_pb2.WORKER_ROLE_DECODE)
        )
        """Workers of both roles to which the policy leaves one."""
        self.has_restricted = bool((self.prefill_only | self.decode_only).any())
        self.reachable: Flags = np.zeros(count, np.bool_)
        self.draining: Flags = np.zeros(count, np.bool_)
        self.unreachable_count = count
        # Workers of one kind have one layout, with all its fields.
        kinds, kind_of = _groups(self.workers, engine_hash)
        self.engine_hashes = frozenset(kinds)
        """Of the workers' layouts: one where all engines are alike."""
        self.times = TimeColumns(kind_of)
        self.token_bytes: Numbers = np.array([w.layout.token_bytes for w in self.workers])
        """KV of one token, over all ranks."""
        self._loads: dict[int, Load] = {}
        self._pulling: Pulling | None = None
        self._rows = {worker.ref: row for row, worker in enumerate(self.workers)}
        # Workers with one layout fingerprint can receive from the same prefill workers.
        self.layouts, self.layout_of = _groups(self.workers, fingerprint)
        self.adapters = _adapters_by_name(self.workers)

    def __len__(self) -> int:
        return len(self.workers)

    def __contains__(self, ref: WorkerRef) -> bool:
        return ref in self._rows

    def load(self, ref: WorkerRef) -> Load | None:
        """A worker's load. None before it is set."""
        return self._loads.get(self._rows[ref])

    def set(self, ref: WorkerRef, load: Load) -> None:
        """Sets a worker's load."""
        row = self._rows[ref]
        self._loads[row] = load
        self.requests[row] = load.requests
        self.external_requests[row] = load.external_requests
        self.held_tokens[row] = load.held_tokens
        self.total_tokens[row] = load.total_tokens
        self.unreachable_count += int(self.reachable[row]) - load.reachable
        self.reachable[row] = load.reachable
        self.draining[row] = load.draining
        self.times.set(row, load.prompts, load.times)

    @property
    def any_available(self) -> bool:
        """Whether any worker is reachable and accepts new requests."""
        return bool((self.reachable & ~self.draining).any())

    def any_beside(self, worker: Worker) -> bool:
        """Whether another worker that has the same adapters is reachable and accepts new requests."""
        usable = self.reachable & ~self.draining & ~self.flags({worker.ref})
        return any(self.workers[row].adapters >= worker.adapters for row in usable.nonzero()[0])

    def slots(self, routers: int) -> DecodeSlots:
        """The request slots of the workers that are reachable and accept new requests."""
        usable = self.reachable & ~self.draining
        return DecodeSlots(
            total=int(self.max_num_seqs[usable].sum()),
            external=int(self.external_requests[usable].sum()),
            routers=routers,
        )

    def serving(self, adapter: Adapter | None) -> Flags:
        """True in the rows of workers that have an adapter; in all rows without one."""
        if adapter is None:
            return np.ones(len(self.workers), np.bool_)
        return np.array([worker.serves(adapter) for worker in self.workers], np.bool_)

    def roomy(self, answers: float, tokens: float, tpot_s: float | Numbers, fill: float) -> Flags:
        """The workers with room for so many more answers, which hold `tokens`.

        Each of its slots, of its KV memory and of the bound on its steps is then used up to `fill` at most. An infinite
        bound counts as without one.
        """
        fixed, _, _, _, answer, *_ = self.times.steps
        requests, held_tokens = self.requests + answers, self.held_tokens + tokens
        bound_s = np.where(np.isfinite(tpot_s), tpot_s, DEFAULT_TPOT_STEPS * (fixed + answer))
        room: Flags = (
            (self.reachable & ~self.draining & ~self.prefill_only)
            & (self.times.step_s(requests, held_tokens) <= fill * bound_s)
            & (requests <= fill * self.max_num_seqs)
            & (held_tokens <= fill * self.total_tokens)
        )
        return room

    def flags(self, refs: Collection[WorkerRef]) -> Flags:
        """True in the rows of these workers."""
        marked: Flags = np.zeros(len(self.workers), np.bool_)
        for ref in refs:
            row = self._rows.get(ref)
            if row is not None:
                marked[row] = True
        return marked

    def with_cached_prompt(
        self, cached_tokens: Numbers, ref: WorkerRef, prompt_tokens: int
    ) -> Numbers:
        """The cached tokens of all workers, if worker `ref` has all whole blocks of a prompt."""
        row = self._rows.get(ref)
        if row is None:
            return cached_tokens
        raised: Numbers = cached_tokens.copy()
        whole = prompt_tokens - prompt_tokens % self.workers[row].layout.block_tokens
        raised[row] = max(raised[row], whole)
        return raised

    def pulling(self, by_layout: Mapping[KvLayout, frozenset[WorkerRef]]) -> Pulling:
        """What these workers are to those of the table. Computed anew only when they change."""
        items, known = tuple(by_layout.items()), self._pulling
        if known is None or known.by_layout != items:
            refs = frozenset[WorkerRef]().union(*by_layout.values())
            computing = self.flags(refs)
            counts = np.array([len(by_layout.get(layout, ())) for layout in self.layouts])
            others = counts[self.layout_of] - computing
            within = np.count_nonzero(computing) == len(refs)
            known = self._pulling = Pulling(items, others > 0, computing, within)
        return known


def _adapters_by_name(workers: Iterable[Worker]) -> Mapping[str, Adapter]:
    """Of adapters with equal names the one that most workers have, and of equals the one with the smallest digest."""
    counts = Counter(adapter for worker in workers for adapter in worker.adapters)
    found: dict[str, Adapter] = {}
    for adapter in sorted(counts, key=lambda one: (-counts[one], one)):
        found.setdefault(adapter.name, adapter)
    return found


def _groups(
    workers: Iterable[Worker], key: Callable[[KvLayout], Key]
) -> tuple[tuple[Key, ...], NDArray[np.intp]]:
    """The keys of the workers' layouts, and the index of each worker's."""
    groups: dict[Key, int] = {}
    # Most workers share one object. Its key is computed once.
    known: dict[int, int] = {}
    indices: list[int] = []
    for worker in workers:
        index = known.get(id(worker.layout))
        if index is None:
            index = groups.setdefault(key(worker.layout), len(groups))
            known[id(worker.layout)] = index
        indices.append(index)
    return tuple(groups), np.array(indices, np.intp)
