"""What the policy for pairs makes of the workers of a deployment: in the queue, and in placement."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.inference.v1 import inference_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.time_model.model import (
    HandoverTimes,
    StepTimes,
    TimeModel,
    time_model_to_proto,
)
from headrace_kv.compatibility import fingerprint
from headrace_kv.layout import WorkerRef
from headrace_router.costs import Candidates
from headrace_router.placement import Decision, KvAware, PlacementRequest, RoutePolicy
from headrace_router.prefill_queue.pairs import Pairing
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.task import QueuedTask, TaskTerms
from headrace_router.workers.table import Load, LoadTable, Worker
from headrace_simulator.virtual_time import run_virtually
from tests.sim_layout import LAYOUT

PREFER, REQUIRE = registry_pb2.PAIR_RULE_PREFER, registry_pb2.PAIR_RULE_REQUIRE
_ZONES = ("a", "b", "")
_PROMPT_TOKENS = 101


@dataclass
class Policy:
    """A policy that a test replaces, as the registry's view does."""

    policy: registry_pb2.Policy = field(default_factory=registry_pb2.Policy)


def zone_policy(rule: registry_pb2.PairRule.ValueType, **fields: float) -> registry_pb2.Policy:
    return registry_pb2.Policy(
        pair_level=registry_pb2.PAIR_LEVEL_ZONE,
        pair_rule=rule,
        **fields,  # type: ignore[arg-type]
    )


def ref(name: str) -> WorkerRef:
    return WorkerRef(name, "i")


def member(name: str, zone: str) -> registry_pb2.Member:
    prefills = name.startswith("p")
    role = registry_pb2.Member.ROLE_PREFILL if prefills else registry_pb2.Member.ROLE_DECODE
    return registry_pb2.Member(
        worker_id=name, incarnation="i", role=role, model="sim", place=registry_pb2.Place(zone=zone)
    )


class Site:
    """Workers with zones: p0, p1 and so on with credits in a queue, d0, d1 and so on in a table."""

    def __init__(
        self,
        prefill_zones: list[str],
        decode_zones: list[str],
        policy: registry_pb2.Policy,
        credit: int = 1,
    ) -> None:
        self.zones = {f"p{number}": zone for number, zone in enumerate(prefill_zones)}
        self.zones |= {f"d{number}": zone for number, zone in enumerate(decode_zones)}
        self.policy = Policy(policy)
        self.pairing = Pairing(lambda: self.policy.policy)
        self.pairing.update([member(name, zone) for name, zone in self.zones.items()])
        self.queue = PrefillQueue(100, sign=lambda task, ref, layout_hash: b"", pairs=self.pairing)
        self.streams = [
            self.queue.add_worker(ref(f"p{number}"), "sim", LAYOUT)
            for number in range(len(prefill_zones))
        ]
        for stream in self.streams:
            if credit:
                self.queue.add_credits(stream, credit)
        names = [name for name in self.zones if name.startswith("d")]
        self.table = LoadTable(
            Worker(ref(name), f"{name}:1", "sim", 4_096, 10, LAYOUT) for name in names
        )
        for name in names:
            self.table.set(ref(name), Load(total_tokens=1_000))
        self._numbers = count()

    def enqueue(self, decode: str, cached: dict[str, int] | None = None) -> QueuedTask:
        task = prefill_pb2.PrefillTask(
            transfer_id=f"x{next(self._numbers)}",
            token_ids=range(100),
            decode_worker_id=decode,
            decode_incarnation="i",
        )
        known = {ref(name): tokens for name, tokens in (cached or {}).items()}
        return self.queue.enqueue(task, layout=LAYOUT, terms=TaskTerms(1e9, cached=known))

    def choose(self, cached: dict[str, int] | None = None) -> Decision:
        columns = np.array(
            [(cached or {}).get(worker.ref.worker_id, 0) for worker in self.table.workers], float
        )
        pulling = self.queue.workers.pulling()
        candidates = Candidates(
            self.table, columns, pulling, 0.0, self.queue.pairs.costs(self.table, pulling)
        )
        wish = inference_pb2.PREFILL_PLACEMENT_UNSPECIFIED
        request = PlacementRequest("sim", _PROMPT_TOKENS, wish, RoutePolicy(), 30.0)
        return KvAware(Random(1)).choose(request, candidates)


def sent_to(queued: QueuedTask) -> str:
    return "" if queued.worker is None else queued.worker.worker_id


async def test_a_preferred_pair_is_taken_while_it_has_room() -> None:
    site = Site(["b", "a", "b"], ["a"], zone_policy(PREFER), credit=1)
    tasks = [site.enqueue("d0") for _ in range(3)]
    assert sent_to(tasks[0]) == "p1"
    assert {sent_to(task) for task in tasks[1:]} == {"p0", "p2"}


async def test_a_cached_prompt_outweighs_the_distance() -> None:
    site = Site(["b", "a"], ["a"], zone_policy(PREFER, far_weight=0.5), credit=9)
    assert sent_to(site.enqueue("d0", {"p0": 40})) == "p1"
    assert sent_to(site.enqueue("d0", {"p0": 100})) == "p0"


