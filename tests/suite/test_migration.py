"""Workers die or freeze during streams. The streams continue to the right last token without an error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from headrace_client import Client
from headrace_common.errors import HeadraceError
from headrace_engine.proto import sampling_from_proto
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.settings import SimSettings
from tests.ports import free_port
from tests.suite.deployment import (
    VOCABULARY,
    Suite,
    all_begun,
    default_model,
    prompt_of,
    suite,
)
from tests.suite.test_frozen import NOTICED_S, frozen

TOKENS = 60
SLOW_DECODE = ("decode", "model", "sim:decode_step_s=0.02")
GREEDY = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
SEEDED = sampling_pb2.SamplingParams(
    temperature=0.9,
    top_p=0.95,
    seed=11,
    presence_penalty=0.7,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    max_tokens=TOKENS,
    logprobs=2,
    ignore_eos=True,
)


@dataclass
class Received:
    """The messages that a client received."""

    token_ids: tuple[int, ...]
    logprob_count: int
    text: str
    last: inference_pb2.GenerateResponse


async def ask(
    it: Suite,
    prompt: Sequence[int],
    params: sampling_pb2.SamplingParams,
    started: asyncio.Event,
    timeout_s: float = 30.0,
) -> Received:
    stub = inference_pb2_grpc.InferenceServiceStub(it.channel)
    request = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenIds(ids=prompt), sampling=params
    )
    responses = []
    async for response in stub.Generate(request, timeout=timeout_s):
        responses.append(response)
        if response.token_ids:
            started.set()
    return Received(
        tuple(token for r in responses for token in r.token_ids),
        sum(len(r.logprobs) for r in responses),
        "".join(r.text for r in responses),
        responses[-1],
    )


def expected(prompt: Sequence[int], params: sampling_pb2.SamplingParams) -> tuple[int, ...]:
    sampling = sampling_from_proto(params, ())
    return tuple(default_model().expected_tokens(prompt, params.max_tokens, sampling))


@dataclass(frozen=True)
class Begun:
    """A running stream. `started` is set with its first token."""

    prompt: list[int]
    params: sampling_pb2.SamplingParams
    started: asyncio.Event
    task: asyncio.Task[Received]


def begin(it: Suite, count: int, first_seed: int = 0) -> list[Begun]:
    """Half of the requests are greedy, half sampled with a seed and penalties."""
    begun = []
    for number in range(count):
        prompt, params = prompt_of(30 + number, first_seed + number), (GREEDY, SEEDED)[number % 2]
        started = asyncio.Event()
        task = asyncio.create_task(ask(it, prompt, params, started))
        begun.append(Begun(prompt, params, started, task))
    return begun


async def running(it: Suite, count: int) -> list[Begun]:
    """Starts such requests and waits for the first token of each."""
    begun = begin(it, count)
    await all_begun([one.task for one in begun], [one.started for one in begun])
    return begun


async def check(begun: list[Begun]) -> list[Received]:
    """All answers are correct, despite any fault."""
    received = []
    for asked in begun:
        one = await asked.task
        assert one.token_ids == expected(asked.prompt, asked.params)
        assert one.logprob_count == (TOKENS if asked.params.HasField("logprobs") else 0)
        usage = one.last.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(asked.prompt), TOKENS)
        assert one.last.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
        received.append(one)
    return received


def moved_to(received: list[Received]) -> set[str]:
    """Workers that finished the answers of second attempts. No answer took a third."""
    assert {one.last.timing.attempts for one in received} <= {1, 2}
    return {one.last.timing.decode_worker_id for one in received if one.last.timing.attempts == 2}


async def test_streams_of_a_killed_decode_worker_continue_on_the_other(tmp_path: Path) -> None:
    async with suite(tmp_path, decode_count=2, settings=(SLOW_DECODE,)) as it:
        undisturbed = await asyncio.gather(*(one.task for one in begin(it, 8)))
        begun = await running(it, 8)
        victim, survivor = await it.busier("decode-0", "decode-1")
        it.kill(victim)
        received = await check(begun)
        assert [one.text for one in received] == [one.text for one in undisturbed]
        assert moved_to(received) == {survivor}
        await it.wait_empty(survivor)


async def test_streams_of_a_frozen_decode_worker_continue_within_ten_seconds(
    tmp_path: Path,
) -> None:
    async with suite(tmp_path, decode_count=2, settings=(SLOW_DECODE,)) as it:
        begun = await running(it, 8)
        victim, survivor = await it.busier("decode-0", "decode-1")
        started_s = time.monotonic()
        with frozen(it, victim):
            received = await check(begun)
            assert time.monotonic() - started_s < NOTICED_S
        assert moved_to(received) == {survivor}
        # After the thaw the worker has released the requests and serves again.
        for name in ("decode-0", "decode-1"):
            await it.wait_empty(name)
        async with asyncio.timeout(10):
            seed, served = 500, set[str]()
            while served != {"decode-0", "decode-1"}:
                seed += 1
                both = await asyncio.gather(
                    *(it.generate(prompt_of(40, seed * 10 + n), 2) for n in (1, 2))
                )
                served |= {one.last.timing.decode_worker_id for one in both}


async def test_streams_of_the_only_decode_worker_wait_for_its_next_incarnation(
    tmp_path: Path,
) -> None:
    async with suite(tmp_path, settings=(SLOW_DECODE,)) as it:
        begun = await running(it, 6)
        await it.wait_running("decode-0")
        child = it.child("decode-0")
        it.kill("decode-0")
        await it.restart_killed(child)
        assert moved_to(await check(begun)) == {"decode-0"}


async def test_prompts_are_recomputed_when_their_prefill_worker_dies_at_any_stage(
    tmp_path: Path,
) -> None:
    """Starts prompts one after the other, so that they are at different stages: not opened, sending, last layer,
    done.
    """
    await _at_every_stage(tmp_path, freeze=False)


async def test_prompts_are_recomputed_when_their_prefill_worker_freezes_at_any_stage(
    tmp_path: Path,
) -> None:
    await _at_every_stage(tmp_path, freeze=True)


async def _at_every_stage(folder: Path, *, freeze: bool) -> None:
    settings = (
        ("prefill", "model", "sim:layers=4,layer_s=0.15"),
        ("decode", "model", "sim:layers=4,decode_step_s=0.02"),
        ("prefill", "max_num_seqs", "16"),
    )
    model = SimModel(SimSettings(vocabulary=VOCABULARY, layers=4))
    async with suite(folder, prefill_count=2, settings=settings) as it:
        begun = []
        for step in range(16):
            begun += begin(it, 1, first_seed=100 + step)
            await asyncio.sleep(0.06)
        await it.wait_running("prefill-0")
        started_s = time.monotonic()
        if freeze:
            with frozen(it, "prefill-0"):
                received = await asyncio.gather(*(one.task for one in begun))
                # The time to detect the fault, to start again, and for sixty tokens.
                assert time.monotonic() - started_s < NOTICED_S + 4
        else:
            it.kill("prefill-0")
            received = await asyncio.gather(*(one.task for one in begun))
        for asked, one in zip(begun, received, strict=True):
            sampling = sampling_from_proto(asked.params, ())
            assert one.token_ids == model.expected_tokens(asked.prompt, TOKENS, sampling)
        attempts = [one.last.timing.attempts for one in received]
        # Answers that ended before the fault had one attempt.
        assert min(attempts) == 1
        assert max(attempts) > 1
        # Decode stays ready. The blocks are freed once no sender can write to them.
        assert (await it.generate(prompt_of(40, 1), 1)).last.usage.completion_tokens == 1


async def test_prefill_releases_transfers_to_a_killed_decode_worker(tmp_path: Path) -> None:
    settings = (("prefill", "model", "sim:layer_s=0.5"), ("decode", "lease_ttl_s", "2"))
    async with suite(tmp_path, settings=settings) as it:
        asked = [asyncio.create_task(it.generate(prompt_of(60, n), 2, timeout_s=6)) for n in (1, 2)]
        await it.until("decode-0", lambda status: status.active_transfers > 0)
        await it.wait_running("prefill-0")
        it.kill("decode-0")
        await it.wait_empty("prefill-0", timeout_s=3)
        for task in asked:
            with pytest.raises(HeadraceError):
                await task


async def test_requests_of_a_killed_router_are_released_within_seconds(tmp_path: Path) -> None:
    """Prompts that wait, are computed or sent, and streams: their reservations, tasks and leases end at once."""
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
        lost = []
        for number in range(12):
            lost.append(asyncio.create_task(it.generate(prompt_of(60, number), 200)))
            await asyncio.sleep(0.1)
        async with asyncio.timeout(10):
            while True:
                status = await asyncio.gather(*(it.status(f"decode-{n}") for n in (0, 1)))
                waiting = sum(one.active_transfers for one in status)
                answering = sum(one.running_requests for one in status)
                prefilling = (await it.status("prefill-0")).running_requests
                if waiting and answering and prefilling:
                    break
                await asyncio.sleep(0.02)
        it.kill("router")
        killed_s = time.monotonic()
        for task in lost:
            with pytest.raises(HeadraceError):
                await task
        for name in ("prefill-0", "decode-0", "decode-1"):
            await other.wait_empty(name, timeout_s=killed_s + 4 - time.monotonic())
        outcome = await other.generate(prompt_of(70, 99), 3)
        assert outcome.token_ids == other.expected(prompt_of(70, 99), 3)


async def test_the_router_detects_a_dead_worker_while_the_registry_is_away(
    tmp_path: Path,
) -> None:
    settings = (
        SLOW_DECODE,
        ("registry", "listen", f"127.0.0.1:{free_port()}"),
        ("prefill", "log_level", "debug"),
    )
    async with suite(tmp_path, prefill_count=2, decode_count=2, settings=settings) as it:
        await it.wait_descriptors_prefetched()
        it.kill("registry")
        begun = await running(it, 6)
        await it.wait_running("decode-0")
        it.kill("decode-0")
        it.kill("prefill-0")
        await check(begun)
        attempts = []
        for seed in range(20):
            outcome = await it.generate(prompt_of(40, 700 + seed), 2)
            assert outcome.token_ids == it.expected(prompt_of(40, 700 + seed), 2)
            attempts.append(outcome.last.timing.attempts)
            assert outcome.last.timing.decode_worker_id == "decode-1"
        assert sum(attempts) <= len(attempts) + 1
        # A worker that was only silent becomes available again by itself.
        with frozen(it, "decode-1"):
            await asyncio.sleep(4)
        outcome = await it.generate(prompt_of(40, 900), 2)
        assert outcome.last.timing.decode_worker_id == "decode-1"


async def test_workers_that_restart_on_their_addresses_delay_no_request(
    tmp_path: Path,
) -> None:
    deadline_s = 20.0
    async with suite(tmp_path, prefill_count=2, decode_count=2, settings=(SLOW_DECODE,)) as it:
        stop = asyncio.Event()
        right, longest_s = 0, 0.0

        async def load(seed: int) -> None:
            nonlocal right, longest_s
            while not stop.is_set():
                seed += 100
                prompt = prompt_of(40, seed)
                started_s = time.monotonic()
                outcome = await it.generate(prompt, 12, timeout_s=deadline_s)
                longest_s = max(longest_s, time.monotonic() - started_s)
                assert outcome.token_ids == it.expected(prompt, 12)
                right += 1

        tasks = [asyncio.create_task(load(number)) for number in range(4)]
        try:
            for _ in range(3):
                for name in ("decode-0", "prefill-0"):
                    child = it.child(name)
                    it.kill(name)
                    await it.restart_killed(child)
                    goal = right + 12
                    async with asyncio.timeout(deadline_s):
                        while right < goal and not any(task.done() for task in tasks):
                            await asyncio.sleep(0.02)
                    await it.wait_joined(2, 2)
        finally:
            stop.set()
            await asyncio.gather(*tasks)
        # No request waited for a timeout at any layer.
        assert longest_s < 7.0
        await it.wait_joined(2, 2)


async def test_a_look_aside_client_continues_when_its_decode_worker_is_killed(
    tmp_path: Path,
) -> None:
    settings = (SLOW_DECODE, ("router", "look_aside", "true"))
    async with (
        suite(tmp_path, decode_count=2, settings=settings) as it,
        Client(it.deployment.router, look_aside=True) as client,
    ):
        begun: set[int] = set()

        async def answer(number: int) -> tuple[tuple[int, ...], inference_pb2.GenerateResponse]:
            responses = []
            async for response in client.generate(
                tokens=prompt_of(40, number),
                max_tokens=TOKENS,
                temperature=0.8 if number % 2 else 0.0,
                seed=number,
                tokens_only=True,
                timeout_s=30,
            ):
                begun.add(number)
                responses.append(response)
            return tuple(token for r in responses for token in r.token_ids), responses[-1]

        undisturbed = await asyncio.gather(*(answer(number) for number in range(6)))
        for name in ("decode-0", "decode-1"):
            await it.wait_empty(name)
        begun.clear()
        running = [asyncio.create_task(answer(number)) for number in range(6)]
        async with asyncio.timeout(10):
            while len(begun) < len(running):
                await asyncio.sleep(0.01)
        busy = {n: (await it.status(n)).running_requests for n in ("decode-0", "decode-1")}
        survivor, victim = sorted(busy, key=busy.__getitem__)
        it.kill(victim)
        answers = await asyncio.gather(*running)
        assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in undisturbed]
        for _, last in answers:
            assert last.usage.completion_tokens == len(answers[0][0]) or last.finish_reason
        assert max(last.timing.attempts for _, last in answers) == 2
        moved = [last.timing for _, last in answers if last.timing.attempts == 2]
        assert {timing.decode_worker_id for timing in moved} == {survivor}
