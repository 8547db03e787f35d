"""Reads the logits of a prompt's last position in vLLM's sampler, before any processor changes them.

vLLM makes one processor of each configured class in each rank, and passes it the logits of every step. Those are of the
last positions of the step's chunks. Only the rank's connector can determine which of them are the last of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from headrace_engine.vllm.settings import LOGITS_KEY

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.sampling_params import SamplingParams

OnLogits = Callable[[str, Callable[[], bytes]], None]


class LogitsTap(AdapterLogitsProcessor):
    """Changes no logits. Passes each row of a request with `LOGITS_KEY` to the process's one listener."""

    _listener: OnLogits | None = None

    @classmethod
    def listen(cls, listener: OnLogits) -> None:
        """`listener` gets the transfer id and a function that reads the row. The compute thread calls it."""
        cls._listener = staticmethod(listener)

    def is_argmax_invariant(self) -> bool:
        """False: vLLM skips invariant processors for greedy batches, and runs them after the others."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        transfer_id = (params.extra_args or {}).get(LOGITS_KEY)
        if not transfer_id:
            return None

        def tap(output_token_ids: list[int], row: Tensor) -> Tensor:
            if self._listener is not None:
                self._listener(transfer_id, lambda: row.float().cpu().numpy().tobytes())
            return row

        return tap
