"""Workers that are data-parallel ranks, and a job: answers of vLLM alone.

    python -m tests.vllm.data_parallel FLAGS

starts a worker in which vLLM's rotation is mended. HEADRACE_TEST_PROGRAM is the worker's module.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from headrace_cli.up.supervisor import ChildProcess, Spawn
from headrace_cli.up.topology import ProcessSpec
from tests.ports import free_port
from tests.vllm.hybrids import mend_rotation

_PROGRAM: Final = "HEADRACE_TEST_PROGRAM"
# vLLM's choice on processors with AMX has bfloat16 only.
MLA: Final = {"attention_backend": "CPU_MLA"}


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


@dataclass(frozen=True, slots=True)
class Tokens:
    """The answer to each prompt."""

    tokens: list[list[int]]


async def alone(
    model: str, prompts: list[list[int]], max_tokens: list[int], engine: dict[str, Any]
) -> Tokens:
    """Greedy answers of one engine, one at a time. `engine`: further arguments of vLLM."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams

    mend_rotation()
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=1024,
        enforce_eager=True,
        dtype="float32",
        **engine,
    )
    found = []
    for prompt, count in zip(prompts, max_tokens, strict=True):
        sampling = SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        (output,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        found.append(list(output.outputs[0].token_ids))
    return Tokens(found)


if __name__ == "__main__":
    mend_rotation()
    runpy.run_module(os.environ[_PROGRAM], run_name="__main__", alter_sys=True)
