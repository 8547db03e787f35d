"""Prompts of a stranger, and prompts that no reservation waits for, leave another tenant its part of prefill."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from headrace.inference.v1 import inference_pb2_grpc
from headrace.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.errors import HeadraceError, NotFound, PermissionDenied, QueueFull
from headrace_common.identity import new_transfer_id
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from tests.ports import free_port
from tests.security.bystander import KEY, STRANGER_KEY
from tests.suite.deployment import DEADLINE_S, PROMPT_VOCABULARY, Suite, greedy, prompt_of, suite

LOOPS = 24
DUE_S = 30.0
LONG_TOKENS = 2_000
SHORT_TOKENS = 100
ANSWER_TOKENS = 10
PREFILL_S_PER_TOKEN = 0.00005
MEASURED_S = 6.0
# Of the queue of all loops, 2.4 s, a bystander may see the prompts that are being computed.
WAIT_MAX_S = 1.0
ABANDONED_S = 0.5
REFUSED_PAUSE_S = 0.05
_SEEDS = itertools.count()

Attack = Callable[[Suite, Counter[str]], Coroutine[Any, Any, None]]


@asynccontextmanager
async def deployed(folder: Path) -> AsyncIterator[tuple[Suite, httpx.AsyncClient]]:
    """A deployment with two keys and HTTP, and a client over HTTP with the bystander's."""
    keys = folder / "keys"
    keys.write_text(f"{KEY} bystander\n{STRANGER_KEY} stranger\n")
    listen = f"127.0.0.1:{free_port()}"
    settings = (
        ("router", "api_keys_file", str(keys)),
        ("router", "http_listen", listen),
        ("prefill", "model", f"sim:prefill_s_per_token={PREFILL_S_PER_TOKEN}"),
        ("decode", "model", f"sim:decode_step_s=0.005,prefill_s_per_token={PREFILL_S_PER_TOKEN}"),
        ("decode", "max_num_seqs", "64"),
        ("decode", "num_gpu_blocks_override", "8192"),
    )
    headers = {"authorization": f"Bearer {KEY}"}
    async with (
        suite(folder, settings=settings) as it,
        httpx.AsyncClient(base_url=f"http://{listen}", timeout=DEADLINE_S, headers=headers) as http,
    ):
        yield it, http


