"""vLLM's server, which plans steps ahead on processors too, where vLLM turns that off whatever its user has chosen."""

from __future__ import annotations

import runpy

from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform

_update = CpuPlatform.check_and_update_config


def _update_ahead(vllm_config: VllmConfig) -> None:
    _update(vllm_config)
    vllm_config.scheduler_config.async_scheduling = True


if __name__ == "__main__":
    CpuPlatform.check_and_update_config = _update_ahead
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
