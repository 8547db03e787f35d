"""The requests and faults of a chaos run, derived from its seed alone. Pure."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum

from headrace.registry.v1 import registry_pb2
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.settings import parse_settings

PROMPT_VOCABULARY = 512
PREFIXES = 24
CANCELLED_SHARE = 0.2
CONTINUED_SHARE = 0.5
CONVERSATIONS = 24
CONVERSATION_TOKENS_MAX = 320
FOLLOW_UP_TOKENS_MAX = 24
# Of a worker with one rank: 8 tokens of 4 layers with 4 heads, for a pool also the seal, up to the next page.
_BLOCK_BYTES = 4096
_POOLED_BLOCK_BYTES = 8192
_PROMISED_BLOCKS = 512


class FaultKind(StrEnum):
    """What happens to a process."""

    KILL = "killed"
    FREEZE = "frozen"
    RESTART = "restarted"


class Kind(StrEnum):
    """What a request asks for beside an answer to tokens."""

    PLAIN = "plain"
    IMAGE = "image"
    CONVERSATION = "conversation"
    PROMISE = "promise"
    ADAPTER = "adapter"


# Name and digest of the adapter that all workers have.
ADAPTER = "poet:0a1b"
# Of 100 requests of a mixed run.
_MIX = {Kind.PLAIN: 40, Kind.IMAGE: 15, Kind.CONVERSATION: 15, Kind.PROMISE: 15, Kind.ADAPTER: 15}


@dataclass(frozen=True, slots=True)
class ProcessFault:
    """After `gap_s`, `target` is killed, frozen or drained. It is back `down_s` later."""

    gap_s: float
    kind: FaultKind
    target: str
    down_s: float


@dataclass(frozen=True, slots=True)
class ChaosRequest:
    """One request. `cancel_after_s` is None when its client waits for the end."""

    number: int
    prompt: tuple[int, ...]
    answer_tokens: int
    cancel_after_s: float | None
    router: int
    kind: Kind = Kind.PLAIN


@dataclass(frozen=True, slots=True)
class WireFaults:
    """Shares of the messages between prefill and decode that are lost, duplicated, delayed, or end their stream.

    A stream without messages for `cut_after_silence_s` ends. `slow_write_max_s`: how long a write may take to land.
    `slow_turn_max_s`: how long a sender may pause before it checks its lease. `break_part` names the safeguard that a
    worker switches off. `watch_interval_s`: how often a worker checks its blocks. `disk_changed`: share of the blocks
    read from disk that have another byte than was written. `pool_changed`: the same for blocks that are read from the
    remote pool. `small_memories`: a worker remembers few of its last requests and events, announces few blocks of the
    remote pool, and has little staging memory. It writes to a peer over one connection. So it soon has all memory and
    connections that it may ever need. `hostile`: the worker lies, see hostile.py.
    """

    seed: int = 0
    lost: float = 0.0
    doubled: float = 0.0
    delayed: float = 0.0
    delay_max_s: float = 0.0
    cut: float = 0.0
    cut_after_silence_s: float = 0.0
    slow_write_max_s: float = 0.0
    slow_turn_max_s: float = 0.0
    break_part: str = ""
    watch_interval_s: float = 0.5
    disk_changed: float = 0.0
    pool_changed: float = 0.0
    small_memories: bool = False
    hostile: bool = False


_PREFILL, _DECODE, _ROUTER, _REGISTRY, _ETCD = "prefill", "decode", "router", "registry", "etcd"
_POOL, _WORKER = "pool", "worker"
# Prefill and decode workers fail most often, because most states can be lost there.
_WEIGHTS = {_PREFILL: 5, _DECODE: 5, _ROUTER: 1, _REGISTRY: 1, _ETCD: 1}
_KINDS = {
    _PREFILL: (FaultKind.KILL, FaultKind.FREEZE, FaultKind.RESTART),
    _DECODE: (FaultKind.KILL, FaultKind.FREEZE, FaultKind.RESTART),
    _ROUTER: (FaultKind.KILL, FaultKind.RESTART),
    _REGISTRY: (FaultKind.KILL, FaultKind.FREEZE, FaultKind.RESTART),
    _ETCD: (FaultKind.KILL, FaultKind.FREEZE),
}
ALL_KINDS = frozenset((role, kind) for role, kinds in _KINDS.items() for kind in kinds)
_POOL_WEIGHT = 3
_POOL_KINDS = (FaultKind.KILL, FaultKind.FREEZE, FaultKind.RESTART)
_POOL_FAULTS = frozenset((_POOL, kind) for kind in _POOL_KINDS)


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """A whole run. Its times are those of a real machine times `slowness`, see `slowed`.

    `credentials`: see CredentialKind. `host_gib` and `disk_gib` are the tiers of each rank below its KV memory. With
    `conversations`, half of the requests continue an earlier one. With `mixed`, requests are of every kind. With
    `pool_gib`, the workers share blocks in a remote pool of that size. Every `role_interval_s`, the policy gives
    workers of both roles other roles; 0 means never. With `hostile`, the last worker of each role lies.
    """

    seed: int
    requests: int
    concurrency: int = 24
    deadline_s: float = 12.0
    late_s: float = 1.0
    cancel_max_s: float = 0.6
    decode_tensor_parallel: Sequence[int] = (1, 2, 1, 4)
    prefill_tensor_parallel: Sequence[int] = (1, 2, 4)
    worker_tensor_parallel: Sequence[int] = ()
    role_interval_s: float = 0.0
    routers: int = 2
    wire: WireFaults = WireFaults()
    kinds: frozenset[tuple[str, FaultKind]] = ALL_KINDS
    gap_max_s: float = 2.0
    freezes_s: Sequence[float] = (0.2, 1.0, 3.0, 6.0)
    layer_s: float = 0.0
    lease_ttl_s: float = 1.5
    quarantine_s: float = 12.0
    drain_grace_s: float = 5.0
    worker_wait_s: float = 10.0
    store_timeout_s: float = 2.0
    store_start_timeout_s: float = 5.0
    block_count: int = 512
    block_size: int = 0
    pool_gib: float = 0.0
    pool_timeout_s: float = 2.0
    host_gib: float = 0.0
    disk_gib: float = 0.0
    conversations: bool = False
    mixed: bool = False
    move_gap_s: float = 0.0
    hostile: bool = False
    head_bytes: int = 16
    slowness: float = 1.0
    credentials: str = "local"

    @property
    def model(self) -> str:
        """The model of the engines, without its times."""
        return f"sim:layers=4,heads=4,head_bytes={self.head_bytes},vocabulary=32000"


_SAME_WHEN_SLOW = ("layer_s", "pool_gib", "host_gib", "disk_gib")


def slowed(plan: ChaosPlan, slowness: float) -> ChaosPlan:
    """The plan for a machine that is `slowness` times slower: the same requests and faults, with every time
    stretched.

    Only times change. The definition of a violation is the same on every machine.
    """
    times = {
        field.name: getattr(plan, field.name) * slowness
        for field in fields(plan)
        if field.type == "float" and field.name not in _SAME_WHEN_SLOW
    }
    wire = {
        field.name: getattr(plan.wire, field.name) * slowness
        for field in fields(plan.wire)
        if field.name.endswith("_s")
    }
    return replace(
        plan,
        wire=replace(plan.wire, **wire),
        freezes_s=[freeze_s * slowness for freeze_s in plan.freezes_s],
        **times,
    )


def process_faults(plan: ChaosPlan) -> Iterator[ProcessFault]:
    """Faults without end, unless the plan wants none. A run uses as many as fit into its time."""
    rng = random.Random(f"{plan.seed}/faults")
    counts = {
        _PREFILL: len(plan.prefill_tensor_parallel),
        _DECODE: len(plan.decode_tensor_parallel),
        _ROUTER: plan.routers,
    }
    weights, kinds = dict(_WEIGHTS), dict(_KINDS)
    if plan.worker_tensor_parallel:
        counts[_WORKER] = len(plan.worker_tensor_parallel)
        weights = {_WORKER: 10} | {role: weights[role] for role in (_ROUTER, _REGISTRY, _ETCD)}
        kinds[_WORKER] = _KINDS[_DECODE]
    if not plan.kinds.isdisjoint(_POOL_FAULTS):
        weights[_POOL], kinds[_POOL] = _POOL_WEIGHT, _POOL_KINDS
    while plan.kinds:
        role = rng.choices(list(weights), list(weights.values()))[0]
        target = f"{role}-{rng.randrange(counts[role])}" if role in counts else role
        fault = ProcessFault(
            gap_s=rng.uniform(0.15, 1.0) * plan.gap_max_s,
            kind=rng.choice(kinds[role]),
            target=target,
            down_s=rng.choice(plan.freezes_s),
        )
        if (_DECODE if role == _WORKER else role, fault.kind) in plan.kinds:
            yield fault


def role_changes(plan: ChaosPlan) -> Iterator[dict[str, registry_pb2.WorkerRole.ValueType]]:
    """Roles of all workers of both roles, by worker id, without end."""
    rng = random.Random(f"{plan.seed}/roles")
    roles = [role for role in registry_pb2.WorkerRole.values() if role]
    while True:
        yield {
            f"{_WORKER}-{number}": rng.choice(roles)
            for number in range(len(plan.worker_tensor_parallel))
        }


def requests(plan: ChaosPlan) -> Iterator[ChaosRequest]:
    """Requests in the order in which they are sent. Many share one of a few prefixes."""
    rng = random.Random(f"{plan.seed}/requests")
    prefixes = [
        tuple(rng.randrange(PROMPT_VOCABULARY) for _ in range(rng.choice((0, 32, 64, 128))))
        for _ in range(PREFIXES)
    ]
    kinds = random.Random(f"{plan.seed}/kinds")
    conversations = Conversations(plan) if plan.conversations else None
    # Most moves are of long answers.
    long = (120,) if plan.move_gap_s else ()
    for number in range(plan.requests):
        own = tuple(rng.randrange(PROMPT_VOCABULARY) for _ in range(rng.randint(2, 90)))
        cancelled = rng.random() < CANCELLED_SHARE
        request = ChaosRequest(
            number=number,
            prompt=rng.choice(prefixes) + own,
            answer_tokens=rng.choice((1, 2, 5, 12, 30, *long)),
            cancel_after_s=rng.uniform(0.0, plan.cancel_max_s) if cancelled else None,
            router=rng.randrange(plan.routers),
        )
        if conversations is not None:
            request = conversations.next_turn(request)
        if plan.mixed:
            request = replace(request, kind=kinds.choices(list(_MIX), list(_MIX.values()))[0])
        yield request


class Conversations:
    """The latest conversations. A worker that had a turn has its KV in one of its tiers, and another worker has not."""

    def __init__(self, plan: ChaosPlan) -> None:
        self._random = random.Random(f"{plan.seed}/conversations")
        self._model = SimModel(parse_settings(plan.model))
        self._texts: deque[tuple[int, ...]] = deque(maxlen=CONVERSATIONS)

    def next_turn(self, request: ChaosRequest) -> ChaosRequest:
        """The request as the next turn of a conversation, or as the first turn of a new one."""
        if self._texts and self._random.random() < CONTINUED_SHARE:
            earlier = self._random.choice(self._texts)
            if len(earlier) < CONVERSATION_TOKENS_MAX:
                asked = request.prompt[-FOLLOW_UP_TOKENS_MAX:]
                request = replace(request, prompt=earlier + asked)
        answer = self._model.expected_tokens(request.prompt, request.answer_tokens)
        self._texts.append(request.prompt + tuple(answer))
        return request


SCENARIOS = (
    "all",
    "ledger",
    "quarantine",
    "lease",
    "kill_timer",
    "tiers",
    "pool",
    "pool_seal",
    "roles",
)


def scenario(
    name: str,
    seed: int,
    requests: int,
    broken: str = "",
    credentials: str = "local",
    *,
    tiers: bool = False,
    pool: bool = False,
    both: bool = False,
    mixed: bool = False,
    hostile: bool = False,
) -> ChaosPlan:
    """All faults at once, or only those against one safeguard, so that its loss shows within few requests.

    `tiers` adds tiers below KV memory, which the scenario "tiers" has anyway. `pool` adds the remote pool too, which
    the scenario "pool" has anyway. With `both`, every worker has both roles, and the policy changes them. With `mixed`,
    requests are of every kind, and main memory has room for promises. `hostile` adds a lying worker of each role.
    """
    plan = replace(_scenario(name, seed, requests, broken), credentials=credentials)
    if mixed:
        plan = replace(
            plan, mixed=True, move_gap_s=0.05, host_gib=_PROMISED_BLOCKS * _BLOCK_BYTES / 2**30
        )
    if hostile:
        plan = replace(
            plan,
            prefill_tensor_parallel=(*plan.prefill_tensor_parallel, 1),
            decode_tensor_parallel=(*plan.decode_tensor_parallel, 1),
            hostile=True,
        )
    if both:
        plan = replace(
            plan,
            prefill_tensor_parallel=(),
            decode_tensor_parallel=(),
            worker_tensor_parallel=(1, 2, 4, 1, 2),
            role_interval_s=1.0,
        )
    if pool:
        return with_pool(plan)
    return with_tiers(plan) if tiers else plan


def with_tiers(plan: ChaosPlan) -> ChaosPlan:
    """The plan with KV memory so small that blocks are evicted and loaded all the time."""
    return replace(
        plan,
        wire=replace(plan.wire, disk_changed=0.05),
        block_size=8,
        block_count=160,
        host_gib=96 * _BLOCK_BYTES / 2**30,
        disk_gib=256 * _BLOCK_BYTES / 2**30,
        conversations=True,
    )


def with_pool(plan: ChaosPlan) -> ChaosPlan:
    """The plan with small tiers, and with a remote pool that prefill workers fill and all workers read.

    Its store fails too, unless no process fails.
    """
    plan = with_tiers(plan)
    return replace(
        plan,
        wire=replace(plan.wire, pool_changed=plan.wire.pool_changed or 0.05),
        kinds=plan.kinds | _POOL_FAULTS if plan.kinds else plan.kinds,
        host_gib=96 * _POOLED_BLOCK_BYTES / 2**30,
        disk_gib=256 * _POOLED_BLOCK_BYTES / 2**30,
        pool_gib=1 / 16,
    )


def _pool_plan(seed: int, requests: int, wire: WireFaults) -> ChaosPlan:
    """Few workers with a remote pool, without faults of processes."""
    return with_pool(
        ChaosPlan(
            seed,
            requests,
            concurrency=8,
            wire=wire,
            kinds=frozenset(),
            prefill_tensor_parallel=(1,),
            decode_tensor_parallel=(1, 1),
            routers=1,
            gap_max_s=4.0,
            freezes_s=(0.5, 3.0),
        )
    )


def _scenario(name: str, seed: int, requests: int, broken: str) -> ChaosPlan:
    match name:
        case "pool":
            wire = WireFaults(seed, doubled=0.01, pool_changed=0.2, break_part=broken)
            return replace(_pool_plan(seed, requests, wire), kinds=_POOL_FAULTS)
        case "pool_seal":
            wire = WireFaults(seed, pool_changed=0.3, break_part=broken)
            return _pool_plan(seed, requests, wire)
        case "tiers":
            wire = WireFaults(seed, doubled=0.01, break_part=broken)
            return with_tiers(ChaosPlan(seed, requests, wire=wire, kinds=frozenset()))
        case "roles" | "ledger":
            doubled, layer_s = (0.3, 0.005) if name == "ledger" else (0.0, 0.0)
            wire = WireFaults(seed, doubled=doubled, break_part=broken)
            return ChaosPlan(seed, requests, wire=wire, kinds=frozenset(), layer_s=layer_s)
        case "quarantine":
            wire = WireFaults(seed, cut=0.03, slow_write_max_s=0.3, break_part=broken)
            return ChaosPlan(seed, requests, wire=wire, kinds=frozenset())
        case "lease" | "kill_timer":
            # A resumed sender has the end of its stream and its next write before it. Or it is frozen within a write,
            # for longer than lease and quarantine.
            between = name == "lease"
            slow_turn_s, slow_write_s = (0.05, 0.0) if between else (0.0, 0.3)
            wire = WireFaults(
                seed,
                cut_after_silence_s=1.0,
                slow_turn_max_s=slow_turn_s,
                slow_write_max_s=slow_write_s,
                break_part=broken,
            )
            return ChaosPlan(
                seed,
                requests,
                wire=wire,
                kinds=frozenset({(_PREFILL, FaultKind.FREEZE)}),
                gap_max_s=1.0,
                freezes_s=(4.0 if between else 8.0,),
                lease_ttl_s=0.4,
                quarantine_s=0.5 if between else 5.0,
            )
    wire = WireFaults(
        seed,
        lost=0.002,
        doubled=0.01,
        delayed=0.01,
        delay_max_s=0.2,
        cut=0.001,
        slow_write_max_s=0.02,
        break_part=broken,
    )
    return ChaosPlan(seed, requests, wire=wire)
