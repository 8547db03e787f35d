"""Two workers of both roles in one process, with simulated engines, behind a real router and a real registry."""

from __future__ import annotations

import asyncio

import pytest

from headrace.inference.v1 import inference_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds
from headrace_decode import attempt as attempt_module
from headrace_decode import transfer_waiter
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.settings import parse_settings
from headrace_engine.worker.metrics import WorkerMetrics
from headrace_router import placement as placement_module
from headrace_router.costs import Asked, Costs
from headrace_router.workers.table import LoadTable, TimeColumns
from tests.channels import operator_channel
from tests.component.worker.serving import MODEL, Workers, end_ns, lose_layers, running, start_ns
from tests.suite.deployment import greedy, prompt_of
from tests.waiting import until

CLOSED_FORM = SimModel(parse_settings(MODEL))
NAMES = {"worker-0", "worker-1"}
TURNS_MAX = 20
ANY = inference_pb2.PREFILL_PLACEMENT_UNSPECIFIED
LOCAL = inference_pb2.PREFILL_PLACEMENT_LOCAL
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE


async def test_a_worker_fetches_what_the_other_one_has_of_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetches: list[tuple[str, int]] = []
    monkeypatch.setattr(
        WorkerMetrics,
        "prefix_fetched",
        lambda metrics, worker_id, reason, token_count: fetches.append((reason, token_count)),
    )
    async with running(prefix_fetch_gain=0, kv_fetch_timeout_s=20) as pair:
        prompt: list[int] = []
        for turn in range(TURNS_MAX):
            prompt += prompt_of(40, turn)
            assert set(await pair.check(greedy(prompt, 64, REMOTE))) == NAMES
            prompt += CLOSED_FORM.expected_tokens(prompt, 64)
            await pair.wait_idle()
            # Until the router has the events of the last turn, another worker may generate.
            if fetches:
                break
        ((reason, count),) = fetches
        # Blocks have 32 tokens.
        assert (reason, count >= 32) == ("", True)


async def test_a_worker_reports_its_own_requests_and_not_the_prompts_of_others() -> None:
    async with running(f"{MODEL},prefill_s_per_token=0.01") as pair:
        request = greedy(prompt_of(150, 1), 4, REMOTE)
        answer = asyncio.create_task(pair.check(request))
        # While it computes, the other worker holds the blocks.
        computing = ""

        async def computes() -> bool:
            nonlocal computing
            for name, one in pair.engines.items():
                usage = one.engine.usage()
                status = await pair.status(name)
                if usage.running_requests and not status.reserved_blocks:
                    assert not status.running_requests
                    assert not status.waiting_requests
                    computing = name
            return bool(computing)

        await until(computes)
        prefill, decode = await answer
        assert prefill == computing
        assert decode == (NAMES - {computing}).pop()
        await pair.wait_idle()


@pytest.mark.parametrize("placement", [LOCAL, REMOTE, ANY])
async def test_a_drained_worker_ends_and_no_request_is_lost(
    placement: inference_pb2.PrefillPlacement.ValueType,
) -> None:
    async with running(f"{MODEL},decode_step_s=0.005") as pair:
        asked = [greedy(prompt_of(40 + seed, seed), 40, placement) for seed in range(8)]
        starts = [asyncio.Event() for _ in asked]
        answers = [
            asyncio.create_task(pair.check(request, start))
            for request, start in zip(asked, starts, strict=True)
        ]
        await asyncio.gather(*(start.wait() for start in starts))
        async with operator_channel(pair.members["worker-0"].endpoint) as channel:
            grace = duration_from_seconds(20)
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            await stub.Drain(
                worker_pb2.DrainRequest(
                    incarnation=pair.members["worker-0"].incarnation, grace=grace
                ),
                timeout=5,
            )
        found = await asyncio.gather(*answers)
        assert {decode for _, decode in found} <= NAMES
        await asyncio.wait_for(asyncio.shield(pair.serving["worker-0"]), 20)
        await until(lambda: pair.rig.pulling() == {"worker-1"})
        # The worker that is left computes its prompts itself.
        assert await pair.check(greedy(prompt_of(50, 99), 6, ANY)) == ("", "worker-1")
        await pair.wait_idle()


LAYERS = 4
DIVIDED = f"{MODEL},layers={LAYERS},prefill_s_per_token=0.0005,decode_step_s=0.002"
DIVIDED_FORM = SimModel(parse_settings(DIVIDED))
DIVIDED_AT = 320


@pytest.fixture
def dividing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt of each prompt is divided, whatever workers have learned."""

    def division(
        table: LoadTable, asked: Asked, costs: Costs, row: int, gain: float
    ) -> tuple[int, int, float]:
        return 1 - row, DIVIDED_AT, 0.1

    monkeypatch.setattr(placement_module, "division", division)
    monkeypatch.setattr(TimeColumns, "all_known", lambda columns, usable: True)


async def divided(pair: Workers, prompt: list[int], name: str = "") -> tuple[str, str, int]:
    """The workers of a prompt, and the tokens that were transferred. The answer is the model's."""
    last = inference_pb2.GenerateResponse()
    request, tokens = greedy(prompt, 8, ANY, name), list[int]()
    pair.rig.policy.divide_gain = 0.15
    async for last in pair.rig.stub.Generate(request, timeout=60):
        tokens += last.token_ids
    assert tuple(tokens) == DIVIDED_FORM.expected_tokens(prompt, 8)
    usage, timing = last.usage, last.timing
    await pair.wait_idle()
    return timing.prefill_worker_id, timing.decode_worker_id, usage.transferred_tokens


@pytest.mark.usefixtures("dividing")
async def test_two_workers_compute_one_prompt() -> None:
    async with running(DIVIDED) as pair:
        for length in (DIVIDED_AT + 1, 500, 700):
            prefill, decode, transferred = await divided(
                pair, prompt_of(length, length), f"r{length}"
            )
            assert {prefill, decode} == NAMES
            assert transferred == DIVIDED_AT
        spans = {one.name: one for one in (await pair.rig.trace_of("r700")).spans}
        first, beside, waited = (
            spans[f"headrace.{name}"]
            for name in ("prefill.compute", "decode.beside", "decode.kv_wait")
        )
        assert first.attributes["headrace.tokens"] == str(DIVIDED_AT)
        # Both compute at the same time. The last layer comes while decode computes.
        assert start_ns(first) < start_ns(beside) < end_ns(first)
        assert start_ns(beside) < end_ns(waited) < end_ns(beside)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("silent", [False, True], ids=["stopped", "silent"])
@pytest.mark.usefixtures("dividing")
async def test_the_loss_of_the_first_worker_at_each_layer_costs_time_only(
    layer: int, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = lose_layers(monkeypatch, layer, silent=silent)
    monkeypatch.setattr(transfer_waiter, "late_layers_s", lambda times, tokens: 0.3)
    async with running(DIVIDED) as pair:
        request = divided(pair, prompt_of(700, 2))
        if silent and not layer:
            # Decode does not compute yet: the transfer's own deadline ends it, as for every prompt.
            monkeypatch.setattr(attempt_module, "transfer_deadline", lambda _: Deadline.after(1.0))
        _, _, transferred = await request
        assert lost
        # The second attempt is not divided.
        assert transferred in (0, 699)
