"""A fifth of a deployment of simulated workers is killed at once, under load.

    python -m bench.mass_loss [--workers 1000] [--processes 5] [--requests 2000] [--rounds 3] [--output DIR]

One worker in five prefills. So many processes host the workers of each role. After a third of the requests, one process
of each role is killed (SIGKILL). Every answer is compared with the model's. A request counts as lost unless its answer
is complete and right.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import grpc.aio
import uvloop

from bench.support.processes import cpu_seconds
from bench.support.services import Services, until_listed
from bench.support.sim_fleet import SERVED_MODEL, SimRequests, start_workers
from headrace.inference.v1 import inference_pb2_grpc
from headrace_cli.up.supervisor import ChildProcess
from headrace_common.errors import HeadraceError
from headrace_common.rpc.status import error_from_rpc

_ANSWER_TOKENS: Final = 64
_PROMPTS: Final = 64
_JOIN_S: Final = 120.0
_NOTICE_S: Final = 60.0
# Requests that began less than this after the loss count as disturbed by it.
_AFTER_S: Final = 10.0
_TITLES: Final = (
    *("round", "right", "lost", "moved or repeated", "most attempts"),
    *(
        "latency before, p50 ms",
        "p99",
        "across the loss, p50 ms",
        "p99",
        "longest",
        "later, p50 ms",
        "p99",
    ),
    *("out of the router's list after, s", "router, CPU s for the loss"),
)


@dataclass(frozen=True, slots=True)
class Fleet:
    """A deployment that is up. `victims` are the processes to kill, with `lost` workers."""

    endpoint: str
    router_pid: int
    victims: tuple[ChildProcess, ...]
    prefills: int
    decodes: int
    lost_prefills: int
    lost_decodes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that has ended. `failure` is empty for a right answer."""

    begin_s: float
    end_s: float
    attempts: int
    failure: str


@dataclass(slots=True)
class Seen:
    """What one round measured. `killed_s` is infinite before the loss."""

    answers: list[Answer] = field(default_factory=list)
    killed_s: float = float("inf")
    noticed_s: float = 0.0
    router_s: float = 0.0


