"""Processes die and restart. Every request ends in a correct answer or a named error before its deadline."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from rich.console import Console

from headrace.inference.v1 import inference_pb2
from headrace_cli.client import list_members
from headrace_cli.commands.drain import drain_worker
from headrace_common.errors import DeadlineExceeded, HeadraceError, InternalError
from tests.ports import free_port
from tests.suite.deployment import Outcome, Suite, prompt_of, suite

DEADLINE_S = 15.0
# Each prompt token takes this long, so that requests are in flight at the fault.
SLOW_PREFILL = ("prefill", "model", "sim:prefill_s_per_token=0.004")
SLOW_DECODE = ("decode", "model", "sim:decode_step_s=0.02")
MEMBER_TTL_S = 3.0


async def ended(it: Suite, prompt: list[int], count: int) -> Outcome | HeadraceError:
    """Returns the answer or the error, which comes at most shortly after the deadline."""
    started = time.monotonic()
    try:
        return await it.generate(prompt, count, timeout_s=DEADLINE_S)
    except HeadraceError as error:
        return error
    finally:
        assert time.monotonic() - started < DEADLINE_S + 3


async def test_a_killed_prefill_worker_costs_no_answer_while_another_lives(tmp_path: Path) -> None:
    async with suite(tmp_path, prefill_count=2, settings=(SLOW_PREFILL,)) as it:
        prompts = [prompt_of(150, number) for number in range(8)]
        running = [asyncio.create_task(ended(it, prompt, 6)) for prompt in prompts]
        await it.wait_running("prefill-0")
        it.kill("prefill-0")
        for prompt, outcome in zip(prompts, await asyncio.gather(*running), strict=True):
            assert isinstance(outcome, Outcome), outcome
            assert outcome.token_ids == it.expected(prompt, 6)


async def test_the_only_prefill_worker_killed_ends_in_answers_or_named_errors(
    tmp_path: Path,
) -> None:
    async with suite(tmp_path, settings=(SLOW_PREFILL,)) as it:
        prompts = [prompt_of(150, number) for number in range(6)]
        running = [asyncio.create_task(ended(it, prompt, 6)) for prompt in prompts]
        await it.wait_running("prefill-0")
        it.kill("prefill-0")
        for prompt, outcome in zip(prompts, await asyncio.gather(*running), strict=True):
            if isinstance(outcome, Outcome):
                assert outcome.token_ids == it.expected(prompt, 6)
            else:
                assert not isinstance(outcome, InternalError | DeadlineExceeded), outcome
                assert outcome.detail
        # Without a prefill worker, prompts are prefilled on the decode worker.
        prompt = prompt_of(80, 99)
        outcome = await it.generate(prompt, 6)
        assert outcome.token_ids == it.expected(prompt, 6)
        assert not outcome.last.timing.prefill_worker_id


async def test_no_request_fails_while_the_registry_is_away_and_comes_back(tmp_path: Path) -> None:
    # The worker restarts on its address, so the address must stay free in between.
    settings = (
        SLOW_DECODE,
        ("registry", "listen", f"127.0.0.1:{free_port()}"),
        ("prefill", "member_ttl_s", str(MEMBER_TTL_S)),
        ("decode", "member_ttl_s", str(MEMBER_TTL_S)),
    )
    async with suite(tmp_path, prefill_count=2, settings=settings) as it:
        stop = asyncio.Event()
        right = 0

        async def load(seed: int) -> None:
            nonlocal right
            while not stop.is_set():
                seed += 100
                prompt = prompt_of(40, seed)
                outcome = await it.generate(prompt, 5)
                assert outcome.token_ids == it.expected(prompt, 5)
                right += 1

        async def more(count: int) -> None:
            goal = right + count
            async with asyncio.timeout(DEADLINE_S):
                while right < goal and not any(task.done() for task in load_tasks):
                    await asyncio.sleep(0.02)

        load_tasks = [asyncio.create_task(load(number)) for number in range(3)]
        try:
            await more(10)
            it.kill("registry")
            # Longer than a lease.
            await asyncio.sleep(MEMBER_TTL_S + 1)
            await more(10)
            await it.restart("registry")
            async with asyncio.timeout(DEADLINE_S):
                while len(await list_members(it.deployment.registry)) < 3:
                    await asyncio.sleep(0.05)
            await asyncio.sleep(MEMBER_TTL_S)
            await more(10)
        finally:
            stop.set()
            await asyncio.gather(*load_tasks)
        await it.wait_joined(2, 1)


async def test_workers_that_die_while_the_registry_is_away_cost_one_attempt_at_most(
    tmp_path: Path,
) -> None:
    loud = ("prefill", "log_level", "debug")
    async with suite(tmp_path, prefill_count=2, decode_count=2, settings=(loud,)) as it:
        await it.wait_descriptors_prefetched()
        for number in range(4):
            await it.generate(prompt_of(60, number), 4)
        it.kill("registry")
        await asyncio.sleep(0.5)
        it.kill("decode-0")
        it.kill("prefill-0")

        async def ask(number: int) -> int:
            prompt = prompt_of(60, number)
            outcome = await it.generate(prompt, 4, placement=inference_pb2.PREFILL_PLACEMENT_REMOTE)
            assert outcome.token_ids == it.expected(prompt, 4)
            assert outcome.last.timing.decode_worker_id == "decode-1"
            assert outcome.last.timing.prefill_worker_id == "prefill-1"
            return outcome.last.timing.attempts

        at_once = await asyncio.gather(*(ask(number) for number in range(10, 18)))
        assert max(at_once) <= 2
        # The router has no registry and detects the broken connections, long before a lease expires.
        assert [await ask(number) for number in range(20, 26)] == [1] * 6


async def test_a_decode_worker_that_drains_finishes_what_it_has(tmp_path: Path) -> None:
    async with suite(tmp_path, decode_count=2, settings=(SLOW_DECODE,)) as it:
        prompts = [prompt_of(40, number) for number in range(6)]
        running = await it.begun(prompts, 50)
        assert await it.terminate("decode-0") == 0
        for prompt, outcome in zip(prompts, await asyncio.gather(*running), strict=True):
            assert outcome.token_ids == it.expected(prompt, 50)
        late = await it.generate(prompts[0], 3)
        assert late.last.timing.decode_worker_id == "decode-1"


async def test_tasks_left_after_the_drain_grace_are_computed_elsewhere(
    tmp_path: Path,
) -> None:
    async with suite(tmp_path, prefill_count=2, settings=(SLOW_PREFILL,)) as it:
        prompts = [prompt_of(250, number) for number in range(6)]
        running = [asyncio.create_task(it.generate(prompt, 4)) for prompt in prompts]
        await it.wait_running("prefill-0")
        with (tmp_path / "drain.log").open("w") as said:
            await drain_worker(
                it.deployment.registry, "prefill-0", 0.0, wait=True, console=Console(file=said)
            )
        outcomes = await asyncio.gather(*running)
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            assert outcome.token_ids == it.expected(prompt, 4)
        assert max(outcome.last.timing.attempts for outcome in outcomes) > 1
        assert it.child("prefill-0").process.returncode == 0


async def test_a_prefill_worker_that_drains_gives_its_tasks_back(tmp_path: Path) -> None:
    async with suite(tmp_path, prefill_count=2, settings=(SLOW_PREFILL,)) as it:
        prompts = [prompt_of(120, number) for number in range(12)]
        running = [asyncio.create_task(it.generate(prompt, 4)) for prompt in prompts]
        await it.wait_running("prefill-0")
        assert await it.terminate("prefill-0") == 0
        for prompt, outcome in zip(prompts, await asyncio.gather(*running), strict=True):
            assert outcome.token_ids == it.expected(prompt, 4)
