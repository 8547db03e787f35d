"""vLLM's server with asynchronous scheduling, which vLLM turns off on processors, and wrong reports of its ranks."""

from __future__ import annotations

import os
import runpy
from typing import Any

from vllm.platforms.cpu import CpuPlatform

from tests.vllm.wrong_reports import report_wrong_ids


def main() -> None:
    """As `python -m vllm.entrypoints.openai.api_server`."""
    check = CpuPlatform.check_and_update_config

    def check_and_plan_ahead(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True
        # Forked ranks have what this process has changed. On processors, vLLM would start new ones.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    report_wrong_ids()
    CpuPlatform.check_and_update_config = staticmethod(check_and_plan_ahead)
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
