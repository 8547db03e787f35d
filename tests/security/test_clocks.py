"""Hosts with wrong clocks in a live deployment. One service's wall clock is shifted by a preloaded library.

The shifted service starts with its clock off. Then its clock is set while answers run.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.inference.v1 import inference_pb2
from tests.security.shifted_clock import ShiftedClock, compile_clock_shim
from tests.suite.deployment import Suite, greedy, prompt_of, suite
from tests.waiting import until

REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
HOUR_S = 3600.0
SETTINGS = (("decode", "model", "sim:decode_step_s=0.02"),)
ANSWER_TOKENS = 40


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled clock_shim.c."""
    return compile_clock_shim(tmp_path_factory.mktemp("shim"))


@asynccontextmanager
async def shifted(
    service: str, library: Path, folder: Path, offset_s: float
) -> AsyncIterator[tuple[Suite, ShiftedClock]]:
    clock = ShiftedClock(library, folder, offset_s)
    async with suite(
        folder,
        spawning=lambda spawn: clock.shifting(spawn, service),
        prefill_count=1,
        decode_count=1,
        settings=SETTINGS,
    ) as deployed:
        yield deployed, clock


async def answers(deployed: Suite, seed: int, attempts: int | None = None) -> None:
    """A request is disaggregated, and its answer is right. `attempts`: how many it needs, if it is not None."""
    prompt = prompt_of(60, seed)
    outcome = await deployed.generate(prompt, 4, placement=REMOTE)
    assert outcome.token_ids == deployed.expected(prompt, 4)
    assert outcome.last.usage.transferred_tokens == len(prompt)
    assert outcome.last.timing.prefill_worker_id == "prefill-0"
    assert attempts in (None, outcome.last.timing.attempts)


async def answers_while_the_clock_is_set(
    deployed: Suite, clock: ShiftedClock, offset_s: float, seed: int
) -> None:
    prompt = prompt_of(60, seed)
    (running,) = await deployed.begun([greedy(prompt, ANSWER_TOKENS, REMOTE)])
    clock.set(offset_s)
    assert not running.done()
    await answers(deployed, seed + 1)
    outcome = await running
    assert outcome.token_ids == deployed.expected(prompt, ANSWER_TOKENS)
    assert outcome.last.timing.attempts == 1, "the running answer was not interrupted"


def log_of(deployed: Suite, name: str) -> str:
    return deployed.child(name).spec.log_file.read_text()


async def logged(deployed: Suite, name: str, pattern: str) -> None:
    await until(
        lambda: re.search(pattern, log_of(deployed, name)) is not None,
        10.0,
        lambda: f"{pattern}: {log_of(deployed, name)}",
    )


def an_hour_off(name: str) -> str:
    """A pattern of the registry's warning. The message took some time to arrive."""
    return rf"the clock of {name} is 3(59|60)\d\.\d s (ahead of|behind) this registry's"


@pytest.mark.parametrize("service", ["router", "prefill", "decode", "registry"])
async def test_answers_and_disaggregation_go_on_whatever_one_clock_shows(
    service: str, library: Path, tmp_path: Path
) -> None:
    start_s = HOUR_S if service in ("decode", "router") else -HOUR_S
    async with shifted(service, library, tmp_path, start_s) as (deployed, clock):
        await answers(deployed, 100, attempts=1)
        for number, offset_s in enumerate((10.0, -10.0, -HOUR_S, HOUR_S)):
            await answers_while_the_clock_is_set(deployed, clock, offset_s, 200 + 10 * number)
        # The registry names a clock that is off when its member registers, a router that of a decode worker always.
        for name in ("router-0", "prefill-0", "decode-0"):
            wrong = name.startswith(service) or service == "registry"
            warned = re.search(an_hour_off(name), log_of(deployed, "registry"))
            assert bool(warned) is wrong, log_of(deployed, "registry")
        if service in ("decode", "router"):
            ahead_of = "ahead of" if service == "decode" else "behind"
            await logged(deployed, "router", f" s {ahead_of} this router's")
        else:
            assert "this router's" not in log_of(deployed, "router")
        assert "Traceback" not in log_of(deployed, "router")
