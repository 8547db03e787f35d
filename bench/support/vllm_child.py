"""A vLLM engine alone in a process with a protocol of JSON lines, and the client of that protocol.

    python -m bench.support.vllm_child '{"model": ..., other arguments of vLLM's AsyncEngineArgs}'

Without HTTP and tokenizer, so that comparisons are with the engine itself.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

TIMES_VARIABLE: Final = "BENCH_TRANSFER_TIMES"
# Settings of glibc that our engines apply to themselves. Without them, a prompt costs some 200,000 page faults.
_KEEP_MEMORY: Final = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_MAX_": "0"}
_START_S: Final = 300.0
_STOP_S: Final = 20.0
_LINE_BYTES_MAX: Final = 1 << 22


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that came together: when the engine's process had them, and when this process did.

    The last one has the `params` that the engine's connector returns. `cached_tokens`: of the prompt, not computed.
    """

    token_ids: tuple[int, ...]
    made_unix_ns: int
    heard_unix_ns: int
    params: Mapping[str, Any] | None = None
    cached_tokens: int = 0


class Child:
    """The parent's end of one engine."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._numbers = itertools.count(1)
        self._answers: dict[str, asyncio.Queue[dict[str, Any]]] = {}
        self.ready = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def generate(
        self, token_ids: Sequence[int], count: int, params: Mapping[str, Any] | None = None
    ) -> AsyncIterator[Piece]:
        """Sends a greedy request for `count` tokens. Closing the generator early cancels the request."""
        name = f"request-{next(self._numbers)}"
        replies = self._answers[name] = asyncio.Queue()
        self._send_command(
            op="generate", id=name, token_ids=list(token_ids), count=count, params=params
        )
        ended = False
        try:
            while not ended:
                reply = await replies.get()
                if "error" in reply:
                    raise RuntimeError(reply["error"])
                ended = reply["ended"]
                if reply["token_ids"]:
                    yield Piece(
                        *(tuple(reply["token_ids"]), reply["unix_ns"], time.time_ns()),
                        *(reply["params"], reply["cached_tokens"]),
                    )
        finally:
            del self._answers[name]
            if not ended:
                self._send_command(op="abort", id=name)

    def _send_command(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps(command) + "\n").encode())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            reply = json.loads(line)
            if "ready" in reply:
                self.ready.set()
            elif reply["id"] in self._answers:
                self._answers[reply["id"]].put_nowait(reply)
        for answers in self._answers.values():
            answers.put_nowait({"error": "the engine's process has ended; its log says why"})

    async def close(self) -> None:
        """Ends the engine and its child processes."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), _STOP_S)
        except TimeoutError:
            os.killpg(self.process.pid, 9)
            await self.process.wait()
        await self._reading


@asynccontextmanager
async def engine(
    arguments: Mapping[str, Any],
    log: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    *,
    keep_memory: bool = True,
) -> AsyncIterator[Child]:
    """Starts an engine. It may still be loading: wait for `loaded`.

    With `keep_memory`, glibc keeps freed memory there, as in our engines.
    """
    with log.open("wb") as written:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "bench.support.vllm_child", json.dumps(arguments)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=written,
            env={**os.environ, **vllm_environment(keep_memory=keep_memory), **environment},
            limit=_LINE_BYTES_MAX,
            start_new_session=True,
        )
    child = Child(process)
    try:
        yield child
    finally:
        await child.close()


async def loaded(*children: Child) -> None:
    """Returns once all can serve. Raises RuntimeError when one ends instead."""
    async with asyncio.timeout(_START_S):
        for child in children:
            ready = asyncio.create_task(child.ready.wait())
            ended = asyncio.create_task(child.process.wait())
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            for task in (ready, ended):
                task.cancel()
            if not child.ready.is_set():
                raise RuntimeError("an engine's process ended while loading; its log says why")


def vllm_environment(*, keep_memory: bool = True) -> dict[str, str]:
    """Environment as Headrace's workers set it, with one thread each. `keep_memory`: glibc keeps freed memory."""
    return {
        **(_KEEP_MEMORY if keep_memory else {}),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }


async def _serve(arguments: dict[str, Any], answers: int) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    running: dict[str, asyncio.Task[None]] = {}

    def send_reply(**reply: Any) -> None:
        os.write(answers, (json.dumps(reply) + "\n").encode())

    async def answer(asked: dict[str, Any]) -> None:
        name = asked["id"]
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=asked["count"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_transfer_params": asked["params"]} if asked["params"] else None,
        )
        prompt = {"prompt_token_ids": asked["token_ids"]}
        try:
            async for output in llm.generate(prompt, sampling, name):
                token_ids = list(output.outputs[0].token_ids)
                send_reply(
                    id=name,
                    token_ids=token_ids,
                    unix_ns=time.time_ns(),
                    ended=output.finished,
                    params=output.kv_transfer_params,
                    cached_tokens=output.num_cached_tokens or 0,
                )
        except Exception as error:  # noqa: BLE001
            # The client receives any error.
            send_reply(id=name, error=f"{type(error).__name__}: {error}")

    def ended(name: str, _: asyncio.Task[None]) -> None:
        running.pop(name, None)

    reader = asyncio.StreamReader(limit=_LINE_BYTES_MAX)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    send_reply(ready=True)
    async for line in reader:
        asked = json.loads(line)
        if asked["op"] == "generate":
            task = running[asked["id"]] = asyncio.create_task(answer(asked))
            task.add_done_callback(partial(ended, asked["id"]))
        elif asked["id"] in running:
            running[asked["id"]].cancel()
    for task in list(running.values()):
        task.cancel()
    llm.shutdown()


if __name__ == "__main__":
    # The output of vLLM must not mix with the answers.
    answers_fd = os.dup(1)
    os.dup2(2, 1)
    asyncio.run(_serve(json.loads(sys.argv[1]), answers_fd))
