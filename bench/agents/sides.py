"""Our router, Dynamo's frontend and vllm-router, each with workers that simulate an engine."""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.proxy import dynamo as chats
from bench.proxy.dynamo_scale import until_found
from bench.proxy.load import connected
from bench.proxy.workers import TOKENS
from bench.support.services import Services, until_listed
from headrace_common.ports import free_port

OURS: Final = "Headrace"
DYNAMO: Final = "Dynamo's frontend"
VLLM_ROUTER: Final = "vllm-router"
_GAP_MS: Final = 5
_DECODES: Final = 2
_BLOCKS: Final = 65_536
_BLOCK_TOKENS: Final = 32
_CONTEXT_TOKENS: Final = 262_144
_SIM: Final = (
    f"sim:vocabulary=49152,context={_CONTEXT_TOKENS},verify=off,decode_step_s={_GAP_MS / 1e3}"
)
_LIMIT_S: Final = 60.0
_DYNAMO_CACHE_BYTES: Final = 1 << 30
_ANSWER: Final = {
    "max_tokens": TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
}


@dataclass(frozen=True, slots=True)
class Side:
    """A server: its address, the process of which the CPU counts, and what its requests ask for."""

    name: str
    port: int
    pid: int
    wanted: dict[str, Any]


async def headrace(stack: AsyncExitStack, folder: Path, model: str) -> Side:
    """A registry, a router, a prefill and two decode workers."""
    door = free_port()
    services = Services(stack, folder)
    _, here = await services.start_registry()
    router, endpoint = await services.start_router(
        f"--registry={here}", f"--model=sim={model}", f"--http-listen=127.0.0.1:{door}"
    )
    for name in ("prefill-0", *(f"decode-{number}" for number in range(_DECODES))):
        await services.start(
            *(name.partition("-")[0], f"--worker-id={name}", f"--registry={here}"),
            *(f"--model={_SIM}", "--served-model=sim", "--internal-listen=127.0.0.1:0"),
            *(f"--num-gpu-blocks-override={_BLOCKS}", f"--block-size={_BLOCK_TOKENS}"),
            "--max-num-batched-tokens=16384",
            name=name,
        )
    await until_listed(endpoint, 1, _DECODES, _LIMIT_S)
    return Side(OURS, door, router.pid, {**_ANSWER, "include_latency": True})


async def dynamo(stack: AsyncExitStack, folder: Path, model: str, python: str) -> Side:
    """The frontend with its KV router and tokenizer cache, and as many mockers, with as much KV memory."""
    long = _with_long_context(folder / "model", Path(model))
    port, services = free_port(), Services(stack, folder)
    frontend, mocker = chats.dynamo_commands(
        *(folder, python, chats.write_step_times(folder, _GAP_MS), port, ""),
        *("DYN_TOKENIZER_CACHE=1", f"DYN_TOKENIZER_CACHE_BYTES={_DYNAMO_CACHE_BYTES}"),
    )
    router = await services.run(*frontend, name="frontend", port=port)
    roles = [("prefill", "--bootstrap-ports", str(free_port())), *[("decode",)] * _DECODES]
    for number, role in enumerate(roles):
        await services.run(
            *(*mocker, *role, "--model-path", str(long), "--block-size", str(_BLOCK_TOKENS)),
            *("--num-gpu-blocks-override", str(_BLOCKS), "--max-num-batched-tokens", "16384"),
            name=f"mocker{number}",
        )
    await until_found(port, Counter(prefill=1, backend=_DECODES))
    await chats.until_answering(
        chats.Side(
            *(DYNAMO, lambda n, made: connected(port, n, lambda: made.next_post("sim"))),
            *(router.pid, ()),
        )
    )
    # With the share of the prompt that its router knows to be cached: mockers do not report it.
    return Side(DYNAMO, port, router.pid, {**_ANSWER, "nvext": {"extra_fields": ["timing"]}})


async def vllm_router(stack: AsyncExitStack, folder: Path, command: str) -> Side:
    """vllm-router with consistent hashing, and two workers that send words without reading the prompt."""
    port, services = free_port(), Services(stack, folder, suffix="-mock")
    # The workers' other protocol needs a registry.
    _, here = await services.start_registry()
    doors = [free_port() for _ in range(_DECODES)]
    for door in doors:
        await services.run(
            *(sys.executable, "-m", "bench.proxy.workers", here, str(door)),
            name=f"worker-{door}",
            port=door,
        )
    router = await services.run(
        *(command, "--host", "127.0.0.1", "--port", str(port), "--policy", "consistent_hash"),
        *("--worker-urls", *(f"http://127.0.0.1:{door}" for door in doors)),
        *("--prometheus-port", str(free_port()), "--log-level", "warning"),
        name="vllm-router",
        port=port,
    )
    return Side(VLLM_ROUTER, port, router.pid, {"max_tokens": TOKENS + _GAP_MS})


def _with_long_context(folder: Path, model: Path) -> Path:
    """The model's tokenizer and configuration, with a context for long conversations."""
    folder.mkdir()
    for path in model.glob("*.json"):
        content = json.loads(path.read_text())
        for name in ("max_position_embeddings", "model_max_length"):
            if name in content:
                content[name] = _CONTEXT_TOKENS
        (folder / path.name).write_text(json.dumps(content))
    return folder
