"""Asynchronous scheduling: vLLM plans each step while the one before it is computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest

from headrace_common.time_model.model import StepTimes
from headrace_engine.config import EngineConfig
from headrace_engine.vllm.service import launch
from headrace_kv.layout import WorkerRef
from tests.vllm.conftest import IMPORTS_VLLM, RunJob
from tests.vllm.pair import STEPS_AHEAD
from tests.vllm.steps_ahead import LENGTHS, RUNS

pytestmark = [*IMPORTS_VLLM, pytest.mark.timeout(280)]

BLOCK_TOKENS = 32
STOP = 7
JOB = "tests.vllm.steps_ahead:answers"
Role = Literal["prefill", "decode", "both"]


@pytest.mark.core
def test_hand_overs_and_aborts_while_steps_are_planned_ahead(run_job: RunJob) -> None:
    """Both engines plan ahead. Answers of decode alone are the reference."""
    runs = ["alone", "handed over", "after first tokens", "stopped", "beside aborts"]
    found = run_job(
        JOB, model="tiny-llama", prefill_args=STEPS_AHEAD, decode_args=STEPS_AHEAD, runs=runs
    )
    assert found["scheduler"] == ["BudgetAsyncScheduler"] * 2
    assert found["answers"].keys() == {*runs}
    assert found["answers"]["handed over"] == found["answers"]["alone"]
    # Of each sampling: four with a first token of prefill, and two that continue after five tokens.
    for first in (0, 6):
        whole, *others = found["answers"]["after first tokens"][first : first + 6]
        assert others == [whole, whole, whole, whole[5:], whole[5:]]
    assert found["left_blocks"] == [0, 0]


def test_answers_are_the_same_when_steps_are_planned_ahead(run_job: RunJob) -> None:
    plain, ahead = (
        run_job(JOB, model="tiny-llama", prefill_args=engine_args, decode_args=engine_args)
        for engine_args in ("", STEPS_AHEAD)
    )
    assert plain["scheduler"] == ["BudgetScheduler"] * 2
    assert ahead["scheduler"] == ["BudgetAsyncScheduler"] * 2
    assert plain["answers"].keys() == RUNS.keys()
    assert ahead["answers"] == plain["answers"]
    assert len(plain["answers"]["alone"]) == len(LENGTHS)
    assert plain["answers"]["handed over"] == plain["answers"]["alone"]
    assert plain["left_blocks"] == ahead["left_blocks"] == [0, 0]


def config_of(
    role: Role, *, ahead: bool | None, connector: str = "IdleConnector", **more: Any
) -> Any:
    """vLLM's configuration as a worker of the role makes it, with a connector that transfers nothing."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    ours = EngineConfig(
        engine="vllm", model="models/tiny-llama", role=role, ref=WorkerRef("w", "1")
    )
    config = AsyncEngineArgs(
        model=ours.model,
        block_size=BLOCK_TOKENS,
        max_model_len=256,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        async_scheduling=ahead,
        **more,
        kv_transfer_config={
            "kv_connector": connector,
            "kv_connector_module_path": "tests.vllm.idle_connector",
            "kv_role": launch.kv_role(ours),
        },
    ).create_engine_config()
    launch._choose_scheduler(config, ahead)
    return config


def scheduler_of(config: Any) -> Any:
    """vLLM's scheduler without an engine."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    caches = KVCacheConfig(9, [], [KVCacheGroupSpec(["layer"], spec)])
    config.cache_config.num_gpu_blocks = caches.num_blocks
    kind = config.scheduler_config.get_scheduler_cls()
    return kind(config, caches, StructuredOutputManager(config), BLOCK_TOKENS)


def result_of(step: Any, token: int) -> Any:
    """The result of a step: this token for each of its requests."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(step.num_scheduled_tokens)
    numbers = {name: number for number, name in enumerate(names)}
    return ModelRunnerOutput(names, numbers, [[token] for _ in names])


