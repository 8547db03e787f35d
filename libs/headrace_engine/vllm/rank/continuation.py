"""Lets vLLM go on with an answer that was begun elsewhere. The only module that reaches into its requests and batches.

vLLM knows such requests already: those that it preempted and takes up again. A request is given that shape before its
first step. The scheduler's half appends the tokens to the request's output; the ranks' half, which vLLM tells only the
prompt of a new request, reads them from the request's sampling parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from headrace_engine.vllm.settings import GENERATED_KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch


def begin(request: Request) -> None:
    """On the scheduler, when a request comes: what was generated becomes its output."""
    generated = _generated(request.sampling_params)
    if generated:
        request.append_output_token_ids(list(generated))
        # vLLM asserts that what it finds of a new request is prompt. Its cached tokens are not counted then.
        request.prefill_stats = None


def add_first_token(request: Request, token_id: int) -> None:
    """On the scheduler, before the request's first step: goes on after this token."""
    request.append_output_token_ids(token_id)
    extra = request.sampling_params.extra_args or {}
    request.sampling_params.extra_args = {**extra, GENERATED_KEY: [token_id]}


def install(vllm_config: VllmConfig) -> None:
    """On a rank, before it takes any request. Its model runner then begins such requests with their output.

    A newer model runner, which vLLM uses on some devices, is told all of a request's tokens and has no such batch.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.worker.gpu_input_batch import InputBatch

    sampler = TopKTopPSampler(use_fp64_gumbel=vllm_config.model_config.use_fp64_gumbel)
    plain = getattr(InputBatch.add_request, "__wrapped__", InputBatch.add_request)

    def add_request(batch: InputBatch, state: CachedRequestState) -> int:
        _prepare(state, sampler, batch.vocab_size)
        return plain(batch, state)  # type: ignore[no-any-return]

    add_request.__wrapped__ = plain  # type: ignore[attr-defined]
    InputBatch.add_request = add_request


def _prepare(state: CachedRequestState, sampler: Any, vocabulary: int) -> None:
    """Puts output and random stream of a request where they would be; one that was preempted is there already."""
    generated = _generated(state.sampling_params)
    begins = bool(generated) and not state.output_token_ids
    if begins:
        state.output_token_ids.extend(generated)
    if state.generator is None:
        return
    if state.generator.device.type == "cpu" and not isinstance(state.generator, RandomStream):
        seed = state.sampling_params.seed
        state.generator = RandomStream(seed, state.output_token_ids, sampler, vocabulary)
    elif begins:
        advance(state.generator, len(generated), sampler, vocabulary)


def _generated(sampling_params: Any) -> Sequence[int]:
    extra = getattr(sampling_params, "extra_args", None) or {}
    return extra.get(GENERATED_KEY, ())  # type: ignore[no-any-return]


def advance(generator: torch.Generator, token_count: int, sampler: Any, vocabulary: int) -> None:
    """Draws what the sampler draws for so many tokens, by having it sample."""
    logits = torch.zeros((1, vocabulary), device=generator.device)
    for _ in range(token_count):
        sampler.forward(logits, {0: generator}, None, None)


class RandomStream(torch.Generator):
    """A seeded request's random numbers on a processor, always at the place that its output has reached.

    vLLM draws for every chunk of a prompt, and then takes the draw back by an offset, which torch has for CUDA only.
    `output` is the request's own list, which grows.
    """

    def __new__(cls, *_: Any) -> RandomStream:
        return super().__new__(cls, device="cpu")  # type: ignore[no-any-return]

    def __init__(self, seed: int, output: list[int], sampler: Any, vocabulary: int) -> None:
        self._seed = seed
        self._output = output
        self._sampler = sampler
        self._vocabulary = vocabulary
        self._rewind()

    def get_offset(self) -> int:
        """Draws so far, near enough for whoever only wants to go back."""
        return len(self._output)

    def set_offset(self, offset: int) -> None:
        """Takes back what was drawn since the output's last token, however far that is."""
        self._rewind()

    def _rewind(self) -> None:
        self.manual_seed(self._seed)
        advance(self, len(self._output), self._sampler, self._vocabulary)
