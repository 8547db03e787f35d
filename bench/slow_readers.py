"""Gaps between the tokens of fast readers: alone, beside many fast readers, and beside as many slow ones.

    python -m bench.slow_readers [--crowd 1000] [--fast 32] [--seconds 8] [--rounds 3] [--step-ms 200] [--output DIR]

The crowd reads in a process of its own. A slow reader takes one message a second, and its connection buffers little, so
the router must hold back its tokens. "Beside fast readers" has the same load without slow readers. So its row, rather
than that of fast readers alone, shows what slow readers cost. The ways take turns in each round.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import grpc.aio
import uvloop

from bench.many_streams import deployed
from bench.support.processes import cpu_seconds
from headrace.inference.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2

_STREAMS_PER_CHANNEL: Final = 50
_SLOW_S: Final = 1.0
_PROMPT_TOKENS: Final = 32
_ANSWER_TOKENS: Final = 96
_READY_S: Final = 60.0
_ANSWER_S: Final = 240.0
# The crowd has just begun its answers, all at once.
_SETTLE_S: Final = 2.0
_ALONE: Final = "alone"
_FAST: Final = "fast"
_SLOW: Final = "slow"
# Without them, gRPC buffers all tokens of a slow reader at the client.
_SMALL_BUFFERS: Final = (("grpc.http2.lookahead_bytes", 64), ("grpc.http2.bdp_probe", 0))


def _request(number: int) -> inference_pb2.GenerateRequest:
    prompt = [number % 251 + 1, number // 251 % 251 + 1, *range(1, _PROMPT_TOKENS)]
    return inference_pb2.GenerateRequest(
        model="sim",
        tokens=inference_pb2.TokenIds(ids=prompt),
        sampling=sampling_pb2.SamplingParams(
            max_tokens=_ANSWER_TOKENS, temperature=0.0, ignore_eos=True
        ),
        prefill_placement=inference_pb2.PREFILL_PLACEMENT_LOCAL,
    )


async def read_as_crowd(endpoint: str, count: int, kind: str) -> None:
    """Opens `count` streams, prints a line when all have a token, and reads until the process is ended."""
    options = (("grpc.use_local_subchannel_pool", 1), *(_SMALL_BUFFERS if kind == _SLOW else ()))
    channels = [
        grpc.aio.insecure_channel(endpoint, options=options)
        for _ in range(-(-count // _STREAMS_PER_CHANNEL))
    ]
    begun = asyncio.Semaphore(0)

    async def read(number: int) -> None:
        stub = inference_pb2_grpc.InferenceServiceStub(channels[number % len(channels)])
        for answer in itertools.count():
            call: Any = stub.Generate(_request(number), timeout=_ANSWER_S)
            first = not answer
            async for _ in call:
                if first:
                    begun.release()
                    first = False
                if kind == _SLOW:
                    # Not all at the same moment.
                    await asyncio.sleep(random.uniform(0.5, 1.5) * _SLOW_S)

    readers = [asyncio.create_task(read(number)) for number in range(count)]
    for _ in range(count):
        await begun.acquire()
    print("ready", flush=True)
    await asyncio.gather(*readers)


@asynccontextmanager
async def crowd(endpoint: str, count: int, kind: str) -> AsyncIterator[None]:
    """In this context, `count` readers of this kind read. None for "alone"."""
    if kind == _ALONE:
        yield
        return
    command = (sys.executable, "-m", "bench.slow_readers", "--serve", endpoint, str(count), kind)
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert child.stdout is not None
        async with asyncio.timeout(_READY_S):
            if not await child.stdout.readline():
                raise ValueError("the crowd has ended")
        yield
        if child.returncode is not None:
            raise ValueError("the crowd has ended")
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def gaps_of(endpoint: str, fast: int, seconds: float) -> list[float]:
    """Seconds between messages with tokens, of `fast` readers, for `seconds` and until there is one."""
    found: list[float] = []
    end_s = time.perf_counter() + seconds

    async def read(stub: inference_pb2_grpc.InferenceServiceStub, number: int) -> None:
        while time.perf_counter() < end_s or not found:
            call: Any = stub.Generate(_request(number), timeout=_ANSWER_S)
            last_s = 0.0
            async for response in call:
                now_s = time.perf_counter()
                if response.token_ids and last_s:
                    found.append(now_s - last_s)
                last_s = now_s if response.token_ids else last_s
                if now_s >= end_s and found:
                    break
            call.cancel()

    async with grpc.aio.insecure_channel(endpoint) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await asyncio.gather(*(read(stub, number) for number in range(fast)))
    return found


async def measure(arguments: argparse.Namespace, folder: Path) -> str:
    """All rounds; returns the table."""
    model = f"sim:decode_step_s={arguments.step_ms / 1e3},verify=off"
    kinds = (_ALONE, _FAST, _SLOW)
    gaps: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    cpu: dict[str, list[float]] = {kind: [] for kind in kinds}
    room = arguments.crowd + arguments.fast
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(deployed(folder, model, room))
        await gaps_of(found.endpoint, 1, 1.0)
        for number in range(arguments.rounds):
            for kind in (*kinds[number % 3 :], *kinds[: number % 3]):
                async with crowd(found.endpoint, arguments.crowd, kind):
                    await asyncio.sleep(_SETTLE_S if kind != _ALONE else 0.0)
                    begin_s, before_s = time.perf_counter(), cpu_seconds(found.router_pid)
                    gaps[kind].append(
                        await gaps_of(found.endpoint, arguments.fast, arguments.seconds)
                    )
                    used_s = cpu_seconds(found.router_pid) - before_s
                    cpu[kind].append(100 * used_s / (time.perf_counter() - begin_s))
                # The worker frees what the crowd had.
                await asyncio.sleep(1.0)
    names = {
        _ALONE: f"{arguments.fast} fast readers alone",
        _FAST: f"beside {arguments.crowd:,} fast readers",
        _SLOW: f"beside {arguments.crowd:,} slow readers",
    }
    lines = [
        "| readers | gap, p50 ms | p95 ms | p99 ms | longest ms | router, % of a core |",
        "|---|---|---|---|---|---|",
    ]
    for kind in kinds:
        figures = [
            statistics.median(_quantile(one, share) for one in gaps[kind]) * 1e3
            for share in (0.5, 0.95, 0.99, 1.0)
        ]
        cells = (names[kind], *(f"{figure:.0f}" for figure in figures))
        lines.append(f"| {' | '.join(cells)} | {statistics.median(cpu[kind]):.0f} |")
    return "\n".join(lines)


def _quantile(gaps: list[float], share: float) -> float:
    ordered = sorted(gaps)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the table."""
    with TemporaryDirectory() as folder:
        table = await measure(arguments, Path(folder))
    print(table)
    if arguments.output:
        text = _NOTES.format(
            step=arguments.step_ms, rounds=arguments.rounds, seconds=arguments.seconds, table=table
        )
        (Path(arguments.output) / "slow_readers.md").write_text(text)


_NOTES: Final = """# Fast readers beside slow ones

Made by `python -m bench.slow_readers`: two simulated decode workers with a step of {step:g} ms, one router. Gaps are
those between the messages of fast readers. Figures are medians of {rounds} rounds of {seconds:g} s. A slow reader takes
one message a second, through a connection that buffers 64 bytes of a stream. Both CPUs had other load.

{table}

The second row has the load of the third without slow readers. So only the difference of these two is due to slow
reading.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--crowd", type=int, default=1_000)
    parser.add_argument("--fast", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=200.0)
    parser.add_argument("--output", default="")
    parser.add_argument(
        "--serve", nargs=3, metavar=("ENDPOINT", "COUNT", "KIND"), help="Used by itself."
    )
    given = parser.parse_args()
    if given.serve:
        uvloop.run(read_as_crowd(given.serve[0], int(given.serve[1]), given.serve[2]))
    else:
        uvloop.run(main(given))