@pytest.mark.core
@pytest.mark.parametrize("end", ["stop", "abort"])
@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_blocks_are_free_when_no_step_under_way_writes_them(role: Role, end: str) -> None:
    """I1: a transfer may get free blocks at once, and its writes are in no order with the steps."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    scheduler = scheduler_of(config_of(role, ahead=True))
    pool = scheduler.kv_cache_manager.block_pool
    sampling = SamplingParams(max_tokens=20, stop_token_ids=[STOP])
    free = pool.get_num_free_blocks()
    scheduler.add_request(Request("r", list(range(10, 50)), sampling, None))
    first = scheduler.schedule()
    ahead = scheduler.schedule()
    assert list(first.num_scheduled_tokens) == list(ahead.num_scheduled_tokens) == ["r"]
    if end == "abort":
        scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    scheduler.update_from_output(first, result_of(first, STOP))
    # It has ended, and the step ahead still computes it.
    assert "r" not in scheduler.requests
    assert pool.get_num_free_blocks() == free - 2
    scheduler.update_from_output(ahead, result_of(ahead, STOP))
    assert pool.get_num_free_blocks() == free


@pytest.mark.core
@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_runs_in_the_first_step_that_is_planned_after_its_kv(ahead: bool) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    scheduler = scheduler_of(config_of("decode", ahead=ahead, connector="ReceivingConnector"))
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    for name in ("r", "aborted"):
        scheduler.add_request(Request(name, list(range(40)), SamplingParams(max_tokens=20), None))
    waiting = scheduler.schedule()
    assert not waiting.num_scheduled_tokens
    scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    # Its blocks may be written until its transfer has settled.
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free - 4
    scheduler.connector.arrived += ["r", "aborted"]
    # The results of the step before are not needed.
    assert scheduler.schedule().num_scheduled_tokens == {"r": 1}
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free - 2


@pytest.mark.core
@pytest.mark.parametrize("ahead", [False, True])
def test_a_short_prompt_overtakes_a_begun_one_for_a_step(ahead: bool) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    scheduler = scheduler_of(config_of("prefill", ahead=ahead, max_num_batched_tokens=64))
    scheduler.connector.step_times = StepTimes(s_per_prompt_token=1.0, prompt_steps=5)
    for name, tokens in (("long", 160), ("short", 20)):
        scheduler.add_request(
            Request(name, list(range(tokens)), SamplingParams(max_tokens=2), None)
        )
        if name == "long":
            assert scheduler.schedule().num_scheduled_tokens == {"long": 64}
    assert scheduler.schedule().num_scheduled_tokens == {"short": 20}
    assert scheduler.schedule().num_scheduled_tokens["long"] >= 63


@pytest.mark.core
@pytest.mark.parametrize(
    ("role", "ahead", "expected"),
    [
        # By default, vLLM plans no steps ahead on processors.
        ("decode", None, "BudgetScheduler"),
        ("decode", False, "BudgetScheduler"),
        ("decode", True, "BudgetAsyncScheduler"),
        ("both", True, "BudgetAsyncScheduler"),
        ("prefill", None, "BudgetScheduler"),
        ("prefill", True, "BudgetAsyncScheduler"),
    ],
)
def test_the_user_decides_or_vllm_by_the_platform(
    role: Role, ahead: bool | None, expected: str
) -> None:
    from headrace_engine.vllm.compat import schedules_ahead, steps_under_way

    config = config_of(role, ahead=ahead)
    assert config.scheduler_config.get_scheduler_cls().__name__ == expected
    assert schedules_ahead(config) == bool(ahead)
    assert steps_under_way(config) == (2 if ahead else 1)


def test_a_resumed_request_goes_on_with_the_numbers_after_its_last_token() -> None:
    """With asynchronous scheduling, vLLM gives it another list of its output."""
    import torch

    from headrace_engine.vllm import continuation

    class Sampler:
        def forward(self, logits: torch.Tensor, generators: Any, *_: Any) -> None:
            logits.exponential_(generator=generators[0])

    def state(output: list[int], generator: torch.Generator) -> Any:
        params = SimpleNamespace(seed=5, extra_args=None)
        return SimpleNamespace(sampling_params=params, output_token_ids=output, generator=generator)

    plain = torch.Generator()
    plain.manual_seed(5)
    request = state([], plain)
    continuation._prepare(request, Sampler(), 16)
    # Four tokens were sampled, and the last one was dropped when the request was preempted.
    for token in range(4):
        torch.zeros((1, 16)).exponential_(generator=request.generator)
        request.output_token_ids.append(token)
    resumed = state([0, 1, 2], request.generator)
    continuation._prepare(resumed, Sampler(), 16)
    other = state([0, 1, 2], torch.Generator())
    continuation._prepare(other, Sampler(), 16)
    draws = [torch.zeros((1, 16)).exponential_(generator=one.generator) for one in (resumed, other)]
    assert torch.equal(*draws)
