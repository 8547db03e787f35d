"""Engines of vLLM that keep KV in main memory and on a disk without our code: vLLM's own offloading, and LMCache."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.support.vllm_child import Child, engine, vllm_environment
from headrace_common.ports import free_port

OFFLOADING: Final = "vLLM's offloading"
LMCACHE: Final = "LMCache"
_STOP_S: Final = 10.0
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class TierPeer:
    """One engine. `name`: as rows of the tables have it."""

    name: str
    child: Child


@asynccontextmanager
async def offloading(
    arguments: Mapping[str, Any], host_bytes: int, folder: Path
) -> AsyncIterator[TierPeer]:
    """vLLM's OffloadingConnector with its tiers main memory and files. It may still be loading.

    `arguments`: of the engine. `folder` gets the files and the log.
    """
    extra = {
        "spec_name": "HostTieringSpec",
        "spec_module_path": "bench.tiers.vllm_offload",
        "cpu_bytes_to_use": host_bytes,
        "secondary_tiers": [{"type": "fs", "root_dir": str(folder / "offloaded")}],
    }
    with_tiers = {**arguments, **_transfer("OffloadingConnector", extra)}
    async with engine(with_tiers, folder / "offloading.log") as child:
        yield TierPeer(OFFLOADING, child)


@asynccontextmanager
async def lmcache(
    arguments: Mapping[str, Any], host_bytes: int, folder: Path, *, packages: Path
) -> AsyncIterator[TierPeer]:
    """LMCache's server with main memory and files, and an engine with its connector, which may still be loading.

    On CPUs, both exchange KV through shared memory. Chunks are blocks. `host_bytes`: of which it fills 0.6 to 0.8.
    `packages`: a folder with LMCache's package, absolute.
    """
    port = free_port()
    environment = {"PYTHONPATH": str(packages), "LMCACHE_TRACK_USAGE": "false"}
    command = (
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--chunk-size", str(arguments["block_size"])),
        *("--supported-transfer-mode", "engine_driven", "--shm-name", f"bench_tiers_{port}"),
        *("--no-l1-use-lazy", "--l1-size-gb", str(host_bytes / _GIB)),
        *("--eviction-policy", "LRU", "--disable-observability"),
        *("--l2-adapter", json.dumps({"type": "fs", "base_path": str(folder / "lmcache")})),
    )
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    module = "lmcache.integration.vllm.lmcache_mp_connector"
    with_tiers = {**arguments, **_transfer("LMCacheMPConnector", extra, module)}
    async with (
        _server(command, folder / "lmcache_server.log", environment),
        engine(with_tiers, folder / "lmcache.log", environment) as child,
    ):
        yield TierPeer(LMCACHE, child)


def _transfer(
    connector: str, extra: Mapping[str, Any], module: str | None = None
) -> dict[str, Any]:
    """vLLM's argument for a connector."""
    return {
        "kv_transfer_config": {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
            **({"kv_connector_module_path": module} if module else {}),
        }
    }


@asynccontextmanager
async def _server(
    command: tuple[str, ...], log: Path, environment: Mapping[str, str]
) -> AsyncIterator[None]:
    """LMCache's server. Engines wait for it."""
    with log.open("wb") as written:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lmcache.v1.multiprocess.server", *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=written,
            stderr=written,
            env={**os.environ, **vllm_environment(), **environment},
        )
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()
