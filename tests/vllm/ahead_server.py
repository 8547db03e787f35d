"""vLLM's server with asynchronous scheduling, which vLLM turns off on processors."""

from __future__ import annotations

import runpy
from typing import Any

from vllm.platforms.cpu import CpuPlatform


def main() -> None:
    """As `python -m vllm.entrypoints.openai.api_server`."""
    check = CpuPlatform.check_and_update_config

    def check_and_plan_ahead(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(check_and_plan_ahead)
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
