"""Where a prefill rank takes the logits of a prompt's last position: in vLLM's sampler, before anything changes them.

vLLM makes a processor of each class that it is given in each rank, and shows it the logits of every step. Theirs are
the last positions of the step's chunks; which of those is a prompt's last, only the rank's connector knows.
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
    """Changes nothing. Tells the process's one listener of each row of a request that says so."""

    _listener: OnLogits | None = None

    @classmethod
    def listen(cls, listener: OnLogits) -> None:
        """`listener` gets the transfer, and a function that reads the row there and then, on the compute thread."""
        cls._listener = staticmethod(listener)

    def is_argmax_invariant(self) -> bool:
        """vLLM leaves out those that are where nobody samples at random, and shows them changed logits."""
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
