"""Two prefill workers compute one prompt for a decode worker, all with simulated engines."""

from __future__ import annotations

import itertools
from itertools import pairwise
from typing import Any

import pytest

from headrace.inference.v1 import first_token_pb2
from headrace_engine.config import WorkerRole
from headrace_engine.connector.step_executor import StepExecutor
from headrace_prefill import prefix_fetch
from headrace_router.prefill_queue.group import QueueGroup
from headrace_router.prefill_queue.task import QueuedTask
from tests.component.worker.serving import MODEL, Workers, end_ns, lose_layers, running, start_ns
from tests.suite.deployment import greedy, prompt_of
from tests.waiting import until

LAYERS = 4
DIVIDED = f"{MODEL},layers={LAYERS},prefill_s_per_token=0.001,decode_step_s=0.002"
ENDS = (192, 320, 480)
"""Of the parts of a prompt but the last one."""
POOLS: dict[WorkerRole, int] = {"prefill": 2, "decode": 1}
FIRST, SECOND = "prefill-0", "prefill-1"
BY_DECODE = first_token_pb2.FIRST_TOKEN_POLICY_DECODE
BY_PREFILL = first_token_pb2.FIRST_TOKEN_POLICY_PREFILL


@pytest.fixture(autouse=True)
def dividing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt of each prompt is divided, whatever workers have learned."""

    def division(group: QueueGroup, queued: QueuedTask, gain: float) -> Any:
        streams = {ref.worker_id: one for ref, one in group.worker_streams.items()}
        pair = [streams.get(FIRST), streams.get(SECOND)]
        if not all(one is not None and one.may_divide for one in pair):
            return None
        ends = [end for end in ENDS if end < queued.tokens]
        return list(zip(itertools.cycle(pair), (*ends, queued.tokens), strict=False))

    monkeypatch.setattr(QueueGroup, "division", division)


async def divided(workers: Workers, length: int, name: str = "") -> str:
    """Runs a prompt, which must be answered as by the model. Returns its prefill worker."""
    workers.rig.policy.divide_gain = 0.15
    prefill, _ = await workers.check(greedy(prompt_of(length, length), 8, request_id=name))
    await workers.wait_idle()
    queue = workers.rig.router.queue
    await until(lambda: not any(one.tasks for one in queue.workers.loads().values()))
    return prefill


@pytest.mark.parametrize("first_token", [BY_DECODE, BY_PREFILL])
async def test_two_prefill_workers_compute_one_prompt_in_turn(
    first_token: first_token_pb2.FirstTokenPolicy.ValueType,
) -> None:
    async with running(DIVIDED, roles=POOLS, prefix_fetch_gain=0) as workers:
        workers.rig.policy.first_token = first_token
        for length, last in ((ENDS[0] + 2, SECOND), (400, FIRST), (700, SECOND)):
            assert await divided(workers, length, f"r{length}") == last
        await until(lambda: workers.rig.router.traces.get("r700").complete)
        trace = await workers.rig.trace_of("r700")
        computing = [one for one in trace.spans if one.name == "headrace.prefill.compute"]
        computing.sort(key=start_ns)
        # Where decode makes the first token, it computes the last one of the prompt.
        sizes = [b - a for a, b in pairwise((0, *ENDS, 700 - (first_token == BY_DECODE)))]
        assert [one.attributes["headrace.tokens"] for one in computing] == list(map(str, sizes))
        # Parts are computed at the same time. A busy machine may delay the start of one.
        pairs = list(pairwise(computing))
        assert any(start_ns(one) < end_ns(before) for before, one in pairs)
        assert all(end_ns(before) < end_ns(one) for before, one in pairs)
        links = [one for one in trace.spans if one.name == "headrace.transfer.link"]
        links.sort(key=end_ns)
        receivers = [one.attributes["headrace.decode.worker_id"] for one in links]
        assert receivers == [SECOND, FIRST, SECOND, "decode"]
        # Each waits for the last layers of the part before.
        assert all(
            end_ns(link) < end_ns(one) for link, one in zip(links, computing[1:], strict=False)
        )
        # No worker waits for a batch before its part.
        root = next(one for one in trace.spans if not one.parent_span_id)
        computed_us = (end_ns(computing[-1]) - start_ns(computing[0])) / 1e3
        assert float(root.attributes["headrace.latency.prefill_us"]) > 0.9 * computed_us
        # A part is sent once: its receiver has those before.
        sent_bytes = [int(one.attributes["headrace.payload_bytes"]) for one in links]
        assert [one * 700 // sent_bytes[-1] for one in sent_bytes[:-1]] == sizes[:-1]


PARTS = len(ENDS) + 1


def part_of(transfer_id: str) -> int:
    """The number of a part of a prompt of 700 tokens, by the transfer of its task."""
    return PARTS - 1 - transfer_id.count(".prefix")


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("silent", [False, True], ids=["stopped", "late"])
@pytest.mark.parametrize("part", range(PARTS))
async def test_the_loss_of_a_worker_at_each_layer_of_each_part_costs_time_only(
    part: int, silent: bool, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if silent and part == PARTS - 1:
        pytest.skip("decode waits for the last part, as for every hand-over")
    names = lose_layers(
        monkeypatch, layer, silent=silent, chosen=lambda name: part_of(name) == part
    )
    monkeypatch.setattr(prefix_fetch, "late_layers_s", lambda times, tokens: 0.5)
    async with running(DIVIDED, roles=POOLS, prefix_fetch_gain=0) as workers:
        # The worker of the last part computes also what it lacks. If it is lost, the other one computes the prompt.
        assert await divided(workers, 700) == (FIRST if part == PARTS - 1 else SECOND)
        assert names


@pytest.mark.parametrize("part", range(PARTS))
async def test_a_killed_worker_costs_time_only(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    killing = list[str]()
    lost = (FIRST, SECOND)[part % 2]
    async with running(DIVIDED, roles=POOLS, prefix_fetch_gain=0) as workers:
        written = StepExecutor.layer_written

        def kill(executor: StepExecutor, number: int) -> None:
            written(executor, number)
            is_lost = any(part_of(one.transfer_id) == part for one in executor._computed)
            if is_lost and number == 1 and not killing:
                killing.append(lost)
                workers.serving[lost].cancel()

        monkeypatch.setattr(StepExecutor, "layer_written", kill)
        assert await divided(workers, 700) == ({FIRST, SECOND} - {lost}).pop()
        assert killing
