"""Workers that are data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace_cli.up.supervisor import ChildProcess, Spawn
from headrace_cli.up.topology import ProcessSpec
from tests.ports import free_port
from tests.vllm.mended import mended


def free_ports() -> int:
    """The first of two free ports in a row."""
    port = free_port()
    while (following := free_port()) != port + 1:
        port = following
    return port


def as_ranks(spawn: Spawn, more: dict[str, str], devices: Sequence[str] = ()) -> Spawn:
    """A spawn that starts the workers of each service in `more` as ranks of one group, by their numbers.

    `more`: further engine_args of a service. `devices`: GPUs of the ranks.
    """
    ports, spawn = {service: free_ports() for service in more}, mended(spawn)

    async def start(spec: ProcessSpec) -> ChildProcess:
        if spec.service not in more:
            return await spawn(spec)
        number = spec.name.rpartition("-")[2]
        engine_args = f"--data-parallel-size 2 --data-parallel-rank {number}"
        engine_args += f" --data-parallel-rpc-port {ports[spec.service]} {more[spec.service]}"
        visible = {"CUDA_VISIBLE_DEVICES": devices[int(number)]} if devices else {}
        return await spawn(
            replace(
                spec,
                arguments=(*spec.arguments, f"--engine-args={engine_args}"),
                environment={**spec.environment, **visible},
            )
        )

    return start
