"""Runs jobs that need engines of their own, each in a process that the suite's fork server forks.

The fork server has imported vLLM already, so a job only waits for its engines to load. A process of its own keeps the
forks and the gRPC of one job apart from those of the tests.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace_cli.up.topology import ProcessSpec
from tests.fork_server import TORCHVISION_PATH, forking

LOG_CHARACTERS_MAX = 8000


def run_job(job: str, **arguments: object) -> dict[str, Any]:
    """Calls the coroutine function `job`, named "module:function", and returns its dataclass as from JSON.

    Fails with the end of the job's log, which has its traceback.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-job-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        command = (sys.executable, "-m", __name__, job, json.dumps(arguments), str(result))
        # vLLM inspects models in processes of their own.
        paths = filter(None, (*TORCHVISION_PATH, os.environ.get("PYTHONPATH")))
        environment = {"PYTHONPATH": os.pathsep.join(paths)}
        spec = ProcessSpec("job", "vllm", command, Path(folder, "port"), log, environment)
        status = asyncio.run(_run(spec))
        assert status == 0, f"{job}: {log.read_text(errors='replace')[-LOG_CHARACTERS_MAX:]}"
        values: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return values


async def _run(spec: ProcessSpec) -> int:
    async with forking("vllm") as spawn:
        return await (await spawn(spec)).wait()


def main() -> None:
    """In the job's process. The arguments are the job, its arguments as JSON, and the file for its result."""
    job, arguments, result = sys.argv[1:]
    module, _, name = job.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function = getattr(importlib.import_module(module), name)
        values = asdict(asyncio.run(function(**json.loads(arguments))))
    Path(result).write_text(json.dumps(values), encoding="utf-8")


if __name__ == "__main__":
    main()
