"""Bounds what a constraint may cost before the engine gets it, and how often a tenant has one compiled."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from subprocess import PIPE, Popen
from typing import Final, TypeAlias

from headrace_common.callers.bounds import FewEach
from headrace_common.errors import DecodeFull, InvalidRequest
from headrace_common.tasks import Recent
from headrace_engine.interface import StructuredOutputs
from headrace_text.constraints import closed_schema

log = logging.getLogger(__name__)

MEMORY_BYTES: Final = 512 * 1024 * 1024
"""Most memory that compiling one constraint may take."""
_MODULE: Final = "headrace_engine.vllm.service.constraint_compiler"
CONSTRAINT_CPU_S: Final = 0.5
# A process of low priority may wait for a processor this many times as long as it computes.
_WAIT_SHARE: Final = 20
# Tenants that have constraints compiled at the same time. The kernel shares the processors between them.
_PROCESSES_MAX: Final = 4
_KNOWN_MAX: Final = 1_024
_TENANTS_MAX: Final = 4_096
# Compiling what costs less than this delays no other constraint noticeably.
_CHEAP_S: Final = 0.02

_Key: TypeAlias = tuple[str, StructuredOutputs]
Process: TypeAlias = Popen[bytes]


class _CompilerEnded(Exception):
    """The process that compiles has ended."""


class ConstraintCheck:
    """Compiles each new constraint of a tenant once, in a process with bounds, before the engine compiles it.

    A tenant has one constraint compiled at a time. After a costly one its next waits for as long as that took, since
    the engine compiles them one after another. Results are known by tenant, so no tenant finds out what others use.
    """

    def __init__(self, cpu_s: float = CONSTRAINT_CPU_S) -> None:
        """`cpu_s` bounds the processor time of one constraint."""
        self._cpu_s = cpu_s
        self._known: Recent[_Key, float | str] = Recent(_KNOWN_MAX)
        """Seconds that it took, or which bound it exceeded."""
        self._turns = FewEach()
        self._ready_s: Recent[str, float] = Recent(_TENANTS_MAX)
        """When a tenant may have its next constraint compiled, by the event loop's clock."""
        self._places = asyncio.Semaphore(_PROCESSES_MAX)
        self._idle: list[Process] = []
        self._threads = ThreadPoolExecutor(_PROCESSES_MAX, thread_name_prefix="constraints")

    async def check(self, outputs: StructuredOutputs, tenant: str) -> None:
        """Returns when the engine may compile the constraint. Raises InvalidRequest for one beyond the bounds.

        Raises DecodeFull when the processors are so busy that it was not compiled.
        """
        if outputs.kind == "json_object":
            return
        loop = asyncio.get_running_loop()
        async with self._turns.of(tenant):
            await asyncio.sleep(max(0.0, self._ready_s.get(tenant, 0.0) - loop.time()))
            found = self._known.get((tenant, outputs))
            if found is None:
                found = await self._compile(outputs)
                self._known[tenant, outputs] = found
            if isinstance(found, str):
                raise InvalidRequest({_path(outputs): self._remedy(found)})
            if found > _CHEAP_S:
                self._ready_s[tenant] = loop.time() + found

    def close(self) -> None:
        """Ends the processes. No check is under way."""
        while self._idle:
            _end(self._idle.pop())
        self._threads.shutdown(wait=False)

    async def _compile(self, outputs: StructuredOutputs) -> float | str:
        """Seconds of processor time, or which bound was exceeded."""
        line = json.dumps({"kind": outputs.kind, "spec": _spec(outputs)}).encode() + b"\n"
        async with self._places:
            try:
                async with asyncio.timeout(_WAIT_SHARE * self._cpu_s):
                    answer = await self._answer(line)
            except (TimeoutError, _CompilerEnded) as error:
                raise DecodeFull(
                    "the decode worker is too busy to compile a constraint; retry later",
                    retry_after_s=1.0,
                ) from error
        with suppress(ValueError):
            return float(answer)
        return answer

    async def _answer(self, line: bytes) -> str:
        """The answer to a line. Raises _CompilerEnded when a new process has ended too."""
        loop = asyncio.get_running_loop()
        while True:
            idle = bool(self._idle)
            process = self._idle.pop() if idle else _start(self._cpu_s)
            try:
                answer = await loop.run_in_executor(self._threads, _ask, process, line)
            except BaseException as error:
                # Its answer would be taken for that of the next constraint.
                _end(process)
                if not idle or not isinstance(error, _CompilerEnded):
                    raise
                log.warning("a compiler of constraints has ended with %s", process.returncode)
            else:
                self._idle.append(process)
                return answer

    def _remedy(self, bound: str) -> str:
        if bound == "memory":
            return f"takes more than {MEMORY_BYTES >> 20} MiB of memory to compile; simplify it"
        return f"takes more than {self._cpu_s:g} s to compile; simplify it"


def _start(cpu_s: float) -> Process:
    # Not by the event loop: uvloop forks, which is unsafe beside gRPC's threads. This does not copy the process.
    return Popen(
        [sys.executable, "-m", _MODULE, str(cpu_s), str(MEMORY_BYTES)],
        stdin=PIPE,
        stdout=PIPE,
        start_new_session=True,
    )


def _ask(process: Process, line: bytes) -> str:
    """Blocks until the answer. Raises _CompilerEnded."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
        answer = process.stdout.readline()
    except OSError as error:
        raise _CompilerEnded from error
    if not answer:
        raise _CompilerEnded
    return answer.decode().strip()


def _end(process: Process) -> None:
    """Ends the process and what it compiles, and with them the wait of a thread for the answer."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()


def _path(outputs: StructuredOutputs) -> str:
    return f"sampling.structured_outputs.{outputs.kind}"


def _spec(outputs: StructuredOutputs) -> str:
    """What vLLM's backend gets."""
    if outputs.kind == "choice":
        return json.dumps(outputs.choices)
    return closed_schema(outputs.text) if outputs.kind == "json" else outputs.text
