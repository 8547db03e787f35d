"""Faults of random size are planted in a deployment in virtual time, and its traces name them.

docs/time-to-first-token.md has the table of these cases.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest

from headrace.inference.v1 import first_token_pb2, sampling_pb2
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import DecodeFull
from headrace_common.time_model.model import StepTimes, TimeModel
from headrace_common.trace_view.reading import read_trace
from headrace_common.trace_view.verdict import verdict
from headrace_decode.admission import BlockAdmission
from headrace_frontend.openai.image_fetch import ImageFetcher
from headrace_kv.prefix.events import Tier
from headrace_router.tracing.comparison import LIKE_MIN
from tests.kit.openai_app import Request
from tests.unit.router.tracing.virtual_deployment import (
    LAYERS,
    RANKS,
    SLOTS,
    TOKENS,
    Deployment,
    deployment,
)
from tests.virtually import stand_still

MAKERS = (first_token_pb2.FIRST_TOKEN_POLICY_DECODE, first_token_pb2.FIRST_TOKEN_POLICY_PREFILL)
SEEDS = 3
PAIRS = 10
FAULTLESS = 20
PAGE = (Path(__file__).parents[4] / "docs" / "time-to-first-token.md").read_text()
ROWS = dict(re.findall(r"^\| ([^|]+) \| `([^|]+)` \|$", PAGE, re.MULTILINE))
"""The sentence of each fault."""

Plant = Callable[[Deployment, float], Awaitable[None]]


@dataclass(frozen=True)
class Case:
    """A fault of so many seconds: what `plant` does, or steps that take shares of them longer."""

    fault: str
    named: str
    """A regular expression of what the sentence says."""
    steps: Mapping[str, float] = field(default_factory=dict)
    plant: Plant | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of the request."""
    tiers: Mapping[Tier, int] = field(default_factory=dict)
    ways: bool = False
    """Whether messages to the workers take so much longer than those from them, for all requests."""

    def slow_down(self, it: Deployment, seconds: float) -> None:
        """Lets its steps take longer."""
        for name, share in self.steps.items():
            it.faults_s[name] += share * seconds

    async def run(self, it: Deployment, seconds: float) -> None:
        """Plants the fault and runs the request "slow"."""
        if self.plant is not None:
            await self.plant(it, seconds)
            return
        self.slow_down(it, seconds)
        it.tiers = self.tiers
        await it.ask("slow", **self.fields)


async def dies(it: Deployment, seconds: float) -> None:
    it.dies_after, it.faults_s["frozen"] = TOKENS // 2, seconds
    await it.ask("slow")


async def back_off(it: Deployment, seconds: float) -> None:
    admit, end_s = BlockAdmission.admit, time.monotonic() + seconds

    def full(*arguments: Any, **options: Any) -> None:
        if time.monotonic() < end_s:
            raise DecodeFull("no room", retry_after_s=0.1)
        admit(*arguments, **options)

    with mock.patch.object(BlockAdmission, "admit", full):
        await it.ask("slow")


async def started(it: Deployment, count: int, **faults_s: float) -> None:
    """Starts requests of another tenant, which alone take longer, and waits until they do."""
    it.faults_s.update({name.replace("_", " "): one_s for name, one_s in faults_s.items()})
    asked = [asyncio.create_task(it.ask(f"g{number}", tenant="greedy")) for number in range(count)]
    it.background += asked
    await asyncio.sleep(0.1 * count)
    it.faults_s.clear()


async def queue(it: Deployment, seconds: float) -> None:
    await started(it, 1, layer_1=seconds + 0.1)
    await it.ask("slow")


async def pool(it: Deployment, seconds: float) -> None:
    await started(it, 2 * SLOTS, token=(seconds + 0.3) / (TOKENS - 2))
    await it.ask("slow")


async def clock_step(it: Deployment, seconds: float) -> None:
    it.clock_ahead_s += it.random.choice((-1, 1)) * seconds
    await it.ask("slow")


async def pause(it: Deployment, seconds: float) -> None:
    it.faults_s["token"] = 0.03
    asking = [asyncio.create_task(it.ask(name)) for name in ("slow", "other")]
    while not all(one.generating for one in it.decodes):
        await asyncio.sleep(0.002)
    await asyncio.sleep(0.1)
    stand_still(seconds)
    await asyncio.gather(*asking)


async def image(it: Deployment, seconds: float) -> None:
    async def fetch(*_: Any) -> None:
        await asyncio.sleep(seconds)

    body = b'{"model": "sim", "max_tokens": 12, "messages": [{"role": "user", "content": "x"}]}'
    fields: Any = {"path": "/v1/chat/completions", "method": "POST", "x-request-id": "slow"}
    request = Request(body, **fields)
    with (
        mock.patch.object(ImageFetcher, "fetch", fetch),
        mock.patch("headrace_frontend.openai.routes.has_remote_images", return_value=True),
    ):
        # In a context of its own, as that of each connection.
        await asyncio.create_task(it.router.openai(request.exchange))
    await asyncio.sleep(1.5)


async def refusal(it: Deployment, seconds: float) -> None:
    times = TimeModel(StepTimes(seconds, 0.0, 1e-4, 1e-9, 1e-4, 1e-8, 50, 50))
    it.router.queue.report_times(it.prefill.stream, times)
    await it.ask("slow", ttft_target=duration_from_seconds(seconds / 3))


