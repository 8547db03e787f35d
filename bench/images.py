"""Times the first token of a chat about one image: prefilled apart and handed over, and by plain vLLM.

    python scripts/make_torchvision.py && python scripts/make_tiny_vision.py --bench
    PYTHONPATH=build/torchvision python -m bench.images [--repetitions 9] [--pixels 1024] [--output bench/results]

Both ways get the same new image in every repetition, in alternating order, in a chat over OpenAI HTTP with a `data:`
URL. Ours are the services of `headrace up`. Plain vLLM is its own server. Only one way computes at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx
import numpy as np
from PIL import Image

from bench.support.processes import process
from bench.support.vllm_child import vllm_environment
from bench.support.vllm_ways import BLOCK_TOKENS, CONTEXT_TOKENS, alternating, ours
from headrace_common.ports import free_port

OURS: Final = "Headrace, handed over"
PLAIN: Final = "plain vLLM"
CACHE_TOKENS: Final = 8_192
DTYPE: Final = "float32"
START_S: Final = 180.0
REQUEST_S: Final = 120.0
WANTED: Final = 1.05


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer."""

    first_ms: float
    text: str
    prompt_tokens: int


def image_url(pixels: int, seed: int) -> str:
    """A JPEG of coloured patches as a `data:` URL."""
    patches = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    image = Image.fromarray(patches).resize((pixels, pixels), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, "jpeg", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


async def ask(client: httpx.AsyncClient, base: str, model: str, image: str) -> Sample:
    """The time to the first event, which both servers send with the first token."""
    body = {
        "model": model,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": image}},
                    {"type": "text", "text": "What is this?"},
                ],
            }
        ],
        "temperature": 0,
        "max_tokens": 16,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start_s, first_s, text, prompt_tokens = time.perf_counter(), 0.0, "", 0
    async with client.stream("POST", f"{base}/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError((await answer.aread()).decode())
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first_s = first_s or time.perf_counter()
            event: dict[str, Any] = json.loads(line[6:])
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
            if event.get("usage"):
                prompt_tokens = event["usage"]["prompt_tokens"]
    return Sample(1e3 * (first_s - start_s), text, prompt_tokens)


@asynccontextmanager
async def plain(model: Path, folder: Path) -> AsyncIterator[str]:
    """vLLM's own server with the settings of our engines. Yields its address."""
    port, log = free_port(), folder / "plain.log"
    options = {
        "model": model,
        "served-model-name": model.name,
        "port": port,
        "dtype": DTYPE,
        "max-model-len": CONTEXT_TOKENS,
        "max-num-batched-tokens": CONTEXT_TOKENS,
        "num-gpu-blocks-override": CACHE_TOKENS // BLOCK_TOKENS,
        "generation-config": "vllm",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    variables = [f"{name}={value}" for name, value in vllm_environment(keep_memory=True).items()]
    server = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager")
    base = f"http://127.0.0.1:{port}"
    async with process("env", *variables, *server, *arguments, log=log) as child:
        async with asyncio.timeout(START_S), httpx.AsyncClient(timeout=5) as client:
            while not await _is_ready(client, base):
                if child.returncode is not None:
                    raise RuntimeError(log.read_text()[-4_000:])
                await asyncio.sleep(0.5)
        yield base


async def _is_ready(client: httpx.AsyncClient, base: str) -> bool:
    try:
        return (await client.get(f"{base}/health")).status_code == 200
    except httpx.TransportError:
        return False


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, list[Sample]]:
    """Starts and warms both, then measures."""
    model: Path = arguments.model
    samples: dict[str, list[Sample]] = {OURS: [], PLAIN: []}
    async with (
        plain(model, folder) as plain_base,
        ours(model, DTYPE, CACHE_TOKENS, folder / "ours") as deployment,
        httpx.AsyncClient(timeout=REQUEST_S) as client,
    ):
        bases = {OURS: f"http://{deployment.http}", PLAIN: plain_base}
        for number in range(-arguments.warm, arguments.repetitions):
            image = image_url(arguments.pixels, 1_000 + number)
            for way in alternating([OURS, PLAIN], number):
                sample = await ask(client, bases[way], model.name, image)
                print(f"{number} {way}: {sample}", file=sys.stderr, flush=True)
                if number >= 0:
                    samples[way].append(sample)
    return samples


_REPORT: Final = """# The first token of a chat about an image

{model} with random weights in float32, and one image of {pixels} x {pixels} pixels in prompts of {tokens:,} tokens.
One thread for each engine, {cpus} CPUs for everything. Made by `python -m bench.images`.

| way | TTFT, ms |
|---|---|
{rows}

Medians of {count} repetitions, and the range in parentheses. The median of our TTFT over plain vLLM's for the same
image is {ratio:.3f}, wanted {wanted} at most: {reached}. Equal answers: {equal} of {count}.

Both are called over OpenAI HTTP with a new image in a `data:` URL. Headrace: the services of `headrace up` with one
prefill and one decode worker. Plain vLLM: its own server with the same settings of the engine.
"""


def report(arguments: argparse.Namespace, samples: dict[str, list[Sample]]) -> str:
    """The table, with the median of the ratios of each repetition."""
    pairs = list(zip(samples[OURS], samples[PLAIN], strict=True))
    ratio = statistics.median(mine.first_ms / other.first_ms for mine, other in pairs)
    equal = sum(mine.text == other.text for mine, other in pairs)
    rows = []
    for way, found in samples.items():
        times_ms = sorted(sample.first_ms for sample in found)
        rows.append(
            f"| {way} | {statistics.median(times_ms):,.0f} ({times_ms[0]:,.0f} to {times_ms[-1]:,.0f}) |"
        )
    return _REPORT.format(
        model=arguments.model.name,
        pixels=arguments.pixels,
        tokens=samples[PLAIN][0].prompt_tokens,
        cpus=len(os.sched_getaffinity(0)),
        rows="\n".join(rows),
        count=len(pairs),
        ratio=ratio,
        wanted=WANTED,
        reached="met" if ratio <= WANTED else "missed",
        equal=equal,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--model", type=Path, default=Path("models/bench-qwen2-vl"))
    parser.add_argument("--pixels", type=int, default=1_024, help="of a side")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        samples = asyncio.run(measure(arguments, Path(folder)))
    text = report(arguments, samples)
    print(text)
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "images.md").write_text(text)


if __name__ == "__main__":
    main()
