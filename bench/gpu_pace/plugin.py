"""A plugin of vLLM: each step of a worker on processors takes as long as on an accelerator, layer by layer.

vLLM finds it as the entry point of bench/gpu_pace/site. Attention waits in each layer until the accelerator would have
computed the layer, and computes nothing, so tokens are arbitrary. The KV is written, and leaves when its layer is done.
Mooncake's writes take as long as the KV of the modelled model would take on the link. A file in the folder of steps
gets a line for each step: its modelled and its true time in milliseconds, and the prompt tokens that it computed.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from bench.gpu_pace.accelerators import STEPS, Pace

_MARK = "_headrace_gpu_pace"


class Step:
    """The step that runs now. One engine process has one worker, which computes one step at a time."""

    def __init__(self, pace: Pace, folder: Path) -> None:
        self._pace = pace
        self._file = (folder / f"{os.getpid()}.csv").open("a", buffering=1)
        self._start_s = 0.0
        self._taken_s = 0.0
        self._prompt_tokens = 0
        self._layers = 1
        self._layer = 0

    def begin(self, scheduled: Any, layers: int) -> None:
        """A step starts. `scheduled` is vLLM's SchedulerOutput."""
        self._start_s = time.monotonic()
        computed = {one.req_id: one.num_computed_tokens for one in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        parts = [(computed[name], count) for name, count in scheduled.num_scheduled_tokens.items()]
        prompts = [part for part in parts if part[1] > 1]
        contexts = [context for context, count in parts if count == 1]
        self._taken_s = 1e-3 * self._pace.taken_ms(prompts, contexts)
        self._prompt_tokens = sum(count for _, count in prompts)
        self._layers, self._layer = layers, 0

    def end_layer(self) -> None:
        """Waits until the next layer would have been computed."""
        self._layer = min(self._layer + 1, self._layers)
        self._wait_until(self._taken_s * self._layer / self._layers)

    def end(self) -> None:
        """Waits until the step would have ended, and writes its times."""
        self._wait_until(self._taken_s)
        taken_s = time.monotonic() - self._start_s
        self._file.write(f"{1e3 * self._taken_s:.2f},{1e3 * taken_s:.2f},{self._prompt_tokens}\n")
        self._taken_s = 0.0

    def _wait_until(self, after_s: float) -> None:
        left_s = self._start_s + after_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)


class Link:
    """When writes of KV end on a link that carries one after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> float:
        """When the last of these bytes has arrived, by the monotonic clock."""
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + nbytes / self._bytes_per_s
            return self._free_s


def register() -> None:
    """Makes the workers of this process keep the pace of the environment, if it has one."""
    pace = Pace.from_environment()
    if pace is None:
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.worker.cpu_worker import CPUWorker

    if hasattr(CPUWorker, _MARK):
        return
    setattr(CPUWorker, _MARK, True)
    step = Step(pace, Path(os.environ[STEPS]))
    execute_model = CPUWorker.execute_model

    def paced_execute_model(self: Any, scheduler_output: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens <= 0:
            return execute_model(self, scheduler_output)
        layers = self.model_config.get_num_layers(self.parallel_config)
        step.begin(scheduler_output, layers)
        try:
            return execute_model(self, scheduler_output)
        finally:
            step.end()

    def paced_forward(
        self: Any,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any,
        *others: Any,
        **named: Any,
    ) -> Any:
        if attn_metadata is not None:
            step.end_layer()
        return output.zero_()

    CPUWorker.execute_model = paced_execute_model
    CPUAttentionBackendImpl.forward = paced_forward
    _pace_mooncake(Link(pace.link_bytes_per_s))


def _pace_mooncake(link: Link) -> None:
    """Replaces Mooncake's engine by one with a slower link."""
    from mooncake import engine as mooncake

    class PacedEngine(mooncake.TransferEngine):  # type: ignore[misc]
        """Mooncake's engine on a slower link."""

        def __init__(self) -> None:
            super().__init__()
            self._ends_s: dict[int, float] = {}

        def transfer_submit_write(self, *arguments: Any) -> Any:
            end_s = link.reserve(arguments[3])
            batch = super().transfer_submit_write(*arguments)
            self._ends_s[batch] = end_s
            return batch

        def transfer_check_status(self, batch: int) -> Any:
            if time.monotonic() < self._ends_s.get(batch, 0.0):
                return 0
            code = super().transfer_check_status(batch)
            if code != 0:
                self._ends_s.pop(batch, None)
            return code

        def batch_transfer_sync_write(self, *arguments: Any) -> Any:
            end_s = link.reserve(sum(arguments[3]))
            code = super().batch_transfer_sync_write(*arguments)
            time.sleep(max(0.0, end_s - time.monotonic()))
            return code

    mooncake.TransferEngine = PacedEngine
