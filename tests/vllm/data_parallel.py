"""Workers that are data-parallel ranks.

    python -m tests.vllm.data_parallel FLAGS

starts a worker in which vLLM's rotation is mended. HEADRACE_TEST_PROGRAM is the worker's module.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from headrace_cli.up.supervisor import ChildProcess, Spawn
from headrace_cli.up.topology import ProcessSpec
from tests.ports import free_port
from tests.vllm.hybrids import mend_rotation

_PROGRAM: Final = "HEADRACE_TEST_PROGRAM"


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
    ports = {service: free_ports() for service in more}

    async def start(spec: ProcessSpec) -> ChildProcess:
        if spec.service not in more:
            return await spawn(spec)
        program, number = f"headrace_{spec.service}", spec.name.rpartition("-")[2]
        engine_args = f"--data-parallel-size 2 --data-parallel-rank {number}"
        engine_args += f" --data-parallel-rpc-port {ports[spec.service]} {more[spec.service]}"
        visible = {"CUDA_VISIBLE_DEVICES": devices[int(number)]} if devices else {}
        arguments = [
            "tests.vllm.data_parallel" if one == program else one for one in spec.arguments
        ]
        return await spawn(
            replace(
                spec,
                arguments=(*arguments, f"--engine-args={engine_args}"),
                environment={**spec.environment, **visible, _PROGRAM: program},
            )
        )

    return start


if __name__ == "__main__":
    mend_rotation()
    runpy.run_module(os.environ[_PROGRAM], run_name="__main__", alter_sys=True)