async def drain(it: Deployment, seconds: float) -> None:
    it.faults_s["batch"] = 2 * seconds
    asking = asyncio.create_task(it.ask("slow"))
    await asyncio.sleep(0.02)
    it.faults_s.clear()
    drained = next(one for one in it.decodes if not one.attempts.idle)
    drained.attempts.start_drain(0.0)
    await drained.attempts.finish_drain(Deadline.after(seconds))
    await asking


MOVES = {f"move {rank}": 1 / LAYERS for rank in range(RANKS)}
FORM = sampling_pb2.StructuredOutputs(json_object=True)
JSON = {"sampling": sampling_pb2.SamplingParams(structured_outputs=FORM)}
STEP = r"decode wait.*decode-\d took .* to start a step with it"
OTHERS = r"requests on other workers without a token: 1"
CASES = (
    # The first seven are those in which the largest part was named before.
    Case("a link of one rank is slow", r"exposed.*-0/r1 -> decode-\d/r1 moved at .* median", {"move 1": 1 / LAYERS}),
    Case("clocks are apart within their bound", r"^nothing unusual, \d+ % prefill", ways=True),
    Case("the handshake with a peer is slow", r"exposed.* for the handshake with decode-\d", {"handshake": 1}),
    Case("decode workers have no room, and attempts are repeated", r"retry.*: back-off for .* no room", plant=back_off),
    Case("a decode worker dies during the answer", r"a token: .* after attempt 1 failed: decode worker ", plant=dies),
    Case("the client does not read", r"without a token: the client did not read for ",
         plant=lambda it, seconds: it.ask("slow", read_s=10 * seconds)),
    Case("the prompt is too long", r"^refused after 0\.\d\d ms by INVALID_FIELD: ", fields={"text": "x" * 2_000}),
    Case("all links to a worker are slow", r"exposed.*-0/r\d -> decode-\d/r\d moved ", MOVES),
    Case("one rank of four is slow to copy", r"exposed.*-0/r2 .* copied to staging memory for ", {"gather 2": 1}),
    Case("KV from disk is slow", f"{STEP}, with 48 tokens from disk", {"start": 1}, tiers={Tier.DISK: 48}),
    Case("the queue is behind another tenant", "queue.*: .* meanwhile: greedy: 1", plant=queue),
    Case("all slots of the pool are in use", "decode wait.* workers had no free slot for ", plant=pool),
    Case("the clocks of the workers are set", "^nothing unusual, ", plant=clock_step),
    Case("the router pauses, as for garbage", f"without a token: .*: {OTHERS}", plant=pause),
    Case("the tokenizer is slow", "tokenize.* for the template and 60 tokens", {"tokenizer": 1}),
    Case("images are fetched slowly", "tokenize.*, most of it to fetch images", plant=image),
    Case("the prefill engine loads an adapter", "batch wait.* on prefill-0 for a forward pass", {"batch": 1}),
    Case("decode compiles a grammar", "reserve.* decode worker had reserved blocks", {"reserve": 1}, fields=JSON),
    Case("a canary uses the engine", f"{STEP}$", {"start": 1}),
    Case("an early refusal", r"^refused after 0\.\d\d ms by FIRST_TOKEN_LATE: ", plant=refusal),
    Case("the planner drains a decode worker", r"retry.*that failed: decode-\d is shutting down", plant=drain),
)  # fmt: skip


# Faults with parts of their own. The last two have no steps.
PAIRABLE = [CASES[number] for number in (0, 14, 16, 17, 18, 3, 4)]


async def sentence(seed: int, *faults: tuple[Case, float], ways_s: float = 0.0) -> str:
    """What the trace says of a request with these faults, each of so many seconds."""
    async with deployment(seed, MAKERS[seed % 2], (ways_s, 0.0)) as it:
        for number in range(LIKE_MIN):
            await it.ask(f"usual-{number}")
        for case, less_s in faults[:-1]:
            case.slow_down(it, less_s)
        last, seconds = faults[-1] if faults else (Case("", ""), 0.0)
        await last.run(it, seconds)
        return verdict(read_trace(it.router.traces.get("slow")))


async def of_case(case: Case, seed: int) -> str:
    random = Random(seed)
    ways_s = random.uniform(0.01, 0.014) if case.ways else 0.0
    return await sentence(seed, (case, random.uniform(0.25, 2.0)), ways_s=ways_s)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault)
async def test_a_planted_cause_is_named(case: Case) -> None:
    for seed in range(SEEDS):
        found = await of_case(case, seed)
        assert re.search(case.named, found), (seed, found)
        # The page has the sentence of the first one.
        assert seed or without_numbers(ROWS[case.fault]) == without_numbers(found)


@pytest.mark.parametrize("seed", range(PAIRS))
async def test_of_two_causes_the_greater_is_named(seed: int) -> None:
    random = Random(seed)
    less = random.choice(PAIRABLE[:-2])
    more = random.choice([case for case in PAIRABLE if case is not less])
    seconds = random.uniform(0.25, 1.0)
    found = await sentence(seed, (less, seconds), (more, 2 * seconds))
    assert re.search(more.named, found), (less.fault, more.fault, found)


@pytest.mark.parametrize("seed", range(FAULTLESS))
async def test_nothing_is_named_without_a_fault(seed: int) -> None:
    found = await sentence(seed, ways_s=Random(seed).uniform(0.0, 0.005))
    assert found.startswith("nothing unusual, "), found


def without_numbers(text: str) -> str:
    return re.sub(r"\d[\d.,]*", "N", text)


def test_the_page_has_no_other_cases() -> None:
    assert list(ROWS) == [case.fault for case in CASES]