@dataclass(slots=True)
class Waits:
    """What a client saw: the times to first tokens, and the gaps between events, of answers one after another."""

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def p99_s(self) -> float:
        return sorted(self.first_s)[int(0.99 * (len(self.first_s) - 1))]

    def row(self, what: str) -> str:
        firsts, gaps = sorted(self.first_s), sorted(self.gaps_s)
        p50_ms, p99_ms = 1e3 * firsts[len(firsts) // 2], 1e3 * self.p99_s()
        gap_ms = 1e3 * gaps[int(0.99 * (len(gaps) - 1))]
        return (
            f"{what}: {len(firsts)} answers, TTFT p50 {p50_ms:.1f} ms, p99 {p99_ms:.1f} ms, "
            f"gap p99 {gap_ms:.1f} ms, longest gap {1e3 * gaps[-1]:.0f} ms"
        )


async def ask_on(http: httpx.AsyncClient, seconds: float) -> Waits:
    """Streams answers without a deadline of their own."""
    waits = Waits()
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        body = {
            "prompt": prompt_of(SHORT_TOKENS, next(_SEEDS)),
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        last_s = time.monotonic()
        arrivals_s = []
        async with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    assert "error" not in json.loads(line[6:])
                    arrivals_s.append(time.monotonic())
        steps_s = [one - before for before, one in itertools.pairwise((last_s, *arrivals_s))]
        waits.first_s.append(steps_s[0])
        waits.gaps_s += steps_s
    return waits


def long_prompt() -> list[int]:
    """A prompt that shares no prefix with others, made in less time than by `prompt_of`."""
    return random.Random(next(_SEEDS)).choices(range(PROMPT_VOCABULARY), k=LONG_TOKENS)


async def prompts_that_are_due(it: Suite, outcomes: Counter[str]) -> None:
    """Asks for one answer after another, with a deadline that is nearer than that of other requests."""
    stub: Any = inference_pb2_grpc.InferenceServiceStub(it.channel)
    while True:
        request = greedy(long_prompt(), 1)
        metadata = (("x-api-key", STRANGER_KEY),)
        async for _ in stub.Generate(request, timeout=DUE_S, metadata=metadata):
            pass
        outcomes["answered"] += 1


async def prompts_that_are_abandoned(it: Suite, outcomes: Counter[str]) -> None:
    """Ends each request while its prompt waits or is computed. Its decode worker frees the blocks."""
    stub: Any = inference_pb2_grpc.InferenceServiceStub(it.channel)
    while True:
        request = greedy(long_prompt(), 1)
        metadata = (("x-api-key", STRANGER_KEY),)
        try:
            async with asyncio.timeout(ABANDONED_S):
                async for _ in stub.Generate(request, timeout=DUE_S, metadata=metadata):
                    pass
        except TimeoutError:
            outcomes["abandoned"] += 1
        else:
            outcomes["answered"] += 1


async def prompts_without_a_reservation(it: Suite, outcomes: Counter[str]) -> None:
    """Calls the prefill queue as a decode worker does, for blocks that the decode worker has not reserved."""
    credentials = Credentials(role=Role.DECODE)
    async with open_channel(it.deployment.router_internal, credentials) as channel:
        await _enqueue_on(it, channel, outcomes)


async def prompts_of_another_role(it: Suite, outcomes: Counter[str]) -> None:
    """The same with the credentials of an operator."""
    await _enqueue_on(it, it.internal_channel, outcomes)


async def _enqueue_on(it: Suite, channel: grpc.aio.Channel, outcomes: Counter[str]) -> None:
    stub = prefill_pb2_grpc.PrefillQueueServiceStub(channel)
    status = await it.status("decode-0")
    while True:
        request = prefill_pb2.EnqueueRequest(
            transfer_id=new_transfer_id(),
            worker_id=status.worker_id,
            incarnation=status.incarnation,
            token_ids=long_prompt(),
            tenant="stranger",
        )
        try:
            await stub.Enqueue(request, timeout=DUE_S)
        except grpc.aio.AioRpcError as error:
            failure: HeadraceError = error_from_rpc(error)
            outcomes[failure.reason] += 1
            # The bystander's client shares this event loop.
            await asyncio.sleep(REFUSED_PAUSE_S)
        else:
            outcomes["computed"] += 1


@asynccontextmanager
async def attacking(it: Suite, attack: Attack, outcomes: Counter[str]) -> AsyncIterator[None]:
    """Many loops of an attack."""
    loops = [asyncio.create_task(attack(it, outcomes)) for _ in range(LOOPS)]
    try:
        # By then all of them wait.
        await asyncio.sleep(1.0)
        yield
        for loop in loops:
            if loop.done():
                loop.result()
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)


@pytest.mark.parametrize(
    "attack",
    [
        prompts_that_are_due,
        prompts_that_are_abandoned,
        prompts_without_a_reservation,
        prompts_of_another_role,
    ],
)
async def test_a_client_over_http_has_its_turn_beside_prompts_of_a_stranger(
    tmp_path: Path, attack: Attack, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes: Counter[str] = Counter()
    async with deployed(tmp_path) as (it, http):
        await ask_on(http, 0.5)
        quiet = await ask_on(http, MEASURED_S)
        async with attacking(it, attack, outcomes):
            attacked = await ask_on(http, MEASURED_S)
        await it.wait_empty("decode-0")
    name = getattr(attack, "__name__", "")
    with capsys.disabled():
        print(f"\n{quiet.row('quiet')}\n{attacked.row(name)} {dict(outcomes)}")
    assert attacked.p99_s() <= max(WAIT_MAX_S, 2 * quiet.p99_s())
    assert max(attacked.gaps_s) <= max(WAIT_MAX_S, 2 * max(quiet.gaps_s))
    refused: dict[Attack, set[str]] = {
        prompts_without_a_reservation: {NotFound.reason, QueueFull.reason},
        prompts_of_another_role: {PermissionDenied.reason},
    }
    assert set(outcomes) == refused.get(attack, set(outcomes))
