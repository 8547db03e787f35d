"""The goodput benchmark over OpenAI HTTP: any server that streams token ids, and vllm-router before `vllm serve`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench.goodput.load import Ask
from bench.goodput.report import Objective
from bench.support.vllm_child import vllm_environment
from headrace_common.errors import WorkerGone
from headrace_common.ports import free_port

_START_S: Final = 300.0
_STOP_S: Final = 20.0
_ROUTER: Final = "vllm-router"
MODEL: Final = "paced"


async def by_http(stack: AsyncExitStack, address: str, model: str, *, bounded: bool) -> Ask:
    """Sends completions to a server at host:port. `bounded`: with the bounds of each request, as ours take them."""
    session = await stack.enter_async_context(
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
    )

    async def ask(
        prompt: list[int], count: int, number: int, objective: Objective | None
    ) -> AsyncIterator[int]:
        del number
        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        if bounded and objective is not None:
            body["ttft_target_s"] = 1e-3 * objective.ttft_ms
            body["tpot_target_s"] = 1e-3 * objective.tpot_ms
        async with session.post(f"http://{address}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise WorkerGone(f"status {answer.status}: {(await answer.text())[:200]}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    now_ns = time.time_ns()
                    for choice in json.loads(line[6:])["choices"]:
                        for _ in choice.get("token_ids") or ():
                            yield now_ns

    return ask


async def start_router(
    stack: AsyncExitStack, policy: str, engines: int, arguments: Mapping[str, Any], folder: Path
) -> Ask:
    """Starts `vllm serve` for each engine, and vllm-router with a policy of its own or "default" before them."""
    ports = [free_port() for _ in range(engines)]
    common = [
        # Not `vllm serve`, which needs a distribution of the name vllm.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"),
        *("--model", str(arguments["model"]), "--served-model-name", MODEL),
        *("--no-enable-log-requests", "--disable-uvicorn-access-log", "--disable-log-stats"),
        *("--dtype", str(arguments["dtype"]), "--enforce-eager"),
        *("--max-num-seqs", str(arguments["max_num_seqs"])),
        *("--max-num-batched-tokens", str(arguments["max_num_batched_tokens"])),
        *("--max-model-len", str(arguments["max_model_len"])),
        *("--num-gpu-blocks-override", str(arguments["num_gpu_blocks_override"])),
    ]
    servers = [
        await stack.enter_async_context(
            _process([*common, "--port", str(port)], folder / f"serve-{port}.log")
        )
        for port in ports
    ]
    async with aiohttp.ClientSession() as session:
        for port, server in zip(ports, servers, strict=True):
            await _ready(session, f"http://127.0.0.1:{port}/health", server)
        port = free_port()
        urls = [f"http://127.0.0.1:{one}" for one in ports]
        command = [
            *(shutil.which(_ROUTER) or _ROUTER, "--worker-urls", *urls),
            *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())),
            *(() if policy == "default" else ("--policy", policy)),
        ]
        router = await stack.enter_async_context(_process(command, folder / "router.log"))
        await _ready(session, f"http://127.0.0.1:{port}/health", router)
    return await by_http(stack, f"127.0.0.1:{port}", MODEL, bounded=False)


async def _ready(
    session: aiohttp.ClientSession, url: str, process: asyncio.subprocess.Process
) -> None:
    """Waits until the process is healthy. Raises WorkerGone when it ends instead."""
    async with asyncio.timeout(_START_S):
        while True:
            if process.returncode is not None:
                raise WorkerGone(f"{url}: the process ended with {process.returncode}")
            try:
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)


@asynccontextmanager
async def _process(command: list[str], log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A program that ends with the context. Its environment is that of engines beside ours."""
    environment = {**os.environ, **vllm_environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("wb") as written:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=written, stderr=written, env=environment
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()
