"""The times of a client of the router while another client attacks it. See bench/security/__main__.py."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.placement.report import percentile
from bench.support.processes import cpu_seconds
from headrace.inference.v1 import inference_pb2_grpc
from tests.security.attacker import ATTACKS as ATTACKS_WITH_KEY
from tests.security.bystander import KEY, STRANGER_KEY, attacked
from tests.suite.deployment import Suite, greedy, prompt_of

QUIET: Final = "quiet"
WITHOUT_KEY: Final = "without_key"
"""Bodies from a caller without a key."""
ATTACKS: Final = (*ATTACKS_WITH_KEY, WITHOUT_KEY)
_ROOT: Final = Path(__file__).resolve().parents[2]
_CLIENTS: Final = 2
_PROMPT_TOKENS: Final = 40
_ANSWER_TOKENS: Final = 8
_DEADLINE_S: Final = 60.0


@dataclass(slots=True)
class Period:
    """The bystander's times in all periods of one kind."""

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    router_cpu_s: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    """Of the attacker's calls."""


async def measure_bystander(
    attacks: Sequence[str], rounds: int, seconds: float
) -> Mapping[str, Period]:
    """The periods by attack, with `QUIET` first. Each attack also has one on another deployment."""
    names = [QUIET, *(one for name in attacks for one in (name, elsewhere(name)))]
    periods = {name: Period() for name in names}
    async with AsyncExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        suites: list[Suite] = []
        for name in ("attacked", "other"):
            (folder / name).mkdir()
            suites.append(await held.enter_async_context(attacked(folder / name)))
        it, other = suites
        attackers: dict[str, asyncio.subprocess.Process] = {}
        for name in attacks:
            attackers[name] = await held.enter_async_context(_attacker(it, name))
            attackers[elsewhere(name)] = await held.enter_async_context(_attacker(other, name))
        await _ask_for(it, seconds, Period())
        for _ in range(rounds):
            for name, period in periods.items():
                await _run(it, attackers.get(name), seconds, period)
    return periods


def elsewhere(attack: str) -> str:
    """The name of the periods in which an attack is made on another deployment of the same machine."""
    return f"{attack}, elsewhere"


async def _run(
    it: Suite, attacker: asyncio.subprocess.Process | None, seconds: float, period: Period
) -> None:
    router = it.child("router").process.pid
    start_s, start_cpu_s = time.monotonic(), cpu_seconds(router)
    if attacker is not None:
        _writer(attacker).write(f"{seconds}\n".encode())
    await _ask_for(it, seconds, period)
    period.seconds += time.monotonic() - start_s
    period.router_cpu_s += cpu_seconds(router) - start_cpu_s
    if attacker is not None:
        # Its last calls may take longer than the period.
        async with asyncio.timeout(2 * _DEADLINE_S):
            line = await _reader(attacker).readline()
        if not line:
            raise RuntimeError("the attacker has ended; stderr has the cause")
        period.statuses.update(json.loads(line))


async def _ask_for(it: Suite, seconds: float, period: Period) -> None:
    end_s = time.monotonic() + seconds
    stub: Any = inference_pb2_grpc.InferenceServiceStub(it.channel)
    numbers = iter(range(10**9))

    async def ask_on() -> None:
        while (start_s := time.monotonic()) < end_s:
            request = greedy(prompt_of(_PROMPT_TOKENS, next(numbers)), _ANSWER_TOKENS)
            last_s = 0.0
            count = 0
            calls = stub.Generate(request, metadata=(("x-api-key", KEY),), timeout=_DEADLINE_S)
            async for response in calls:
                now_s = time.monotonic()
                if last_s:
                    period.gaps_s.append(now_s - last_s)
                else:
                    period.first_s.append(now_s - start_s)
                last_s = now_s
                count += len(response.token_ids)
            if count != _ANSWER_TOKENS:
                raise ValueError(f"{count} tokens came, not {_ANSWER_TOKENS}")

    await asyncio.gather(*(ask_on() for _ in range(_CLIENTS)))


@asynccontextmanager
async def _attacker(it: Suite, name: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """An attacker that has made its bodies, and waits."""
    attack, key = ("bodies", "") if name == WITHOUT_KEY else (name, STRANGER_KEY)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.security.attacker"),
        *(it.deployment.router, attack, key, "repeated"),
        cwd=_ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_DEADLINE_S):
            await _reader(process).readline()
        yield process
    finally:
        _writer(process).close()
        try:
            await asyncio.wait_for(process.wait(), _DEADLINE_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def _reader(process: asyncio.subprocess.Process) -> asyncio.StreamReader:
    assert process.stdout is not None, "a pipe was asked for"
    return process.stdout


def _writer(process: asyncio.subprocess.Process) -> asyncio.StreamWriter:
    assert process.stdin is not None, "a pipe was asked for"
    return process.stdin


def render_bystander(periods: Mapping[str, Period]) -> str:
    """A table of the times and of their ratios to the quiet ones."""
    head = ["attack", "answers", "TTFT p50, ms", "TTFT p99, ms", "p99 over quiet"]
    head += ["gap p99, ms", "gap p99 over quiet", "longest gap, ms", "router CPU", "calls/s"]
    head += ["p99 over elsewhere", "gap p99 over elsewhere"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    quiet = periods[QUIET]
    for name, period in periods.items():
        first_ms, gap_ms = percentile(period.first_s, 0.99), percentile(period.gaps_s, 0.99)
        cells = [
            name.replace("_", " "),
            str(len(period.first_s)),
            f"{percentile(period.first_s, 0.5) * 1e3:.1f}",
            f"{first_ms * 1e3:.1f}",
            f"{first_ms / percentile(quiet.first_s, 0.99):.2f}",
            f"{gap_ms * 1e3:.1f}",
            f"{gap_ms / percentile(quiet.gaps_s, 0.99):.2f}",
            f"{max(period.gaps_s) * 1e3:.0f}",
            f"{period.router_cpu_s / period.seconds:.0%}",
            f"{sum(period.statuses.values()) / period.seconds:.1f}",
        ]
        control = periods.get(elsewhere(name))
        if control is None:
            cells += ["", ""]
        else:
            cells += [
                f"{first_ms / percentile(control.first_s, 0.99):.2f}",
                f"{gap_ms / percentile(control.gaps_s, 0.99):.2f}",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