@asynccontextmanager
async def deployed(
    folder: Path, workers: int, processes: int, ttl_s: float
) -> AsyncIterator[Fleet]:
    """Yields when the router lists every worker. Silent workers leave the registry after `ttl_s`."""
    of_role = {"prefill": max(processes, workers // 5)}
    of_role["decode"] = workers - of_role["prefill"]
    async with AsyncExitStack() as stack:
        services = Services(stack, folder)
        _, here = await services.start_registry()
        router, endpoint = await services.start_router(
            f"--registry={here}", f"--model={SERVED_MODEL}"
        )
        victims: list[ChildProcess] = []
        for service, count in of_role.items():
            for number in range(processes):
                name = f"{service}-{number}"
                flag = f"--lease-ttl-s={ttl_s / 2:g}"
                child = await start_workers(
                    services, service, count // processes, here, flag, name=name
                )
                if number == 0:
                    victims.append(child)
        lost = {service: count // processes for service, count in of_role.items()}
        prefills, decodes = (processes * lost[service] for service in ("prefill", "decode"))
        await until_listed(endpoint, prefills, decodes, _JOIN_S)
        yield Fleet(
            *(endpoint, router.pid, tuple(victims), prefills, decodes),
            *(lost["prefill"], lost["decode"]),
        )


async def _ask(stub: Any, requests: SimRequests, number: int) -> Answer:
    begin_s, attempts, failure = time.perf_counter(), 0, ""
    try:
        right, attempts = await requests.ask(stub, number)
        if not right:
            failure = "wrong answer"
    except grpc.aio.AioRpcError as error:
        failure = _reason(error)
    return Answer(begin_s, time.perf_counter(), attempts, failure)


def _reason(error: grpc.aio.AioRpcError) -> str:
    converted: HeadraceError = error_from_rpc(error)
    return f"{converted.reason}: {converted.detail}"


async def run_round(fleet: Fleet, requests: int, streams: int) -> Seen:
    """Sends all requests, and kills the victims after a third of them."""
    known = SimRequests(_PROMPTS, _ANSWER_TOKENS)
    seen, numbers, third = Seen(), iter(range(requests)), asyncio.Event()
    async with grpc.aio.insecure_channel(fleet.endpoint) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)

        async def stream() -> None:
            for number in numbers:
                seen.answers.append(await _ask(stub, known, number))
                if len(seen.answers) * 3 >= requests:
                    third.set()

        async def kill() -> None:
            await third.wait()
            used_s = cpu_seconds(fleet.router_pid)
            for victim in fleet.victims:
                victim.send_signal(signal.SIGKILL)
            seen.killed_s = time.perf_counter()
            await until_listed(
                fleet.endpoint,
                fleet.prefills - fleet.lost_prefills,
                fleet.decodes - fleet.lost_decodes,
                _NOTICE_S,
            )
            seen.noticed_s = time.perf_counter() - seen.killed_s
            seen.router_s = cpu_seconds(fleet.router_pid) - used_s

        await asyncio.gather(kill(), *(stream() for _ in range(streams)))
    return seen


def _quantiles_ms(answers: list[Answer]) -> tuple[str, str, str]:
    """Median, 99th percentile and maximum."""
    if not answers:
        return "-", "-", "-"
    taken = sorted(1e3 * (one.end_s - one.begin_s) for one in answers)
    high = taken[min(len(taken) - 1, int(0.99 * len(taken)))]
    return f"{statistics.median(taken):.0f}", f"{high:.0f}", f"{taken[-1]:.0f}"


def row(number: int, seen: Seen) -> str:
    """A line of the table."""
    right = [one for one in seen.answers if not one.failure]
    before = [one for one in right if one.end_s < seen.killed_s]
    late_s = seen.killed_s + _AFTER_S
    across = [one for one in right if one.end_s >= seen.killed_s and one.begin_s < late_s]
    later = [one for one in right if one.begin_s >= late_s]
    cells = (
        *(number, len(right), len(seen.answers) - len(right)),
        *(sum(one.attempts > 1 for one in right), max(one.attempts for one in right)),
        *(*_quantiles_ms(before)[:2], *_quantiles_ms(across), *_quantiles_ms(later)[:2]),
        *(f"{seen.noticed_s:.1f}", f"{seen.router_s:.1f}"),
    )
    return f"| {' | '.join(map(str, cells))} |"


async def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the table."""
    lines = [f"| {' | '.join(_TITLES)} |", "|---" * len(_TITLES) + "|"]
    failures: Counter[str] = Counter()
    for number in range(1, arguments.rounds + 1):
        with TemporaryDirectory() as folder:
            async with deployed(
                Path(folder), arguments.workers, arguments.processes, arguments.ttl
            ) as fleet:
                seen = await run_round(fleet, arguments.requests, arguments.streams)
        failures.update(one.failure for one in seen.answers if one.failure)
        lines.append(row(number, seen))
        print(lines[-1], flush=True)
        for failure, count in failures.most_common():
            print(count, failure)
    table = "\n".join(lines)
    print(table)
    if arguments.output:
        text = _NOTES.format(
            workers=arguments.workers,
            killed=arguments.workers // arguments.processes,
            processes=arguments.processes,
            requests=arguments.requests,
            streams=arguments.streams,
            prompt=SimRequests.prompt_tokens,
            answer=_ANSWER_TOKENS,
            after_s=_AFTER_S,
            table=table,
        )
        (Path(arguments.output) / "mass_loss.md").write_text(text)


_NOTES: Final = """# {killed} of {workers} workers killed at once

Made by `python -m bench.mass_loss`: simulated workers (verify=off), of which one in five prefills, in {processes}
processes of each role. {streams} requests at a time, each with {prompt} prompt tokens, {answer} answer tokens and a
remote prefill. After a third of {requests} requests, one process of each role is killed. Every answer was compared
with the model's.

{table}

"Across the loss" are requests that were in progress then, or began within {after_s:g} s. All processes share two
CPUs with the load.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=5, help="of each role")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--ttl", type=float, default=10.0, help="seconds of a member's lease")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default="")
    uvloop.run(main(parser.parse_args()))
