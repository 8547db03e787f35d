"""A job: a pair of engines, one of which has its ranks on two hosts. The other host is a network namespace."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from headrace_common.errors import HeadraceError
from headrace_engine.vllm.engine import VllmEngine
from headrace_kv.transport.base import find_host
from tests.ports import free_port
from tests.security.other_host import HERE, OtherHost
from tests.vllm.pair import prompt_of, running_pair
from tests.vllm.tensor_parallel import SAMPLING
from tests.waiting import until

PROMPTS: Final = (prompt_of(40), prompt_of(161, 1), prompt_of(300, 2))
_CLONE_NEWNET: Final = 0x40000000
_ENDED_S: Final = 40.0


@dataclass(slots=True)
class Ended:
    """`plain`: tokens of the decode engine alone, `split`: of both. The rest is what a killed process has left.

    `communicators`: what each rank of the engine on two hosts reduces with.
    """

    plain: list[list[int]] = field(default_factory=list)
    split: list[list[int]] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    communicators: list[str] = field(default_factory=list)
    request_error: str = ""
    engine_error: str = ""
    ended_s: float = 0.0
    node_status: int = 0
    node_log: str = ""
    left: list[str] = field(default_factory=list)


def communicator(worker: Any) -> str:
    """Runs in a rank."""
    from vllm.distributed.parallel_state import get_tp_group

    return str(get_tp_group().device_communicator.dist_module.__name__)


async def measure(model: str, role: str, kill: str) -> Ended:
    """`role` has two hosts. `kill`: "other host" kills the process there, "engine" the process that schedules here."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    found = Ended()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    with closing(OtherHost()) as other, other_node(other, model, role) as (node, log, changes):
        try:
            async with running_pair(digests="sums", **changes) as pair:
                engine: VllmEngine = getattr(pair, role)
                found.hosts = [find_host(one.session) for one in engine.descriptor.ranks]
                assert engine._llm is not None
                found.communicators = await engine._llm.collective_rpc(communicator)
                for prompt in PROMPTS:
                    found.plain.append((await pair.plain(prompt, SAMPLING)).token_ids)
                await pair.reset()
                for prompt in PROMPTS:
                    found.split.append((await pair.split(prompt, SAMPLING)).token_ids)
                await pair.reset()
                scheduler = engine._llm.engine_core.resources.engine_manager.processes[0].pid
                os.kill(node.pid if kill == "other host" else scheduler, signal.SIGKILL)
                start_s = time.monotonic()
                try:
                    await pair.split(PROMPTS[0], SAMPLING)
                except HeadraceError as error:
                    found.request_error = error.detail
                await asyncio.wait_for(stopped.wait(), _ENDED_S)
                found.ended_s = time.monotonic() - start_s
        except HeadraceError as error:
            found.engine_error = error.detail
        found.node_status = await asyncio.to_thread(node.wait, _ENDED_S)
        found.node_log = log.read_text(errors="replace")
        with suppress(TimeoutError):
            await until(lambda: not left(other), _ENDED_S)
        found.left = left(other)
    return found


@contextmanager
def other_node(
    other: OtherHost, model: str, role: str
) -> Iterator[tuple[subprocess.Popen[bytes], Path, dict[str, dict[str, object]]]]:
    """The command of the role on the other host, its log, and the settings of both engines on this one."""
    port = free_port()
    engine_args = f"--nnodes 2 --master-addr {HERE} --master-port {port} --node-rank"
    settings = {"tensor_parallel_size": 2, "max_num_batched_tokens": 256}
    same = {
        "dtype": "float32",
        "num_gpu_blocks_override": 2304,
        "block_size": 32,
        "max_num_seqs": 8,
    }
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**settings, **same}.items()]
    # The flags of a worker that admits no host have the transport closed.
    flags += [
        f"--model={model}",
        "--insecure=true",
        "--transfer-peer-networks=10.77.0.0/16",
        "--log-level=info",
    ]
    command = [
        *("nsenter", f"--net=/proc/{other.pid}/ns/net", sys.executable, "-m", f"headrace_{role}"),
        *("--worker-id=other", f"--internal-listen={other.address}:7000", *flags),
        f"--engine-args={engine_args} 1",
    ]
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    with tempfile.NamedTemporaryFile() as output:
        log = Path(output.name)
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": other.peer_interface}
        node = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        os.environ["GLOO_SOCKET_IFNAME"] = "local0"
        more = {"prefill": {}, "decode": {}, role: {**settings, "engine_args": f"{engine_args} 0"}}
        try:
            yield (
                node,
                log,
                {one: {"model": model, "host": HERE, **same, **more[one]} for one in more},
            )
        finally:
            node.kill()
            node.wait()


def left(other: OtherHost) -> list[str]:
    """The processes of the other host but its first, and the children of this one that are none of it."""
    net = Path(f"/proc/{other.pid}/ns/net").readlink()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            name = (folder / "comm").read_text().strip()
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            is_there = (folder / "ns" / "net").readlink() == net
            if int(folder.name) != other.pid and (is_there or parent == os.getpid()):
                found.append(name)
    return found
