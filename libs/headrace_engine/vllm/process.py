"""What a service process does to itself and to its engine processes around vLLM's start."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


def set_vllm_environment(*, host: str, kv_cache_gib: float, tensor_parallel_size: int) -> None:
    """Sets the variables that vLLM reads when it is imported. What the user has set of the threads stays."""
    cores = len(os.sched_getaffinity(0))
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_HOST_IP=host if tensor_parallel_size > 1 else "127.0.0.1",
        VLLM_CPU_KVCACHE_SPACE=str(max(1, round(kv_cache_gib))),
        # Several engines on one machine would otherwise all be pinned to the same cores.
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        # Keeps a single rank inside the engine's own process.
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        # The sampler compiles itself on first use of logprobs, eager or not: half a minute for one request.
        TORCH_COMPILE_DISABLE="1",
    )
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(level)
    # Prefill and decode often share a machine, and OpenMP's threads spin: half of the cores at most.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // (2 * tensor_parallel_size))))


def fork_engine_processes() -> None:
    """Makes vLLM fork what it starts next."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


@dataclass(slots=True)
class _Starting:
    parent: int = 0


_starting = _Starting()


@contextmanager
def engine_children() -> Iterator[None]:
    """Processes forked inside belong to this one: they die with it, and hear none of its terminal's signals."""
    _register_once()
    _starting.parent = os.getpid()
    try:
        yield
    finally:
        _starting.parent = 0


_registered: list[bool] = []


def _register_once() -> None:
    if not _registered:
        os.register_at_fork(after_in_child=_become_engine)
        _registered.append(True)


def _become_engine() -> None:
    parent = _starting.parent
    if not parent:
        return
    # An engine forks its ranks itself, and they belong to it.
    _starting.parent = os.getpid()
    os.setsid()
    # The parent's event loop must not wake for the child's signals.
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != parent:
        os._exit(1)
