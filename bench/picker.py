"""CPU of a decision of the Endpoint Picker, beside a request through the same router.

    python -m bench.picker [--loops 16] [--rounds 4] [--seconds 4] [--workers 2] [--output DIR]

A pick is one ext_proc stream: headers and a chat's body in, the worker's address and the body out, as Envoy asks in the
mode FULL_DUPLEX_STREAMED. It checks, tokenizes and places the prompt. The request beside it is the same chat at the
router's OpenAI HTTP, with an answer of --tokens tokens from a simulated worker. CPU is that of the router's process.
The ways take turns, so compare the columns of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx
import uvloop

from bench.support.processes import cpu_seconds, until_listening
from bench.support.services import Services, until_joined
from headrace.gateway.v1 import external_processing_pb2 as ext_pb2
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.access.table import PICKER_METHOD
from headrace_common.ports import free_port
from headrace_common.rpc.channel import open_channel

PROMPT_TOKENS: Final = (200, 4_000)
_MODEL: Final = "sim"
_PATH: Final = "/v1/chat/completions"
_FULL_DUPLEX: Final = 4
_DESTINATION: Final = "x-gateway-destination-endpoint"
_JOIN_S: Final = 30.0
_CALL_S: Final = 30.0

Ask = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Deployment:
    """A router with both listeners."""

    picker: str
    http: str
    router_pid: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One way in one round."""

    cpu_ms: float
    """CPU milliseconds of the router for one call."""
    p50_ms: float
    calls_per_s: float


@asynccontextmanager
async def deployed(folder: Path, workers: int) -> AsyncIterator[Deployment]:
    """A registry, a router and decode workers with HTTP, on one machine."""
    door, picker = free_port(), free_port()
    async with AsyncExitStack() as stack:
        services = Services(stack, folder)
        _, here = await services.start_registry()
        router, _ = await services.start_router(
            *(f"--registry={here}", f"--model={_MODEL}", f"--http-listen=127.0.0.1:{door}"),
            f"--endpoint-picker-listen=127.0.0.1:{picker}",
        )
        await until_listening(picker, router, folder / "router.log")
        await services.start(
            *("decode", "--worker-id=decode", f"--registry={here}"),
            *("--model=sim:verify=off", "--served-model=sim", "--http-listen=127.0.0.1:0"),
            *("--internal-listen=127.0.0.1:0", "--max-num-seqs=8192"),
            *("--num-gpu-blocks-override=65536", "--max-num-batched-tokens=65536"),
            f"--workers-per-process={workers}",
        )
        await until_joined(here, workers + 1, _JOIN_S)
        yield Deployment(f"127.0.0.1:{picker}", f"127.0.0.1:{door}", router.pid)


def chat(number: int, prompt_tokens: int, tokens: int) -> bytes:
    """A chat of its own from the first character on, so that no worker has its prefix."""
    text = f"{number:08d} ".ljust(prompt_tokens, "u")
    body = {"model": _MODEL, "messages": [{"role": "user", "content": text}]}
    return json.dumps({**body, "max_tokens": tokens, "ignore_eos": True}).encode()


def messages(body: bytes) -> list[ext_pb2.ProcessingRequest]:
    """What a gateway sends about one HTTP request."""
    headers = {":path": _PATH, ":method": "POST", "content-type": "application/json"}
    pairs = [ext_pb2.HeaderValue(key=key, raw_value=one.encode()) for key, one in headers.items()]
    return [
        ext_pb2.ProcessingRequest(
            request_headers=ext_pb2.HttpHeaders(headers=ext_pb2.HeaderMap(headers=pairs)),
            protocol_config=ext_pb2.ProtocolConfiguration(request_body_mode=_FULL_DUPLEX),
        ),
        ext_pb2.ProcessingRequest(request_body=ext_pb2.HttpBody(body=body, end_of_stream=True)),
    ]


