"""Workers with engines that compute a token alone as with others: see hybrids.mend_rotation.

    python -m tests.vllm.mended FLAGS

starts one. HEADRACE_TEST_PROGRAM is the worker's module.
"""

from __future__ import annotations

import os
import runpy
from dataclasses import replace
from typing import Final

from headrace_cli.up.supervisor import ChildProcess, Spawn
from headrace_cli.up.topology import ProcessSpec
from tests.vllm.hybrids import mend_rotation

_PROGRAM: Final = "HEADRACE_TEST_PROGRAM"


def mended(spawn: Spawn) -> Spawn:
    """A spawn that starts such workers."""

    async def start(spec: ProcessSpec) -> ChildProcess:
        program = f"headrace_{spec.service}"
        if spec.service in ("prefill", "decode", "worker"):
            arguments = tuple(__name__ if one == program else one for one in spec.arguments)
            environment = {**spec.environment, _PROGRAM: program}
            spec = replace(spec, arguments=arguments, environment=environment)
        return await spawn(spec)

    return start


if __name__ == "__main__":
    mend_rotation()
    runpy.run_module(os.environ[_PROGRAM], run_name="__main__", alter_sys=True)
