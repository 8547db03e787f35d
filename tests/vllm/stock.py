"""Stock vLLM servers with our connector in separate processes, and HTTP requests to them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.waiting import until

MODEL = Path("models/tiny-llama")
BLOCK_TOKENS = 32
PROXY = Path(__file__).parents[2] / "examples" / "pair.py"
START_TIMEOUT_S = 300.0
TIMEOUT_S = 60.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    # vLLM's ranks spin while they wait, which blocks other threads for seconds on two cores.
    "HEADRACE_PING_TIMEOUT_S": "20",
    "VLLM_SERVER_DEV_MODE": "1",  # serves /reset_prefix_cache
    "OMP_NUM_THREADS": "1",
}


def connector(role: str, pair_port: int, **settings: object) -> dict[str, Any]:
    """kv_transfer_config of a server that pairs at `pair_port`."""
    return {
        "kv_connector": "HeadraceConnector",
        "kv_connector_module_path": "headrace_engine.vllm.connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"listen": f"127.0.0.1:{pair_port}"} | settings,
    }


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP response, read to its end."""

    status: int
    body: dict[str, Any]

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens."""
        assert self.status == 200, self.body
        return [int(token) for token in self.body["choices"][0]["token_ids"]]

    @property
    def transfer(self) -> dict[str, Any]:
        """The connector's report of the transfer."""
        found = self.body.get("kv_transfer_params")
        assert isinstance(found, dict), self.body
        return found


async def call(
    port: int, method: str, path: str, body: dict[str, Any] | None = None
) -> tuple[int, bytes]:
    """Sends one HTTP request. Returns the status and the whole body. Cancelling closes the connection."""
    payload = json.dumps(body).encode() if body is not None else b""
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + payload)
        async with asyncio.timeout(TIMEOUT_S):
            answer = await reader.read()
    finally:
        writer.close()
    header, _, content = answer.partition(b"\r\n\r\n")
    return int(header.split(b" ", 2)[1]), content


async def complete(
    port: int, prompt: Sequence[int], params: dict[str, Any] | None = None, max_tokens: int = 8
) -> Reply:
    """Greedy tokens of a prompt of token ids."""
    status, content = await call(
        port, "POST", "/v1/completions", completion(prompt, params, max_tokens)
    )
    return Reply(status, json.loads(content))


@dataclass(slots=True)
class Server:
    """One api_server."""

    port: int
    pair_port: int
    log: Path
    process: asyncio.subprocess.Process | None = None

    async def generate(
        self, prompt: Sequence[int], params: dict[str, Any] | None = None, max_tokens: int = 8
    ) -> Reply:
        """Greedy tokens of a prompt of token ids."""
        return await complete(self.port, prompt, params, max_tokens)

    async def forget(self) -> None:
        """Empties the device's prefix cache, once no blocks are in use. Other tiers keep theirs."""

        async def is_idle() -> bool:
            return await self.metric("kv_cache_usage_perc") == 0.0

        await until(is_idle, TIMEOUT_S, interval_s=0.05)
        assert (await call(self.port, "POST", "/reset_prefix_cache"))[0] == 200

    async def metric(self, name: str) -> float:
        """The sum of a metric's samples. `name` is without "vllm:"."""
        _, content = await call(self.port, "GET", "/metrics")
        lines = content.decode().splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith((f"vllm:{name}{{", f"vllm:{name} "))
        )

    async def idle(self, timeout_s: float = 20.0) -> None:
        """Returns once nothing runs or waits, and all blocks are free."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        async with asyncio.timeout(timeout_s):
            while any([await self.metric(name) for name in names]):
                await asyncio.sleep(0.1)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signals the server and its engine."""
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def completion(
    prompt: Sequence[int], params: dict[str, Any] | None, max_tokens: int
) -> dict[str, Any]:
    """Body of a request to /v1/completions."""
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if params is not None:
        body["kv_transfer_params"] = params
    return body


def environment_of_tests() -> dict[str, str]:
    """The environment of processes that import the tests' modules."""
    return os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)}


@asynccontextmanager
async def pairing(folder: Path, prefill: Server, decode: Server) -> AsyncIterator[int]:
    """Runs examples/pair.py for two servers. Yields its port."""
    port = free_port()
    command = [sys.executable, str(PROXY), "--port", str(port)]
    command += ["--prefill", f"http://127.0.0.1:{prefill.port}"]
    command += ["--decode", f"http://127.0.0.1:{decode.port}"]
    command += ["--pair-address", f"127.0.0.1:{prefill.pair_port}"]
    command += ["--transfer-timeout", "20", "--timeout", "50"]
    with (folder / "pair.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=log, stderr=log, env=environment_of_tests()
        )
    try:

        async def is_ready() -> bool:
            assert process.returncode is None, (folder / "pair.log").read_text()
            return await answers(port)

        await until(is_ready, TIMEOUT_S, interval_s=0.05)
        yield port
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def answers(port: int) -> bool:
    """Whether a process listens on the port."""
    with suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        return True
    return False


@dataclass(frozen=True, slots=True)
class Wanted:
    """A server to start, without a connector when `transfer` is None."""

    name: str
    transfer: dict[str, Any] | None = None
    pair_port: int = 0
    rank_count: int = 1
    ahead: bool = False
    """Whether it plans each step while the one before it is computed."""


_DEBUG = {"VLLM_LOGGING_LEVEL": "DEBUG"}
# vLLM logs it where steps are planned ahead.
_AHEAD = "Batch queue is enabled with size 2"


@asynccontextmanager
async def serving(folder: Path, *wanted: Wanted) -> AsyncIterator[list[Server]]:
    """Starts servers side by side, and ends them."""
    servers: list[Server] = []
    try:
        for one in wanted:
            server = Server(free_port(), one.pair_port, folder / f"{one.name}.log")
            servers.append(server)
            with server.log.open("wb") as log:
                server.process = await asyncio.create_subprocess_exec(
                    *_command(server.port, one),
                    stdout=log,
                    stderr=log,
                    env=environment_of_tests() | (_DEBUG if one.ahead else {}),
                    start_new_session=True,
                )
        for server, one in zip(servers, wanted, strict=True):
            await _wait_ready(server)
            assert (_AHEAD in server.log.read_text(errors="replace")) == one.ahead
        yield servers
    finally:
        for server in servers:
            await _end(server)


def _command(port: int, wanted: Wanted) -> list[str]:
    module = "tests.vllm.ahead_server" if wanted.ahead else "vllm.entrypoints.openai.api_server"
    command = [sys.executable, "-m", module]
    command += ["--model", str(MODEL), "--served-model-name", "tiny", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", "128"]
    command += ["--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--max-model-len", "1024"]
    command += ["--enable-prompt-tokens-details"]
    command += ["--tensor-parallel-size", str(wanted.rank_count)]
    if wanted.transfer is not None:
        command += ["--kv-transfer-config", json.dumps(wanted.transfer)]
    return command


async def _wait_ready(server: Server) -> None:
    assert server.process is not None
    process = server.process

    async def is_ready() -> bool:
        assert process.returncode is None, server.log.read_text(errors="replace")[-4000:]
        return await answers(server.port)

    await until(is_ready, START_TIMEOUT_S, interval_s=0.2)


async def _end(server: Server) -> None:
    if server.process is None:
        return
    if server.process.returncode is None:
        with suppress(ProcessLookupError):
            server.process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(15):
                await server.process.wait()
    server.kill()
    await server.process.wait()