@asynccontextmanager
async def ways(found: Deployment) -> AsyncIterator[dict[str, Ask]]:
    """Calls of the picker and of the router's HTTP. Each raises when the response is not what it should be."""
    limits = httpx.Limits(max_connections=256)
    async with (
        open_channel(found.picker, Credentials(role=Role.GATEWAY)) as channel,
        httpx.AsyncClient(
            base_url=f"http://{found.http}",
            timeout=_CALL_S,
            limits=limits,
            headers={"content-type": "application/json"},
        ) as client,
    ):
        call: Any = channel.stream_stream(
            PICKER_METHOD,
            request_serializer=ext_pb2.ProcessingRequest.SerializeToString,
            response_deserializer=ext_pb2.ProcessingResponse.FromString,
        )

        async def pick(body: bytes) -> None:
            responses = [one async for one in call(iter(messages(body)), timeout=_CALL_S)]
            picked = responses[0].request_headers.response.header_mutation.set_headers
            if [one.header.key for one in picked] != [_DESTINATION]:
                raise ValueError(f"no worker was picked: {responses}")

        async def ask(body: bytes) -> None:
            (await client.post(_PATH, content=body)).raise_for_status()

        yield {"pick": pick, "request": ask}


async def measure(
    ask: Ask, bodies: Iterator[bytes], pid: int, loops: int, seconds: float
) -> Sample:
    """Calls in `loops` loops for `seconds`."""
    taken_s: list[float] = []
    await ask(next(bodies))
    before_s, begin_s = cpu_seconds(pid), time.perf_counter()

    async def loop() -> None:
        while time.perf_counter() < begin_s + seconds:
            start_s = time.perf_counter()
            await ask(next(bodies))
            taken_s.append(time.perf_counter() - start_s)

    await asyncio.gather(*(loop() for _ in range(loops)))
    cpu_s, elapsed_s = cpu_seconds(pid) - before_s, time.perf_counter() - begin_s
    p50_ms = 1e3 * statistics.median(taken_s)
    return Sample(1e3 * cpu_s / len(taken_s), p50_ms, len(taken_s) / elapsed_s)


async def compare(arguments: argparse.Namespace, folder: Path) -> str:
    """Runs all rounds, and returns the table."""
    samples: dict[tuple[int, str], list[Sample]] = {}
    numbers = itertools.count()
    async with deployed(folder, arguments.workers) as found, ways(found) as asks:
        for _ in range(arguments.rounds):
            for prompt_tokens, (name, ask) in itertools.product(PROMPT_TOKENS, asks.items()):
                bodies = (chat(number, prompt_tokens, arguments.tokens) for number in numbers)
                sample = await measure(
                    ask, bodies, found.router_pid, arguments.loops, arguments.seconds
                )
                samples.setdefault((prompt_tokens, name), []).append(sample)
    lines = [_row(prompt_tokens, samples) for prompt_tokens in PROMPT_TOKENS]
    return "\n".join([_HEAD, "|---" * (_HEAD.count("|") - 1) + "|", *lines])


def _row(prompt_tokens: int, samples: dict[tuple[int, str], list[Sample]]) -> str:
    picks, requests = (samples[prompt_tokens, name] for name in ("pick", "request"))

    def median(values: Iterator[float]) -> float:
        return statistics.median(values)

    share = median(pick.cpu_ms / one.cpu_ms for pick, one in zip(picks, requests, strict=True))
    cells = (
        f"{prompt_tokens}",
        f"{median(one.cpu_ms for one in picks):.2f}",
        f"{median(one.cpu_ms for one in requests):.2f}",
        f"{share:.2f}",
        f"{median(one.p50_ms for one in picks):.1f}",
        f"{median(one.calls_per_s for one in picks):.0f}",
    )
    return f"| {' | '.join(cells)} |"


async def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the table."""
    with TemporaryDirectory() as folder:
        table = await compare(arguments, Path(folder))
    print(table)
    if arguments.output:
        notes = _NOTES.format(table=table, **vars(arguments))
        (Path(arguments.output) / "picker.md").write_text(notes)


_HEAD: Final = "| prompt tokens | a pick, router CPU ms | a request, router CPU ms | ratio | pick p50, ms | picks/s |"
_NOTES: Final = """# The CPU of a pick

Made by `python -m bench.picker`: {workers} decode workers with simulated engines, {loops} calls at a time, medians
of {rounds} rounds. A pick is one ext_proc stream with a chat's body, as Envoy asks. The request beside it is the same
chat at the router's OpenAI HTTP, with {tokens} answer tokens. The simulated model's tokens are bytes, so a
real tokenizer adds its time to both. Both CPUs had other load: compare the columns.

{table}
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--loops", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--output", default="")
    uvloop.run(main(parser.parse_args()))