async def test_the_learned_time_of_hand_overs_joins_the_cost() -> None:
    site = Site(["a", "b"], ["a", "b"], zone_policy(PREFER, far_weight=0.0), credit=9)
    first = site.enqueue("d0")
    assert sent_to(first) == "p0"
    # 100 tokens are computed in 1 s, and handed over to d0 in 2 s.
    times = TimeModel(
        StepTimes(s_per_prompt_token=0.01, prompt_steps=9),
        links={"d0": HandoverTimes(fixed_s=2.0, count=3)},
    )
    done = prefill_pb2.TaskDone(transfer_id=first.task.transfer_id)
    done.time_model.CopyFrom(time_model_to_proto(times))
    site.queue.task_ended(site.streams[0], done)
    task = site.enqueue("d0")
    assert sent_to(task) == "p1"
    assert task.extra_tokens is not None
    assert task.extra_tokens(ref("p0")) == pytest.approx(200)
    assert task.extra_tokens(ref("p1")) == 0.0
    assert sent_to(site.enqueue("d1")) == "p0"


async def test_without_a_level_nothing_changes() -> None:
    site = Site(["b", "a"], ["a"], registry_pb2.Policy(pair_rule=REQUIRE))
    assert site.pairing.fits(ref("d0")) is None
    assert site.enqueue("d0").extra_tokens is None
    assert site.pairing.costs(site.table, site.queue.workers.pulling()) is None


async def test_another_policy_holds_at_once() -> None:
    site = Site(["b"], ["a", "b"], zone_policy(PREFER))
    assert site.choose().remote
    site.policy.policy = zone_policy(REQUIRE)
    assert site.choose({"d0": 64}).worker.ref == ref("d1")
    site.pairing.update([member("d1", "a"), member("p0", "b")])
    assert not site.choose().remote


async def test_placement_prefers_workers_with_a_prefill_worker_of_their_zone() -> None:
    site = Site(["b"], ["a", "b"], zone_policy(PREFER, far_weight=0.5))
    decision = site.choose()
    assert (decision.worker.ref, decision.remote) == (ref("d1"), True)
    near, far = decision.candidates
    assert far.first_token_ms == pytest.approx(near.first_token_ms + 0.5 * 10)
    # 64 cached tokens are worth more than the distance of the other 36.
    assert site.choose({"d0": 64}).worker.ref == ref("d0")


_ZONE_LISTS = st.lists(st.sampled_from(_ZONES), min_size=1, max_size=5)
_STEPS = st.lists(st.tuples(st.sampled_from(["task", "credit"]), st.integers(0, 4)), max_size=20)


@given(_ZONE_LISTS, _ZONE_LISTS, _STEPS, st.sampled_from([PREFER, REQUIRE]))
def test_tasks_follow_the_rule_whatever_order_tasks_and_credits_come_in(
    prefill_zones: list[str],
    decode_zones: list[str],
    steps: list[tuple[str, int]],
    rule: registry_pb2.PairRule.ValueType,
) -> None:
    async def run() -> None:
        site = Site(prefill_zones, decode_zones, zone_policy(rule), credit=0)
        tasks: list[QueuedTask] = []
        for kind, number in steps:
            decode = f"d{number % len(decode_zones)}"
            zone = site.zones[decode]
            reachable = rule == PREFER or (zone and zone in prefill_zones)
            if kind == "credit":
                site.queue.add_credits(site.streams[number % len(prefill_zones)], 1)
            elif reachable:
                tasks.append(site.enqueue(decode))
        for task in tasks:
            zone = site.zones[task.decode.worker_id]
            fitting = [
                stream
                for stream in site.streams
                if rule == PREFER or (zone and site.zones[stream.ref.worker_id] == zone)
            ]
            if task.worker is None:
                assert not any(stream.credits for stream in fitting)
            else:
                assert task.worker in {stream.ref for stream in fitting}

    run_virtually(run)


@given(_ZONE_LISTS, _ZONE_LISTS, st.data())
def test_placement_follows_the_rule(
    prefill_zones: list[str], decode_zones: list[str], data: st.DataObject
) -> None:
    async def run() -> None:
        site = Site(prefill_zones, decode_zones, zone_policy(REQUIRE))
        cached = {
            f"d{number}": data.draw(st.integers(0, 64)) for number in range(len(decode_zones))
        }
        decision = site.choose(cached)
        zone = site.zones[decision.worker.ref.worker_id]
        near = bool(zone) and zone in prefill_zones
        assert decision.remote == near
        # A worker without a prefill worker of its zone is chosen only when all are.
        possible = [zone for zone in decode_zones if zone and zone in prefill_zones]
        assert near or not possible

    run_virtually(run)


async def test_costs_follow_the_pulling_workers() -> None:
    site = Site(["a"], ["a"], zone_policy(REQUIRE))
    pulling = {fingerprint(LAYOUT): frozenset({ref("p0")})}
    for layouts, allowed in ((pulling, True), ({}, False), (pulling, True)):
        costs = site.pairing.costs(site.table, layouts)
        assert costs is not None
        assert costs.allowed.all() == allowed
