"""vLLM's own MooncakeConnector with the times of its transfers. vLLM loads it in its engine processes.

It appends lines of JSON to the file in the environment variable `TIMES_VARIABLE`. "written": a prefill step has written
its last layer. "received": decode has received a request's KV completely. "sent": prefill has been notified. The
connector asks torch for the current accelerator without need, which fails on a machine without one.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnector,
)
from vllm.platforms import current_platform

from bench.support.vllm_child import TIMES_VARIABLE


def _accept_processors() -> None:
    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0
        type(current_platform).set_device = classmethod(lambda _class, _device: None)


_accept_processors()


class TimedMooncakeConnector(MooncakeConnector):
    """Adds only the times."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._times = Path(os.environ[TIMES_VARIABLE])
        self._prefill = bool(vllm_config.kv_transfer_config.is_kv_producer)
        self._written_unix_ns = 0

    def save_kv_layer(self, *arguments: Any, **named: Any) -> None:
        super().save_kv_layer(*arguments, **named)
        self._written_unix_ns = time.time_ns()

    def wait_for_save(self) -> None:
        super().wait_for_save()
        if self._prefill and self._written_unix_ns:
            self._note("written", self._written_unix_ns)
            self._written_unix_ns = 0

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        if results.finished_recving:
            self._note("received", time.time_ns())
        if results.finished_sending:
            self._note("sent", time.time_ns())
        return results

    def _note(self, event: str, unix_ns: int) -> None:
        with self._times.open("a") as file:
            file.write(json.dumps({"event": event, "unix_ns": unix_ns}) + "\n")
