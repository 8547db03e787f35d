"""Hidden states in a rank: those of prompts' last positions are read, and first tokens are sampled from others.

vLLM adds the class to its worker. Its methods run on the rank's compute thread, between the parts of steps. They
queue their work on a device behind that of the steps before. All ranks call them in one order, as the collectives need.
A single rank on a processor samples on a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.distributed.parallel_state import get_pp_group, get_world_group
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.sampling_params import SamplingParams

from headrace.engine.v1 import link_pb2
from headrace_engine.vllm.compat import FirstBatch, tensor_parallel_rank

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_input_batch import InputBatch

PLAIN_METHODS = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)

ReaderOf = Callable[[str], Callable[[], bytes]]
_listener: Callable[[ReaderOf], None] | None = None

_beside_steps: HiddenStates | None = None
_threads_beside_steps: set[int] = set()

SampledToken = tuple[int, list[int], list[float]]
"""The token, and when logprobs were requested the token followed by the likeliest ones, with their logprobs."""


def listen(listener: Callable[[ReaderOf], None]) -> None:
    """`listener` is called in each step, on the compute thread. See StepExecutor.hidden_states_computed."""
    global _listener  # noqa: PLW0603 - vLLM makes the connector and the worker, and connects neither to the other
    _listener = listener


class HiddenStates:
    """A part of vLLM's worker. The engine's service calls the methods by their names."""

    vllm_config: VllmConfig
    model_runner: Any
    _headrace_batch: FirstBatch | None = None
    _headrace_head: Callable[..., Any] | None = None

    def headrace_watch_hidden_states(self) -> None:
        """From now on, the listener is called with what the model's head gets. Only the last stage has a head."""
        if _listener is None or not get_pp_group().is_last_rank:
            return
        runner, listener = self.model_runner, _listener
        compute_logits = self._headrace_head = runner.model.compute_logits

        def watched(hidden_states: torch.Tensor, *more: Any, **named: Any) -> Any:
            listener(partial(copy_row, runner.input_batch, hidden_states))
            return compute_logits(hidden_states, *more, **named)

        runner.model.compute_logits = watched

    def headrace_serve_beside_steps(self) -> bool:
        """Whether `sample_beside_steps` works on this rank from now on, so that first tokens wait for no step.

        The engine has one rank, on a processor, and its head is a plain matrix: vLLM's kernels for others share memory
        with the steps.
        """
        global _beside_steps  # noqa: PLW0603 - as in `listen`
        runner = self.model_runner
        if runner.device.type != "cpu" or runner.lora_config or get_world_group().world_size > 1:
            return False
        modules = list(runner.get_model().modules())
        heads = [module for module in modules if isinstance(module, VocabParallelEmbedding)]
        if not all(isinstance(head.quant_method, PLAIN_METHODS) for head in heads):
            return False
        processors = [module for module in modules if isinstance(module, LogitsProcessor)]
        dtypes = (None, self.vllm_config.model_config.dtype)
        if any(one.head_dtype not in dtypes for one in processors):
            return False
        for one in processors:
            one._apply_head = partial(_apply_head, one._apply_head)  # noqa: SLF001
        _beside_steps = self
        return True

    def headrace_first_token(
        self,
        state: bytes,
        prompt: list[int],
        encoded_params: bytes,
        bitmask: bytes,
        adapter: Sequence[Any],
    ) -> SampledToken | None:
        """The token after the prompt, by this model's head, at the first rank of the last stage. None at the others.

        `encoded_params` are SamplingParams. `bitmask` has a bit for each token that may begin the answer, empty for no
        constraint. `adapter` is a LoRARequest's name, number and path, empty for none.
        """
        if not get_pp_group().is_last_rank:
            return None
        with torch.inference_mode():
            runner = self.model_runner
            dtype = self.vllm_config.model_config.dtype
            row = torch.frombuffer(bytearray(state), dtype=dtype).unsqueeze(0).to(runner.device)
            if runner.lora_config:
                loras = {LoRARequest(*adapter)} if adapter else set()
                numbers = (adapter[1] if adapter else 0,)
                # Each step sets its own before its forward pass.
                runner._set_active_loras(numbers, numbers, loras)  # noqa: SLF001 - it has no public name
            head = self._headrace_head or runner.model.compute_logits
            logits = head(row)
            if logits is None or tensor_parallel_rank():
                return None
            logits = logits.float()
            if bitmask:
                import xgrammar

                bits = torch.frombuffer(bytearray(bitmask), dtype=torch.int32).unsqueeze(0)
                xgrammar.apply_token_bitmask_inplace(logits, bits.to(runner.device))
            params = msgspec.msgpack.decode(encoded_params, type=SamplingParams)
            if self._headrace_batch is None:
                self._headrace_batch = FirstBatch(self.vllm_config, runner.device)
            output = runner.sampler(logits, self._headrace_batch.replace(prompt, params))
            token_id = int(output.sampled_token_ids[0, 0])
            found = output.logprobs_tensors
            if found is None:
                return token_id, [], []
            return token_id, found.logprob_token_ids[0].tolist(), found.logprobs[0].tolist()


def _apply_head(
    apply: Callable[..., torch.Tensor],
    lm_head: VocabParallelEmbedding,
    hidden_states: torch.Tensor,
    embedding_bias: torch.Tensor | None,
) -> torch.Tensor:
    """LogitsProcessor._apply_head, on a thread beside the steps with torch's own kernel."""
    if threading.get_ident() not in _threads_beside_steps:
        return apply(lm_head, hidden_states, embedding_bias)
    return torch.nn.functional.linear(hidden_states, lm_head.weight, embedding_bias)


def sample_beside_steps(request: link_pb2.SampleFirst) -> link_pb2.FirstSampled:
    """HiddenStates.headrace_first_token on one thread of the caller, while the compute thread runs steps."""
    answer = link_pb2.FirstSampled()
    _threads_beside_steps.add(threading.get_ident())
    try:
        if _beside_steps is None:
            raise RuntimeError("this rank samples no token beside its steps")
        prompt = list(request.prompt)
        found = _beside_steps.headrace_first_token(
            request.state, prompt, request.params, request.bitmask, ()
        )
        assert found is not None
        answer.token_id, ids, logprobs = found
        answer.ranked_ids.extend(ids)
        answer.logprobs.extend(logprobs)
    except Exception as exc:  # noqa: BLE001 - the service raises it
        answer.detail = f"{type(exc).__name__}: {exc}"
    return answer


def copy_row(batch: InputBatch, rows: torch.Tensor, request_id: str) -> Callable[[], bytes]:
    """Queues the copy of a request's last row to host memory. What it returns gives the bytes once that is made.

    The rows are in the order of the batch. A request has one, and one more for each draft that the step verifies.
    """
    counts = [1 + len(drafts) for drafts in batch.spec_token_ids[: len(batch.req_ids)]]
    ends = list(accumulate(counts))
    if ends[-1] != len(rows):
        raise RuntimeError(f"a step has {len(rows)} hidden states where {ends[-1]} are expected")
    row = rows[ends[batch.req_id_to_index[request_id]] - 1]
    # From a device, torch copies into pinned memory without waiting.
    host = row.to("cpu", non_blocking=True)
    return lambda: host.view(torch.uint8).numpy().tobytes()
