"""Thousands of streams on one router: memory of a stream, slow readers beside fast ones, and a worker that is killed.

    python -m bench.many_streams [--streams 2000] [--tokens 96] [--step-ms 200] [--output DIR]

Two decode workers with simulated engines (verify=off) answer all streams at the same time, and prefill the prompts
themselves. Every tenth client reads slowly: one message a second. When the fast clients have a third of their answers,
one worker is killed, and the router continues its answers on the other one. Every answer is compared with the
model's closed form, so a lost, repeated or wrong token ends the benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import grpc.aio
import uvloop

from bench.support.processes import cpu_seconds, resident_kib
from bench.support.services import Services, until_joined
from headrace.inference.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from headrace_cli.up.supervisor import ChildProcess
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.settings import parse_settings

_MODEL: Final = "sim"
_SLOW_EVERY: Final = 10
_SLOW_S: Final = 1.0
_STREAMS_PER_CHANNEL: Final = 50
_PROMPT_TOKENS: Final = 32
_JOIN_S: Final = 60.0
_ANSWER_S: Final = 240.0


@dataclass(slots=True)
class Answer:
    """One stream: its prompt, the tokens that came, and when."""

    prompt: list[int]
    slow: bool
    tokens: list[int] = field(default_factory=list)
    end_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """The router, and the worker that is to be killed."""

    endpoint: str
    router_pid: int
    victim: ChildProcess


@asynccontextmanager
async def deployed(folder: Path, model: str, streams: int) -> AsyncIterator[Deployment]:
    """A registry, a router and two decode workers, each with room for all streams."""
    async with AsyncExitStack() as stack:
        services = Services(stack, folder)
        _, here = await services.start_registry()
        bounds = (f"--max-concurrent-requests={streams}", f"--max-queued-tokens={streams * 1_000}")
        router, endpoint = await services.start_router(
            *(f"--registry={here}", f"--model={_MODEL}", *bounds),
            f"--default-deadline-s={_ANSWER_S}",
        )
        workers = [
            await services.start(
                *("decode", f"--worker-id=decode-{number}", "--engine=sim"),
                *(f"--registry={here}", f"--model={model}", "--served-model=sim"),
                *(f"--max-num-seqs={streams}", f"--num-gpu-blocks-override={streams * 8}"),
                *("--max-num-batched-tokens=65536", "--internal-listen=127.0.0.1:0"),
                name=f"decode-{number}",
            )
            for number in range(2)
        ]
        await until_joined(here, 3, _JOIN_S)
        yield Deployment(endpoint, router.pid, workers[0])


async def read(stub: inference_pb2_grpc.InferenceServiceStub, answer: Answer, tokens: int) -> None:
    """Reads one answer to its end."""
    request = inference_pb2.GenerateRequest(
        model=_MODEL,
        tokens=inference_pb2.TokenIds(ids=answer.prompt),
        sampling=sampling_pb2.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        prefill_placement=inference_pb2.PREFILL_PLACEMENT_LOCAL,
    )
    call: Any = stub.Generate(request, timeout=_ANSWER_S)
    async for response in call:
        answer.tokens += response.token_ids
        if answer.slow:
            await asyncio.sleep(_SLOW_S)
    answer.end_s = time.perf_counter()


async def _until_share(answers: list[Answer], tokens: int) -> None:
    """Waits until the fast readers have this many tokens on average."""
    fast = [answer for answer in answers if not answer.slow]
    while statistics.mean(len(answer.tokens) for answer in fast) < tokens:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def measure(arguments: argparse.Namespace, folder: Path) -> str:
    """Runs all streams, kills a worker under them, checks every answer, and returns the table."""
    model = f"sim:decode_step_s={arguments.step_ms / 1e3},verify=off"
    closed_form = SimModel(parse_settings(model))
    count, tokens = arguments.streams, arguments.tokens
    answers = [
        Answer([number % 251 + 1, *range(1, _PROMPT_TOKENS)], number % _SLOW_EVERY == 0)
        for number in range(count)
    ]
    async with deployed(folder, model, count) as found, AsyncExitStack() as stack:
        stubs = [
            inference_pb2_grpc.InferenceServiceStub(await _channel(stack, found.endpoint))
            for _ in range(-(-count // _STREAMS_PER_CHANNEL))
        ]
        # The first request loads modules.
        await read(stubs[0], Answer([1, 2, 3], slow=False), 2)
        before_kib, before_s, begin_s = (
            resident_kib(found.router_pid),
            cpu_seconds(found.router_pid),
            time.perf_counter(),
        )
        streams = asyncio.gather(
            *(
                read(stubs[number % len(stubs)], answer, tokens)
                for number, answer in enumerate(answers)
            )
        )
        async with asyncio.timeout(_ANSWER_S):
            await _until_share(answers, tokens // 3)
            during_kib = resident_kib(found.router_pid)
            found.victim.send_signal(signal.SIGKILL)
            await streams
        cpu_s = cpu_seconds(found.router_pid) - before_s
    expected = {
        tuple(answer.prompt): closed_form.expected_tokens(answer.prompt, tokens)
        for answer in answers
    }
    wrong = [answer for answer in answers if tuple(answer.tokens) != expected[tuple(answer.prompt)]]
    if wrong:
        raise ValueError(f"{len(wrong)} of {count} answers are wrong")
    ends = {
        slow: sorted(answer.end_s - begin_s for answer in answers if answer.slow == slow)
        for slow in (False, True)
    }
    cells = (
        *(f"{count}", f"{tokens}", f"{(during_kib - before_kib) / count:.0f}"),
        *(f"{ends[False][len(ends[False]) // 2]:.1f}", f"{ends[False][-1]:.1f}"),
        *(f"{ends[True][-1]:.1f}", f"{cpu_s / count * 1e3:.2f}", "0"),
    )
    return (
        "| streams | tokens | router, KiB a stream | fast readers, median s | last fast s "
        f"| last slow s | router CPU, ms a stream | lost |\n{'|---' * len(cells)}|\n| {' | '.join(cells)} |"
    )


async def _channel(stack: AsyncExitStack, endpoint: str) -> grpc.aio.Channel:
    # A connection of its own: a listener bounds the streams of one.
    options = (("grpc.use_local_subchannel_pool", 1),)
    return await stack.enter_async_context(grpc.aio.insecure_channel(endpoint, options=options))


async def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the table."""
    with TemporaryDirectory() as folder:
        table = await measure(arguments, Path(folder))
    print(table)
    if arguments.output:
        (Path(arguments.output) / "many_streams.md").write_text(_NOTES.format(table=table))


_NOTES: Final = """# Many streams on one router

Made by `python -m bench.many_streams`: two simulated decode workers, of which one is killed when the fast readers have
a third of their answers. Every tenth client reads one message a second. Every answer was compared with the model's.
Both CPUs had other load.

{table}
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--streams", type=int, default=2_000)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--step-ms", type=float, default=200.0)
    parser.add_argument("--output", default="")
    uvloop.run(main(parser.parse_args()))
