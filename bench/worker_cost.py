"""CPU of a request in the router, the prefill worker and the decode workers, with and without the KV oracle.

    python -m bench.worker_cost [--streams 64] [--rounds 3] [--seconds 6] [--gap-ms 5] [--other CHECKOUT] [--output DIR]

Each request has 200 prompt tokens, of which 140 are one of four system prompts, and 64 answer tokens. All are
prefilled remotely. The ways share the machine and take turns, so compare them within one run. --other measures the
services of another checkout beside this one's, with its own virtual environment.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import uvloop

from bench.support.processes import cpu_seconds
from bench.support.services import Services, until_joined
from headrace.inference.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.rpc.channel import open_channel

ANSWER_TOKENS: Final = 64
_MODEL: Final = "sim"
_SYSTEM_TOKENS: Final = 140
_PROMPT_TOKENS: Final = 200
_SYSTEM_PROMPTS: Final = 4
_JOIN_S: Final = 30.0
_REQUEST_S: Final = 60.0
_SERVICES: Final = ("router", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Way:
    """One deployment: its name, its router's endpoint, and the process ids by service."""

    name: str
    endpoint: str
    process_ids: dict[str, tuple[int, ...]]


@dataclass(slots=True)
class Round:
    """One way in one round."""

    requests: int = 0
    seconds: float = 0.0
    first_s: list[float] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)

    def cpu_ms(self, service: str) -> float:
        """CPU milliseconds of one request."""
        return self.cpu_s[service] / self.requests * 1e3


def prompt(number: int) -> str:
    """200 bytes, which are tokens of the simulated model. Its last 60 are its own."""
    system = f"system prompt {number % _SYSTEM_PROMPTS} ".ljust(_SYSTEM_TOKENS, "s")
    return f"{system}{number:08d} ".ljust(_PROMPT_TOKENS, "u")


@asynccontextmanager
async def deployed(
    name: str, folder: Path, python: str, sim: str, streams: int, flags: Sequence[str] = ()
) -> AsyncIterator[Way]:
    """One registry, router and prefill worker, and two decode workers. `flags` are more of all workers."""
    async with AsyncExitStack() as stack:
        services = Services(stack, folder, python=python, log_level="warning")
        _, here = await services.start_registry()
        router, endpoint = await services.start_router(f"--registry={here}", f"--model={_MODEL}")
        ids: dict[str, tuple[int, ...]] = {"router": (router.pid,)}
        model = (f"--model={sim}", "--served-model=sim")
        engine = (f"--registry={here}", "--engine=sim", *model)
        room = ("--num-gpu-blocks-override=16384", "--max-num-batched-tokens=8192", *flags)
        more = (f"--max-num-seqs={max(64, streams)}", "--internal-listen=127.0.0.1:0")
        prefill = await services.start("prefill", "--worker-id=prefill-0", *engine, *room, *more)
        ids["prefill"] = (prefill.pid,)
        more = (f"--max-num-seqs={max(256, streams)}", "--internal-listen=127.0.0.1:0")
        decodes = [
            await services.start(
                *("decode", f"--worker-id=decode-{number}", *engine, *room, *more),
                name=f"decode-{number}",
            )
            for number in range(2)
        ]
        ids["decode"] = tuple(child.pid for child in decodes)
        await until_joined(here, 2 + len(decodes), _JOIN_S)
        yield Way(name, endpoint, ids)


