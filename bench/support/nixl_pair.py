"""Two engines paired by vLLM's own NixlConnector, with its mode `bidirectional_kv_xfer` or without.

In this mode, decode keeps a request's blocks for a while, and its answer has parameters. With them, prefill reads the
blocks on the next turn. A client passes parameters on: to prefill, then to decode, as vLLM's examples do.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.support.vllm_child import Child, engine
from bench.support.vllm_ways import REQUEST_S, engine_arguments
from headrace_common.ports import free_port

READS_VARIABLE: Final = "BENCH_NIXL_READS"
# NIXL's transport is UCX, which prefers the host's shared memory.
TCP_ONLY: Final = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
ROLES: Final = ("kv_producer", "kv_consumer")
_FIRST_TURN: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True, slots=True)
class NixlAnswer:
    """One turn. `read_bytes`: what prefill read from decode. `params`: with these, it reads on the next turn."""

    ttft_s: float
    token_ids: tuple[int, ...]
    read_bytes: int
    params: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class NixlPair:
    """Both engines. `reads`: the file with prefill's reads."""

    prefill: Child
    decode: Child
    reads: Path

    async def answer(
        self, prompt: list[int], count: int, earlier: Mapping[str, Any] | None
    ) -> NixlAnswer:
        """Prefills on one engine and decodes on the other. `earlier`: the parameters of the turn before."""
        before = self._read_bytes()
        token_ids: list[int] = []
        ttft_s = 0.0
        start_s = time.monotonic()
        async with asyncio.timeout(REQUEST_S):
            params: Mapping[str, Any] | None = earlier or _FIRST_TURN
            async for piece in self.prefill.generate(prompt, 1, params):
                params = piece.params
            async for piece in self.decode.generate(prompt, count, params):
                ttft_s = ttft_s or time.monotonic() - start_s
                token_ids += piece.token_ids
                params = piece.params
        return NixlAnswer(ttft_s, tuple(token_ids), self._read_bytes() - before, params)

    def stop(self) -> None:
        """Stops the processes until `running`. Decode's engine polls as long as it keeps blocks."""
        self._signal(signal.SIGSTOP)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Lets the stopped processes run."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.stop()

    def _signal(self, number: int) -> None:
        for child in (self.prefill, self.decode):
            os.killpg(child.process.pid, number)

    def _read_bytes(self) -> int:
        return sum(sum(json.loads(line)) for line in self.reads.read_text().splitlines())


@asynccontextmanager
async def nixl_pair(
    model: Path,
    dtype: str,
    *,
    block_count: int,
    block_tokens: int,
    min_tokens: int | None,
    packages: Path,
    folder: Path,
) -> AsyncIterator[NixlPair]:
    """Starts both. They may still be loading. `packages`: a folder with the Python package of NIXL, absolute.

    `min_tokens`: prefill computes fewer tokens than that. None is the mode without reads by prefill.
    """
    more = {} if min_tokens is None else {"kv_recompute_threshold": min_tokens}
    extra = {"bidirectional_kv_xfer": min_tokens is not None, **more}
    async with AsyncExitStack() as stack:
        children: list[Child] = []
        reads: list[Path] = []
        for role in ROLES:
            arguments = engine_arguments(
                model,
                dtype,
                block_count * block_tokens,
                kv_transfer_config={
                    "kv_connector": "NixlConnector",
                    "kv_connector_module_path": "bench.support.nixl_peer",
                    "kv_role": role,
                    "kv_connector_extra_config": extra,
                    "kv_buffer_device": "cpu",
                },
                num_gpu_blocks_override=block_count,
                block_size=block_tokens,
            )
            reads.append(folder / f"{role}.reads")
            reads[-1].touch()
            environment = {
                **TCP_ONLY,
                "PYTHONPATH": str(packages),
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                READS_VARIABLE: str(reads[-1]),
            }
            log = folder / f"{role}.log"
            children.append(await stack.enter_async_context(engine(arguments, log, environment)))
        try:
            yield NixlPair(children[0], children[1], reads[0])
        finally:
            # A stopped process ends by this signal only.
            for child in children:
                if child.process.returncode is None:
                    os.killpg(child.process.pid, signal.SIGKILL)
