"""What traces cost: CPU and throughput of the services with 0, 5 and 100 % of the requests sampled.

    python -m bench.telemetry [--shapes small,large] [--rounds 5] [--seconds 6] [--other CHECKOUT] [--output DIR]

The share is set by the client, in the flag of each request's traceparent. "Small" is 2 layers on 1 rank. "Large" is 61
layers on 8 ranks of both sides, so a prompt is written in 488 writes. The shares take turns on one deployment, each in
another place of every round. --other measures another checkout beside this one, with its own virtual environment.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
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

SHARES: Final = (0.0, 0.05, 1.0)
_SERVICES: Final = ("router", "prefill", "decode")
_MODEL: Final = "sim"
_ANSWER_TOKENS: Final = 64
_SYSTEM_TOKENS: Final = 140
_PROMPT_TOKENS: Final = 200
_SYSTEM_PROMPTS: Final = 4
_JOIN_S: Final = 30.0
_REQUEST_S: Final = 120.0
_HERE: Final = "this checkout"
_OTHER: Final = "the other checkout"


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and the ranks of both sides. `streams` requests are under way at once."""

    name: str
    model: str
    ranks: int
    streams: int
    blocks: int


SHAPES: Final = (
    Shape("small", "sim:verify=off,decode_step_s=0.002", 1, 16, 16_384),
    Shape("large", "sim:layers=61,heads=8,verify=off,decode_step_s=0.002", 8, 4, 512),
)


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
    cpu_s: dict[str, float] = field(default_factory=dict)

    def cpu_ms(self, service: str) -> float:
        """CPU milliseconds of one request."""
        return self.cpu_s[service] / self.requests * 1e3


@dataclass(slots=True)
class Rounds:
    """The rounds of one shape on one checkout, by share."""

    by_share: dict[float, list[Round]] = field(default_factory=dict)

    def least(self, share: float) -> float:
        """The least CPU of a request in any round, beside that of share 0. Other load only adds to the CPU."""
        least = min(map(_cpu_ms, self.by_share[share]))
        return least / min(map(_cpu_ms, self.by_share[0.0])) - 1.0

    def ratios(self, share: float) -> tuple[float, float, float, float]:
        """The medians of CPU and of throughput, beside share 0 of the same round, and their middle halves' widths."""
        pairs = list(zip(self.by_share[share], self.by_share[0.0], strict=True))
        cpu = [_cpu_ms(one) / _cpu_ms(none) - 1.0 for one, none in pairs]
        rate = [_rate(one) / _rate(none) - 1.0 for one, none in pairs]
        return statistics.median(cpu), _spread(cpu), statistics.median(rate), _spread(rate)


def _prompt(number: int) -> str:
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
        engine = (f"--registry={here}", *model)
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


