"""Two prefill workers compute one prompt for a decode worker, all with simulated engines."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.inference.v1 import first_token_pb2, trace_pb2
from headrace_engine.config import WorkerRole
from headrace_engine.connector.step_executor import StepExecutor
from headrace_prefill import prefix_fetch
from headrace_router.prefill_queue.group import QueueGroup
from headrace_router.prefill_queue.task import QueuedTask
from tests.component.worker.serving import MODEL, Workers, running
from tests.suite.deployment import greedy, prompt_of
from tests.waiting import until

LAYERS = 4
DIVIDED = f"{MODEL},layers={LAYERS},prefill_s_per_token=0.001,decode_step_s=0.002"
DIVIDED_AT = 320
POOLS: dict[WorkerRole, int] = {"prefill": 2, "decode": 1}
FIRST, SECOND = "prefill-0", "prefill-1"
BY_DECODE = first_token_pb2.FIRST_TOKEN_POLICY_DECODE
BY_PREFILL = first_token_pb2.FIRST_TOKEN_POLICY_PREFILL


@pytest.fixture(autouse=True)
def dividing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt of each prompt is divided, whatever workers have learned."""

    def division(group: QueueGroup, queued: QueuedTask, gain: float) -> Any:
        streams = {ref.worker_id: one for ref, one in group.worker_streams.items()}
        first, second = streams.get(FIRST), streams.get(SECOND)
        if first is None or second is None or not (first.may_divide and second.may_divide):
            return None
        return first, second, DIVIDED_AT

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
async def test_two_prefill_workers_compute_one_prompt(
    first_token: first_token_pb2.FirstTokenPolicy.ValueType,
) -> None:
    async with running(DIVIDED, roles=POOLS, prefix_fetch_gain=0) as workers:
        workers.rig.policy.first_token = first_token
        for length in (DIVIDED_AT + 2, 500, 700):
            assert await divided(workers, length, f"r{length}") == SECOND
        spans = (await workers.rig.trace_of("r700")).spans
        computing = {
            one.attributes["headrace.tokens"]: one
            for one in spans
            if one.name == "headrace.prefill.compute"
        }
        first, second = computing[str(DIVIDED_AT)], computing[str(700 - DIVIDED_AT)]
        # Both compute at the same time.
        assert start_ns(first) < start_ns(second) < end_ns(first) < end_ns(second)
        links = {
            one.attributes["headrace.decode.worker_id"]: one
            for one in spans
            if one.name == "headrace.transfer.link"
        }
        # The second worker waited for these layers.
        assert start_ns(second) < end_ns(links[SECOND]) < end_ns(second)
        assert links.keys() == {SECOND, "decode"}


def start_ns(span: trace_pb2.Span) -> int:
    return span.start_time.ToNanoseconds()


def end_ns(span: trace_pb2.Span) -> int:
    return start_ns(span) + span.duration.ToNanoseconds()


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize(
    ("lost", "silent"), [(FIRST, False), (FIRST, True), (SECOND, False)], ids=str
)
async def test_the_loss_of_a_worker_at_each_layer_costs_time_only(
    layer: int, lost: str, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a layer on, it sends nothing: its sender stops, or it is only late."""
    names = set[str]()
    written = StepExecutor.layer_written

    def lose(executor: StepExecutor, number: int) -> None:
        found = {one.transfer_id for one in executor._computed}
        is_lost = any(name.endswith(".prefix") == (lost == FIRST) for name in found)
        if is_lost and number >= layer and not names:
            names.update(found)
            if not silent:
                for name in found:
                    executor.stop(name)
        if found.isdisjoint(names):
            written(executor, number)

    monkeypatch.setattr(StepExecutor, "layer_written", lose)
    monkeypatch.setattr(prefix_fetch, "late_layers_s", lambda times, tokens: 0.5)
    async with running(DIVIDED, roles=POOLS, prefix_fetch_gain=0) as workers:
        # The other one computes it again, alone.
        assert await divided(workers, 700) == ({FIRST, SECOND} - {lost}).pop()
        assert names


@pytest.mark.parametrize("lost", [FIRST, SECOND])
async def test_a_killed_worker_costs_time_only(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    killing = list[str]()
    async with running(DIVIDED, roles=POOLS, prefix_fetch_gain=0) as workers:
        written = StepExecutor.layer_written

        def kill(executor: StepExecutor, number: int) -> None:
            written(executor, number)
            is_lost = any(
                one.transfer_id.endswith(".prefix") == (lost == FIRST) for one in executor._computed
            )
            if is_lost and number == 1 and not killing:
                killing.append(lost)
                workers.serving[lost].cancel()

        monkeypatch.setattr(StepExecutor, "layer_written", kill)
        assert await divided(workers, 700) == ({FIRST, SECOND} - {lost}).pop()
        assert killing