async def load(way: Way, streams: int, seconds: float, numbers: Any) -> Round:
    """Keeps `streams` requests under way for `seconds`. Raises when an answer is not whole or was not remote."""
    found = Round()

    async def ask(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        request = inference_pb2.GenerateRequest(
            model=_MODEL,
            text=prompt(next(numbers)),
            sampling=sampling_pb2.SamplingParams(
                max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True
            ),
            prefill_placement=inference_pb2.PREFILL_PLACEMENT_REMOTE,
        )
        begin_s, first_s, tokens = time.perf_counter(), 0.0, 0
        call: Any = stub.Generate(request, timeout=_REQUEST_S)
        async for response in call:
            first_s = first_s or (time.perf_counter() if response.token_ids else 0.0)
            tokens += len(response.token_ids)
        if tokens != ANSWER_TOKENS:
            raise ValueError(f"{tokens} tokens came, not {ANSWER_TOKENS}")
        found.first_s.append(first_s - begin_s)
        found.requests += 1

    async with open_channel(way.endpoint, Credentials(role=Role.ROUTER)) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await ask(stub)
        before = cpu_of(way)
        found.requests, begin_s = 0, time.perf_counter()

        async def stream() -> None:
            while time.perf_counter() < begin_s + seconds:
                await ask(stub)

        await asyncio.gather(*(stream() for _ in range(streams)))
        found.seconds = time.perf_counter() - begin_s
        found.cpu_s = {service: used - before[service] for service, used in cpu_of(way).items()}
    return found


def _subfolder(folder: Path, number: int) -> Path:
    made = folder / str(number)
    made.mkdir()
    return made


def cpu_of(way: Way) -> dict[str, float]:
    """CPU seconds of each service so far."""
    return {service: sum(map(cpu_seconds, ids)) for service, ids in way.process_ids.items()}


def table(rounds: dict[str, list[Round]]) -> str:
    """A row for each way: medians over the rounds."""
    titles = (
        *("way", "router, CPU ms/request", "prefill", "decode", "workers together"),
        *("requests/s", "first token, ms"),
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, found in rounds.items():
        cpu = {
            service: statistics.median(one.cpu_ms(service) for one in found)
            for service in _SERVICES
        }
        rate = statistics.median(one.requests / one.seconds for one in found)
        first_ms = statistics.median(itertools.chain(*(one.first_s for one in found))) * 1e3
        lines.append(
            f"| {name} | {cpu['router']:.2f} | {cpu['prefill']:.2f} | {cpu['decode']:.2f} "
            f"| {cpu['prefill'] + cpu['decode']:.2f} | {rate:.1f} | {first_ms:.0f} |"
        )
    return "\n".join(lines)


async def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the table."""
    sim = f"sim:decode_step_s={arguments.gap_ms / 1e3}"
    here = sys.executable
    kinds = [("verify on", here, sim), ("verify off", here, f"{sim},verify=off")]
    if arguments.other:
        there = f"{arguments.other}/.venv/bin/python"
        kinds += [
            ("the other checkout, verify on", there, sim),
            ("the other checkout, verify off", there, f"{sim},verify=off"),
        ]
    if arguments.ways:
        kinds = [kinds[int(index)] for index in arguments.ways.split(",")]
    rounds: dict[str, list[Round]] = {}
    numbers = itertools.count()
    async with AsyncExitStack() as held:
        folder = Path(held.enter_context(TemporaryDirectory()))
        ways = [
            await held.enter_async_context(
                deployed(name, _subfolder(folder, number), python, model, arguments.streams)
            )
            for number, (name, python, model) in enumerate(kinds)
        ]
        for way in ways:
            await load(way, arguments.streams, 1.0, numbers)
            print(way, flush=True)
        for number in range(arguments.rounds):
            first = number % len(ways)
            for way in (*ways[first:], *ways[:first]):
                found = await load(way, arguments.streams, arguments.seconds, numbers)
                rounds.setdefault(way.name, []).append(found)
    drawn = table({way.name: rounds[way.name] for way in ways})
    print(drawn)
    if arguments.output:
        text = _NOTES.format(
            streams=arguments.streams, gap=arguments.gap_ms, rounds=arguments.rounds, table=drawn
        )
        (Path(arguments.output) / "worker_cost.md").write_text(text)


_NOTES: Final = """# The CPU of a request in the services

Made by `python -m bench.worker_cost`: 1 prefill and 2 decode workers with simulated engines, {streams} streams, a step
of {gap} ms. Requests have 200 prompt tokens and 64 answer tokens. Every prompt is prefilled remotely. The figures are
medians of {rounds} rounds.

{table}

"Verify on": the simulated engine writes every KV byte and computes each token from all bytes of its context. "Verify
off": `sim:verify=off`, so KV memory is still transferred, but neither written nor read by the engine.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--gap-ms", type=float, default=5.0)
    parser.add_argument("--other", default="")
    parser.add_argument(
        "--ways", default="", help="The numbers of the ways to measure; all without it."
    )
    parser.add_argument("--output", default="")
    uvloop.run(main(parser.parse_args()))
