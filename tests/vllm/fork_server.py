"""Jobs with engines of their own, each in a process forked from one that has imported vLLM already.

So a job waits for engines to load, not for vLLM's import, and neither forks nor gRPC of one job meet those of another.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace_engine.vllm.compat import import_vllm, set_vllm_environment

log = logging.getLogger(__name__)


class ForkServer:
    """The process that jobs are forked from; started by the first."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, job: str, **arguments: object) -> dict[str, Any]:
        """What `job`, named "module:function", returned: a dataclass, as JSON. Fails with the job's own traceback."""
        answer = ""
        try:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            print(json.dumps({"job": job, "arguments": arguments}), file=process.stdin, flush=True)
            answer = process.stdout.readline()
        finally:
            # Also when the test ran out of time.
            if not answer:
                self.close()
        assert answer, "the process that jobs are forked from has ended"
        said: dict[str, Any] = json.loads(answer)
        assert "failed" not in said, said["failed"]
        return said

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            paths = os.pathsep.join(path for path in sys.path if path)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.fork_server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": paths},
                start_new_session=True,
            )
        return self._process

    def close(self) -> None:
        """Ends it and the job that runs, and with that its engines."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        process.wait()


def _work(job: str, arguments: dict[str, Any], answer: Path) -> None:
    """In the forked process."""
    module, _, name = job.partition(":")
    said: dict[str, Any] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function = getattr(importlib.import_module(module), name)
            said = asdict(asyncio.run(function(**arguments)))
    except Exception:
        log.exception("%s failed", job)
        said = {"failed": traceback.format_exc()}
    finally:
        answer.write_text(json.dumps(said or {"failed": "it was told to end"}))


def _serve(answers: int) -> None:
    set_vllm_environment(host="127.0.0.1", kv_cache_gib=1, tensor_parallel_size=1)
    import_vllm()
    with tempfile.TemporaryDirectory() as folder, os.fdopen(answers, "w") as pipe:
        answer = Path(folder) / "answer.json"
        for line in sys.stdin:
            answer.unlink(missing_ok=True)
            child = os.fork()
            if not child:
                _work(**json.loads(line), answer=answer)
                sys.stderr.flush()
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if not answer.exists():
                answer.write_text(json.dumps({"failed": f"it ended with status {status}"}))
            print(answer.read_text(), file=pipe, flush=True)


if __name__ == "__main__":
    # Whatever vLLM prints must not come between the answers.
    answers_fd = os.dup(1)
    os.dup2(2, 1)
    _serve(answers_fd)
