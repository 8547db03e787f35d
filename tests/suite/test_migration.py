"""Workers die or freeze during streams. The streams continue to the right last token without an error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.errors import HeadraceError
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.settings import SimSettings
from tests.ports import free_port
from tests.suite.deployment import VOCABULARY, Outcome, Suite, greedy, prompt_of, suite
from tests.suite.load import load
from tests.waiting import until

TOKENS = 60
# Ten times the 7 s after which the connection to a silent worker ends. Each answer must end by then.
NOTICED_S = 70.0
# A killed router's requests are released within 4 s. A machine that is ten times slower meets this.
RELEASED_S = 40.0
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
SLOW_DECODE = ("decode", "model", "sim:decode_step_s=0.02")
SEEDED: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "seed": 11,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logprobs": 2,
}


def asked(count: int, first_seed: int = 0) -> list[inference_pb2.GenerateRequest]:
    """Half of the requests are greedy, half sampled with a seed and penalties."""
    return [
        greedy(prompt_of(30 + n, first_seed + n), TOKENS, **(SEEDED if n % 2 else {}))
        for n in range(count)
    ]


async def check(
    it: Suite,
    requests: Sequence[inference_pb2.GenerateRequest],
    running: Sequence[asyncio.Task[Outcome]],
) -> list[Outcome]:
    """All answers are correct, despite any fault."""
    outcomes = await asyncio.gather(*running)
    for request, outcome in zip(requests, outcomes, strict=True):
        assert outcome.token_ids == it.expected_of(request)
        assert len(outcome.logprobs) == (TOKENS if request.sampling.HasField("logprobs") else 0)
        usage = outcome.last.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(request.tokens.ids), TOKENS)
        assert outcome.last.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
    return outcomes


def moved_to(lasts: Iterable[inference_pb2.GenerateResponse]) -> set[str]:
    """Workers that finished the answers of further attempts."""
    timings = [last.timing for last in lasts]
    return {timing.decode_worker_id for timing in timings if timing.attempts > 1}


@pytest.mark.core
async def test_streams_of_a_killed_decode_worker_continue_on_the_other(tmp_path: Path) -> None:
    async with suite(tmp_path, decode_count=2, settings=(SLOW_DECODE,)) as it:
        requests = asked(8)
        undisturbed = await asyncio.gather(*map(it.ask, requests))
        running = await it.begun(requests)
        victim, survivor = await it.busier("decode-0", "decode-1")
        it.kill(victim)
        outcomes = await check(it, requests, running)
        assert [one.text for one in outcomes] == [one.text for one in undisturbed]
        assert moved_to(one.last for one in outcomes) == {survivor}
        await it.wait_empty(survivor)


async def test_streams_of_a_frozen_decode_worker_continue_on_the_other(tmp_path: Path) -> None:
    workers = {"decode-0", "decode-1"}
    async with suite(tmp_path, decode_count=2, settings=(SLOW_DECODE,)) as it:
        requests = asked(8)
        running = await it.begun(requests, NOTICED_S)
        victim, survivor = await it.busier(*workers)
        with it.frozen(victim):
            outcomes = await check(it, requests, running)
        assert moved_to(one.last for one in outcomes) == {survivor}
        # After the thaw the worker has released the requests and serves again.
        for name in workers:
            await it.wait_empty(name)

        async def both_serve() -> bool:
            two = await asyncio.gather(*(it.generate(prompt_of(40, seed), 2) for seed in (51, 52)))
            return {one.last.timing.decode_worker_id for one in two} == workers

        await until(both_serve)


@pytest.mark.core
async def test_streams_of_the_only_decode_worker_wait_for_its_next_incarnation(
    tmp_path: Path,
) -> None:
    async with suite(tmp_path, settings=(SLOW_DECODE,)) as it:
        requests = asked(6)
        running = await it.begun(requests)
        await it.wait_running("decode-0")
        child = it.child("decode-0")
        it.kill("decode-0")
        await it.restart_killed(child)
        outcomes = await check(it, requests, running)
        assert moved_to(one.last for one in outcomes) == {"decode-0"}


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_prompts_are_recomputed_when_their_prefill_worker_is_lost_at_any_stage(
    tmp_path: Path, fault: str
) -> None:
    """Starts prompts one after the other, so that they are at different stages: not opened, sending, last layer,
    done.
    """
    settings = (
        ("prefill", "model", "sim:layers=4,layer_s=0.15"),
        ("decode", "model", "sim:layers=4,decode_step_s=0.02"),
        ("prefill", "max_num_seqs", "16"),
    )
    model = SimModel(SimSettings(vocabulary=VOCABULARY, layers=4))
    async with suite(tmp_path, sim=model, prefill_count=2, settings=settings) as it:
        requests, running = asked(16, 100), []
        for request in requests:
            running.append(asyncio.create_task(it.ask(request, NOTICED_S)))
            await asyncio.sleep(0.06)
        await it.wait_running("prefill-0")
        with it.frozen("prefill-0") if fault == "frozen" else contextlib.nullcontext():
            if fault == "killed":
                it.kill("prefill-0")
            outcomes = await check(it, requests, running)
        attempts = [one.last.timing.attempts for one in outcomes]
        # Answers that ended before the fault had one attempt.
        assert min(attempts) == 1
        assert max(attempts) > 1
        # Decode stays ready. The blocks are freed once no sender can write to them.
        assert (await it.generate(prompt_of(40, 1), 1)).last.usage.completion_tokens == 1


async def test_requests_of_a_killed_router_are_released(tmp_path: Path) -> None:
    """Prompts that wait, are computed or sent, and streams: their reservations, tasks and leases end at once, long
    before the answers would. Streams through the other router continue.
    """
    settings = (
        ("prefill", "model", "sim:layer_s=0.2"),
        ("prefill", "max_num_seqs", "4"),
        ("decode", "model", "sim:decode_step_s=0.05"),
    )
    async with (
        suite(tmp_path, decode_count=2, settings=settings) as it,
        it.through(await it.add("router-1", "router")) as other,
    ):
        await other.wait_joined(1, 2)
        workers = ("decode-0", "decode-1", "prefill-0")
        # They take 15 s, and so end after the others.
        requests = [greedy(prompt_of(60, 100 + number), 300) for number in range(4)]
        kept = await other.begun(requests, timeout_s=120)
        reserved = sum([(await it.status(name)).reserved_blocks for name in workers])
        lost = []
        for number in range(12):
            lost.append(
                asyncio.create_task(it.generate(prompt_of(60, number), 1_200, timeout_s=90))
            )
            # So that they are at different stages.
            await asyncio.sleep(0.1)

        async def at_every_stage() -> bool:
            first, second, prefill = [await it.status(name) for name in workers]
            waiting = first.active_transfers + second.active_transfers
            answering = first.running_requests + second.running_requests - len(kept)
            return waiting > 0 < answering and prefill.running_requests > 0

        async def only_kept_hold() -> bool:
            statuses = [await it.status(name) for name in workers]
            return (
                sum(status.running_requests for status in statuses) <= len(kept)
                and sum(status.reserved_blocks for status in statuses) <= reserved
                and not any(s.waiting_requests or s.quarantined_blocks for s in statuses)
                and not any(status.active_transfers for status in statuses)
            )

        await until(at_every_stage)
        assert not any(task.done() for task in kept)
        it.kill("router")
        for task in lost:
            with pytest.raises(HeadraceError):
                await task
        await until(only_kept_hold, RELEASED_S)
        for request, outcome in zip(requests, await asyncio.gather(*kept), strict=True):
            assert outcome.token_ids == other.expected_of(request)
        for name in workers:
            await other.wait_empty(name)
        outcome = await other.generate(prompt_of(70, 99), 3)
        assert outcome.token_ids == other.expected(prompt_of(70, 99), 3)


async def test_the_router_detects_a_dead_worker_while_the_registry_is_away(tmp_path: Path) -> None:
    settings = (
        SLOW_DECODE,
        ("registry", "internal_listen", f"127.0.0.1:{free_port()}"),
        ("prefill", "log_level", "debug"),
    )
    async with suite(tmp_path, prefill_count=2, decode_count=2, settings=settings) as it:
        await it.wait_descriptors_prefetched()
        it.kill("registry")
        requests = asked(6)
        running = await it.begun(requests)
        await it.wait_running("decode-0")
        it.kill("decode-0")
        it.kill("prefill-0")
        await check(it, requests, running)
        attempts = []
        for seed in range(20):
            prompt = prompt_of(40, 700 + seed)
            outcome = await it.generate(prompt, 2, placement=REMOTE)
            assert outcome.token_ids == it.expected(prompt, 2)
            timing = outcome.last.timing
            attempts.append(timing.attempts)
            assert (timing.decode_worker_id, timing.prefill_worker_id) == ("decode-1", "prefill-1")
        assert sum(attempts) <= len(attempts) + 1
        # A worker that was only silent becomes available again by itself.
        with it.frozen("decode-1"):
            # A real clock, because the router looks for silent connections by one.
            await asyncio.sleep(4)
        outcome = await it.generate(prompt_of(40, 900), 2)
        assert outcome.last.timing.decode_worker_id == "decode-1"


async def test_workers_that_restart_on_their_addresses_delay_no_request(tmp_path: Path) -> None:
    # A request that waits for one of these timeouts misses its deadline.
    timeouts = tuple(
        (role, name, "300")
        for role in ("prefill", "decode")
        for name in ("lease_ttl_s", "quarantine_s")
    )
    settings = (SLOW_DECODE, *timeouts)
    async with suite(tmp_path, prefill_count=2, decode_count=2, settings=settings) as it:
        async with load(it, streams=4, count=12) as answers:
            for name in ("decode-0", "prefill-0") * 3:
                child = it.child(name)
                it.kill(name)
                await it.restart_killed(child)
                await answers.more(12)
                await it.wait_joined(2, 2)
        await it.wait_joined(2, 2)
