"""The replay of a router's events makes the same decisions, and finds the first one of other code."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from headrace.incident.v1 import incident_pb2
from headrace.inference.v1 import inference_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.callers.priority import Priority
from headrace_common.errors import ConfigError
from headrace_common.process.events import EVENT_BYTES, EventRing, event_json, incident_writer
from headrace_common.time_model.model import StepTimes, TimeModel, time_model_to_proto
from headrace_frontend.admission.fair_share import CapacityRequest, FairPool, Grant
from headrace_kv.compatibility import fingerprint
from headrace_kv.layout import WorkerRef
from headrace_router.costs import Candidates, TokenTargets
from headrace_router.incident.recording import Recorder, decision_text
from headrace_router.placement import Decision, KvAware, PlacementRequest, RoutePolicy
from headrace_router.prefill_queue.pairs import Pairing
from headrace_router.prefill_queue.task import TaskTerms
from headrace_router.prefill_queue.worker_stream import PrefillWorkerStream
from headrace_router.workers.table import Load, PromptWork, Worker
from headrace_simulator.incident import Replay, replay
from headrace_simulator.incident_file import read_incident
from headrace_simulator.virtual_time import run_virtually
from tests.sim_layout import LAYOUT
from tests.virtually import stand_still

_SECRET_TOKEN = 424_242
_TENANTS = ("a", "b", "c")
_POLICY = registry_pb2.Policy(tenant_weights={"a": 3.0})
_TIMES = TimeModel(StepTimes(0.01, 0.002, 1e-4, 1e-9, 1e-4, 1e-8, 50, 50))


def _ref(number: int, role: str = "d") -> WorkerRef:
    return WorkerRef(f"{role}{number}", "i")


@dataclass
class Traffic:
    """Random calls of the parts of a router."""

    ring: EventRing
    random: Random
    recorder: Recorder = field(init=False)

    async def run(self, calls: int) -> None:
        random = self.random
        self.recorder = Recorder(self.ring, lambda: _POLICY)
        self.recorder.update(())
        self.placement = self.recorder.placement()
        self.table = self.recorder.table(
            [Worker(_ref(n), "", "sim", 4_096, 8, LAYOUT) for n in range(7)]
        )
        self.pool = self.recorder.pool("slots", FairPool(9, lambda: _POLICY.tenant_weights))
        self.queue = self.recorder.queue(1_000, sign=lambda *_: b"", pairs=Pairing())
        self.streams: list[PrefillWorkerStream] = []
        self.held: list[tuple[str, int]] = []
        self.waiting: dict[CapacityRequest, None] = {}
        for number in range(3):
            stream = self.queue.add_worker(_ref(number, "p"), "sim", LAYOUT)
            self.queue.add_credits(stream, 2)
            self.streams.append(stream)
        kinds = (self._change_load, self._place, self._use_pool, self._enqueue, self._end_task)
        for number in range(calls):
            random.choice(kinds)(number)
            if random.random() < 0.05:
                # The timers of the queue are late: another call comes before their ends.
                stand_still(0.2)
                random.choice(kinds)(calls + number)
            await asyncio.sleep(random.expovariate(100.0))
            if number % 500 == 499:
                self._settle()
                self.recorder.checkpoint()

    def _settle(self) -> None:
        """A queue with tasks, and a pool with waiting requests, have no checkpoint."""
        while any(stream.tasks for stream in self.streams):
            self._end_task(0)
        while self.waiting or self.held:
            tenant, amount = self.held.pop()
            self.pool.release(tenant, amount)

    def _change_load(self, number: int) -> None:
        random = self.random
        load = Load(
            requests=random.randrange(10),
            held_tokens=random.randrange(4_000),
            total_tokens=8_000,
            reachable=random.random() < 0.9,
            prompts=PromptWork(random.randrange(500)),
            times=random.choice((TimeModel(), _TIMES)),
        )
        self.table.set(_ref(random.randrange(7)), load)

    def _place(self, number: int) -> None:
        random = self.random
        request = PlacementRequest(
            model="sim",
            prompt_tokens=random.randrange(2, 900),
            prefill_placement=inference_pb2.PREFILL_PLACEMENT_UNSPECIFIED,
            policy=RoutePolicy(100, 4.0, random.choice((0.0, 0.5)), None),
            remaining_s=random.choice((30.0, float("inf"))),
            failed=frozenset({_ref(1)} if random.random() < 0.1 else ()),
            targets=TokenTargets(random.choice((None, 0.3)), None, 0.01, 20.0),
        )
        cached = np.array([random.choice((0.0, 64.0, 256.0)) for _ in range(7)])
        pulling = {fingerprint(LAYOUT): frozenset(stream.ref for stream in self.streams)}
        self.placement.choose(request, Candidates(self.table, cached, pulling, random.random()))

    def _use_pool(self, number: int) -> None:
        random, pool = self.random, self.pool
        if self.held and random.random() < 0.6:
            tenant, amount = self.held.pop(random.randrange(len(self.held)))
            pool.release(tenant, amount)
            return
        if self.waiting and random.random() < 0.2:
            pool.cancel(self.waiting.popitem()[0])
            return
        tenant, amount = random.choice(_TENANTS), random.choice((1, 2))
        request = CapacityRequest(tenant, amount, lambda: None)

        def granted() -> None:
            self.waiting.pop(request, None)
            self.held.append((tenant, amount))

        request.on_granted = granted
        grant = pool.acquire(request)
        if grant is Grant.GRANTED:
            granted()
        elif grant is Grant.WAITING:
            self.waiting[request] = None

    def _enqueue(self, number: int) -> None:
        random = self.random
        tokens = random.randrange(1, 400)
        refs = random.sample([stream.ref for stream in self.streams], 2)
        cached = {ref: random.randrange(tokens) for ref in refs} if random.random() < 0.5 else {}
        terms = TaskTerms(
            deadline_s=asyncio.get_running_loop().time() + random.choice((5.0, 30.0)),
            cached=cached,
            returns_max=2,
            priority=random.choice(tuple(Priority)),
            tenant=random.choice(_TENANTS),
        )
        task = prefill_pb2.PrefillTask(
            transfer_id=f"t{number}", token_ids=[_SECRET_TOKEN] * tokens, decode_worker_id="d0"
        )
        end = self.queue.expect_task(LAYOUT, tokens, terms.priority, terms.tenant)
        end()
        self.queue.enqueue(task, layout=LAYOUT, terms=terms)

    def _end_task(self, number: int) -> None:
        random = self.random
        stream = random.choice(self.streams)
        if not stream.tasks:
            return
        transfer_id = next(iter(stream.tasks))
        self.queue.task_started(stream, transfer_id)
        done = prefill_pb2.TaskDone(transfer_id=transfer_id, cached_tokens=random.randrange(30))
        if random.random() < 0.3:
            done.time_model.CopyFrom(time_model_to_proto(_TIMES))
        self.queue.task_ended(stream, done)
        self.queue.add_credits(stream, 1)


def _recorded(calls: int, seed: int, bytes_max: int = 2**26) -> list[incident_pb2.Event]:
    ring = EventRing(bytes_max)
    run_virtually(lambda: Traffic(ring, Random(seed)).run(calls))
    return [
        incident_pb2.Event(
            monotonic_ns=monotonic_ns, kind=type(event).__name__, value=event_json(event)
        )
        for monotonic_ns, _, event in ring.since(0)
    ]


def _differing(result: Replay) -> dict[str, tuple[int, str]]:
    return {name: (one.differing, one.first) for name, one in result.kinds.items()}


def test_a_replay_makes_the_recorded_decisions() -> None:
    for seed in range(3):
        result = replay(_recorded(1_500, seed))
        assert _differing(result) == dict.fromkeys(result.kinds, (0, ""))
        assert all(one.compared > 150 for one in result.kinds.values())


def test_a_replay_can_begin_at_a_checkpoint() -> None:
    events = _recorded(4_000, 7, bytes_max=4_000 * EVENT_BYTES)
    assert events[0].kind not in ("Policy", "ListMembersResponse")
    result = replay(events)
    assert all(one.compared > 50 for one in result.kinds.values())
    assert _differing(result) == dict.fromkeys(result.kinds, (0, ""))


def test_where_a_prompt_is_divided_is_a_part_of_the_decision() -> None:
    worker = Worker(_ref(0), "", "sim", 4_096, 8, LAYOUT)
    decision = Decision(worker, remote=True, why="", shown=(), computes_from=64)
    assert decision_text(decision) != decision_text(replace(decision, computes_from=128))


class _IgnoresCache(KvAware):
    """Placement with a planted bug."""

    def choose(self, request: PlacementRequest, candidates: Candidates) -> Decision:
        return super().choose(request, replace(candidates, cached_tokens=None))


def test_the_first_decision_of_other_code_is_named() -> None:
    result = replay(_recorded(1_000, 1), _IgnoresCache)
    assert result.placement.differing > 0
    assert result.placement.first.startswith("recorded: d")
    assert result.placement.first_ns > 0
    assert result.queue.differing == result.pools.differing == 0


def test_events_have_no_token_of_a_prompt() -> None:
    events = _recorded(1_000, 2)
    assert any(event.kind == "TaskQueued" for event in events)
    assert not any(str(_SECRET_TOKEN) in event.value for event in events)


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "all.incident"
    with incident_writer(path) as write:
        write(incident_pb2.ListEventsResponse(events=_recorded(10, 3)))
    assert path.stat().st_mode & 0o777 == 0o600
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    for damaged in (content, content[:-9], b"text"):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"all\.incident"):
            read_incident(path)


@pytest.mark.parametrize("what", ["layouts", "names", "reasons", "times"])
def test_what_a_worker_sends_counts_as_what_it_takes(what: str) -> None:
    async def reported(ring: EventRing) -> None:
        recorder = Recorder(ring, lambda: _POLICY)
        queue = recorder.queue(9, sign=lambda *_: b"", pairs=Pairing())
        stream = queue.add_worker(_ref(0, "q"), "sim", LAYOUT)
        for number in range(200):
            if what == "layouts":
                large = replace(LAYOUT, stage_starts=tuple(range(9_000)))
                queue.add_worker(_ref(number, "p"), "sim", large)
            elif what == "names":
                queue.task_started(stream, "x" * 60_000)
            elif what == "reasons":
                done = prefill_pb2.TaskDone(transfer_id="t", reason="y" * 60_000)
                queue.task_ended(stream, done)
            else:
                links = dict.fromkeys(map(str, range(1_000)), _TIMES.handovers)
                queue.report_times(stream, replace(_TIMES, links=links))

    ring = EventRing(2_000_000)
    run_virtually(lambda: reported(ring))
    assert sum(len(event_json(event)) for *_, event in ring.since(0)) < 2_500_000
