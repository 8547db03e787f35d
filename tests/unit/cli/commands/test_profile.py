"""What `headrace profile` sends and computes, with a worker of known speed, and which deployments it measures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.inference.v1 import inference_pb2
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_cli.app import app
from headrace_cli.commands import profile
from headrace_cli.commands.profile import ProfileGrid, Profiler, WorkerSize
from headrace_common.errors import ConfigError, InternalError
from headrace_simulator.virtual_time import run_virtually

SIZE = WorkerSize("sim", 4_096, 8, 8_192)
GRID = ProfileGrid((100, 400), (64, 1_000), (1, 2, 4), 2, 16, 60.0, 0)


class Worker:
    """A prompt token takes 1 ms, one prompt at a time. A step takes 10 ms and 2 ms for each answer."""

    def __init__(self, *, answers_end_early: bool = False) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.lines: list[str] = []
        self._prefill = asyncio.Lock()
        self._running = 0
        self._answers_end_early = answers_end_early

    async def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        assert request.sampling.ignore_eos
        assert timeout_s == GRID.timeout_s
        self.prompts.append(tuple(request.tokens.ids))
        async with self._prefill:
            await asyncio.sleep(0.001 * len(request.tokens.ids))
        self._running += 1
        try:
            count = 3 if self._answers_end_early else request.sampling.max_tokens
            for _ in range(count):
                await asyncio.sleep(0.01 + 0.002 * self._running)
                yield inference_pb2.GenerateResponse(token_ids=[7])
        finally:
            self._running -= 1

    def profiler(self, grid: ProfileGrid = GRID, size: WorkerSize = SIZE) -> Profiler:
        return Profiler(self.generate, size, grid, self.lines.append)


def test_prefill_is_the_time_to_the_first_token_by_length() -> None:
    async def work() -> None:
        points = await Worker().profiler().prefill_points()
        assert [point.prompt_tokens for point in points] == [100, 400]
        assert points[0].ttft_s == pytest.approx(0.1 + 0.012)
        assert points[1].ttft_s == pytest.approx(0.4 + 0.012)

    run_virtually(work)


def test_decode_is_the_rate_while_all_answers_are_under_way() -> None:
    async def work() -> None:
        points = await Worker().profiler(replace(GRID, contexts=(64,))).decode_points()
        assert [round(point.itl_s * point.tokens_per_s) for point in points] == [1, 2, 4]
        for point, concurrency in zip(points, (1, 2, 4), strict=True):
            assert point.itl_s == pytest.approx(0.01 + 0.002 * concurrency, rel=0.1)
            assert point.context_tokens == 64 + 8
            assert point.kv_usage == pytest.approx(concurrency * 72 / SIZE.kv_tokens)

    run_virtually(work)


def test_answers_that_do_not_fit_together_are_left_out() -> None:
    async def work() -> None:
        worker = Worker()
        points = await worker.profiler(size=replace(SIZE, kv_tokens=2_600)).decode_points()
        assert [
            (point.context_tokens, round(point.itl_s * point.tokens_per_s)) for point in points
        ] == [
            *((72, concurrency) for concurrency in (1, 2, 4)),
            *((1008, concurrency) for concurrency in (1, 2)),
        ]
        assert "4 answers after 1000 tokens: they do not fit together, left out" in worker.lines

    run_virtually(work)


def test_answers_that_end_too_early_make_no_point() -> None:
    async def work() -> None:
        assert await Worker(answers_end_early=True).profiler().decode_points() == ()

    run_virtually(work)


def test_lengths_beyond_the_context_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="prompts of 5000 tokens do not fit into the context of 4096"
    ):
        replace(GRID, contexts=(5_000,)).check(SIZE)


_Role = registry_pb2.Member.Role
PREFILL, DECODE = _Role.ROLE_PREFILL, _Role.ROLE_DECODE


def member(role: _Role.ValueType, model: str = "small") -> registry_pb2.Member:
    found = registry_pb2.Member(
        worker_id=f"{model}-{role}", role=role, model=model, max_model_len=2_048, max_num_seqs=8
    )
    found.layout.groups.add(block_tokens=16)
    return found


def deployment(
    monkeypatch: pytest.MonkeyPatch, *members: registry_pb2.Member, total_blocks: int = 100
) -> None:
    async def list_members(registry: str) -> list[registry_pb2.Member]:
        return list(members)

    async def worker_status(endpoint: str) -> worker_pb2.WatchStatusResponse:
        return worker_pb2.WatchStatusResponse(total_blocks=total_blocks)

    monkeypatch.setattr(profile, "list_members", list_members)
    monkeypatch.setattr(profile, "worker_status", worker_status)


async def test_the_size_is_that_of_the_decode_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment(monkeypatch, member(PREFILL), member(DECODE), member(DECODE, "other"))
    assert await profile.worker_size("registry", "small") == WorkerSize("small", 2_048, 8, 1_600)


@pytest.mark.parametrize(
    "members",
    [
        (member(DECODE),),
        (member(PREFILL), member(DECODE), member(DECODE)),
        (member(PREFILL), member(DECODE), member(PREFILL, "other"), member(DECODE, "other")),
    ],
)
async def test_one_worker_of_each_role_is_measured(
    monkeypatch: pytest.MonkeyPatch, members: tuple[registry_pb2.Member, ...]
) -> None:
    deployment(monkeypatch, *members)
    with pytest.raises(ConfigError, match="a profile is that of one each"):
        await profile.worker_size("registry", "")


async def test_workers_of_both_roles_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [member(_Role.ROLE_BOTH), member(_Role.ROLE_BOTH)]
    deployment(monkeypatch, *both, member(PREFILL, "other"), member(DECODE, "other"))
    with pytest.raises(ConfigError, match=r"2 workers of both roles serve, .* --prefill 1"):
        await profile.worker_size("registry", "")
    assert (await profile.worker_size("registry", "other")).model == "other"


async def test_a_worker_without_a_size_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment(monkeypatch, member(PREFILL), member(DECODE), total_blocks=0)
    with pytest.raises(InternalError, match="small-3 does not report"):
        await profile.worker_size("registry", "")


def test_the_folder_of_the_output_must_exist(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["profile", "--output", str(tmp_path / "none" / "p.json")])
    assert result.exit_code == 2
    assert "its folder does not exist" in result.output