async def load(way: Way, shape: Shape, seconds: float, share: float, numbers: Any) -> Round:
    """Keeps the streams busy for `seconds`. `share` of the requests are sampled."""
    found = Round()
    chosen = random.Random(7)

    async def ask(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        sampled = "01" if chosen.random() < share else "00"
        parent = (
            f"00-{chosen.getrandbits(128) or 1:032x}-{chosen.getrandbits(64) or 1:016x}-{sampled}"
        )
        request = inference_pb2.GenerateRequest(
            model=_MODEL,
            text=_prompt(next(numbers)),
            sampling=sampling_pb2.SamplingParams(
                max_tokens=_ANSWER_TOKENS, temperature=0.0, ignore_eos=True
            ),
            prefill_placement=inference_pb2.PREFILL_PLACEMENT_REMOTE,
        )
        call: Any = stub.Generate(request, timeout=_REQUEST_S, metadata=(("traceparent", parent),))
        tokens = 0
        async for response in call:
            tokens += len(response.token_ids)
        if tokens != _ANSWER_TOKENS:
            raise ValueError(f"{tokens} tokens came, not {_ANSWER_TOKENS}")
        found.requests += 1

    async with open_channel(way.endpoint, Credentials(role=Role.ROUTER)) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await ask(stub)
        before = _cpu_of(way)
        found.requests, begin_s = 0, time.perf_counter()

        async def stream() -> None:
            while time.perf_counter() < begin_s + seconds:
                await ask(stub)

        await asyncio.gather(*(stream() for _ in range(shape.streams)))
        found.seconds = time.perf_counter() - begin_s
        found.cpu_s = {service: used - before[service] for service, used in _cpu_of(way).items()}
    return found


def _cpu_of(way: Way) -> dict[str, float]:
    """CPU seconds of each service so far."""
    return {service: sum(map(cpu_seconds, ids)) for service, ids in way.process_ids.items()}


async def measure(
    shape: Shape, pythons: dict[str, str], arguments: argparse.Namespace
) -> dict[str, Rounds]:
    """The rounds of a shape on each checkout."""
    numbers = itertools.count()
    results = {name: Rounds({share: [] for share in SHARES}) for name in pythons}
    flags = (
        f"--tensor-parallel-size={shape.ranks}",
        f"--num-gpu-blocks-override={shape.blocks}",
    )
    async with AsyncExitStack() as held:
        folder = Path(held.enter_context(TemporaryDirectory()))
        ways = {}
        for name, python in pythons.items():
            place = folder / name.replace(" ", "-")
            place.mkdir()
            ways[name] = await held.enter_async_context(
                deployed(name, place, python, shape.model, shape.streams, flags)
            )
            await load(ways[name], shape, 2.0, 1.0, numbers)
        kinds = [(name, share) for name in pythons for share in SHARES]
        for number in range(arguments.rounds):
            first = number % len(kinds)
            for name, share in (*kinds[first:], *kinds[:first]):
                found = await load(ways[name], shape, arguments.seconds, share, numbers)
                results[name].by_share[share].append(found)
                print(shape.name, name, share, f"{_cpu_ms(found):.2f} ms", flush=True)
    return results


def table(shapes: Sequence[tuple[Shape, dict[str, Rounds]]]) -> str:
    """A row for each shape, checkout and share."""
    titles = (
        *("shape", "checkout", "sampled", "router, CPU ms/request", "prefill", "decode"),
        *("CPU beside 0 %", "least CPU beside 0 %", "requests/s", "beside 0 %"),
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for shape, results in shapes:
        for name, rounds in results.items():
            for share, found in rounds.by_share.items():
                cpu = [
                    statistics.median(one.cpu_ms(service) for one in found) for service in _SERVICES
                ]
                more, spread, faster, wide = rounds.ratios(share)
                rate = statistics.median(map(_rate, found))
                beside = f"{more:+.1%} ({spread:.1%})" if share else ""
                least = f"{rounds.least(share):+.1%}" if share else ""
                faster_text = f"{faster:+.1%} ({wide:.1%})" if share else ""
                lines.append(
                    f"| {shape.name} | {name} | {share:.0%} | {cpu[0]:.2f} | {cpu[1]:.2f} | {cpu[2]:.2f} "
                    f"| {beside} | {least} | {rate:.1f} | {faster_text} |"
                )
    return "\n".join(lines)


def _cpu_ms(one: Round) -> float:
    return sum(one.cpu_ms(service) for service in _SERVICES)


def _rate(one: Round) -> float:
    return one.requests / one.seconds


def _spread(values: list[float]) -> float:
    """The width of the middle half."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


async def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the table."""
    pythons = {_HERE: sys.executable}
    if arguments.other:
        pythons[_OTHER] = f"{arguments.other}/.venv/bin/python"
    wanted = arguments.shapes.split(",")
    shapes = [
        (shape, await measure(shape, pythons, arguments))
        for shape in SHAPES
        if shape.name in wanted
    ]
    drawn = table(shapes)
    print(drawn)
    if arguments.output:
        text = _NOTES.format(rounds=arguments.rounds, seconds=arguments.seconds, table=drawn)
        (Path(arguments.output) / "telemetry.md").write_text(text, encoding="utf-8")


_NOTES: Final = """# The cost of traces

Made by `python -m bench.telemetry`: a registry, a router, a prefill worker and 2 decode workers with simulated engines.
Requests have 200 prompt tokens and 64 answer tokens. Every prompt is prefilled remotely. Small is 2 layers on 1 rank.
Large is 61 layers on 8 ranks of both sides. CPU is that of the router, the prefill worker and both decode workers. The
figures are medians of {rounds} rounds of {seconds:g} s for each share, in turns. The ratios are of the same round. The
middle half of the rounds has the width in brackets. Other load on the machine only adds to the CPU of a request, so the
least CPU of any round is compared too.

{table}
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--shapes", default="small,large")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--other", default="")
    parser.add_argument("--output", default="")
    uvloop.run(main(parser.parse_args()))
