"""Continues an answer in vLLM that another engine has begun. Reaches into vLLM's requests and batches.

vLLM compiles a grammar on a thread, while the request waits. Only the scheduler's process has grammars.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from headrace_engine.vllm.settings import GENERATED_KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch


log = logging.getLogger(__name__)


class GrammarMismatch(Exception):
    """The tokens are not the beginning of an answer that the grammar allows."""


class _EndedGrammar:
    """Replaces a grammar that rejects tokens: vLLM ends the request with an error at its next token."""

    def is_terminated(self) -> bool:
        return True

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return False


def advance_grammar(request: Request, token_ids: Sequence[int]) -> None:
    """On the scheduler, before the request's first step: its grammar continues after these tokens of its output.

    Without a match, the request ends with an error. Does nothing for a request without a grammar.
    """
    structured = request.structured_output_request
    if structured is None:
        return
    compiled = structured._grammar  # noqa: SLF001 - the property waits for the compiler
    if isinstance(compiled, Future):
        structured.grammar = _advanced(compiled, request.request_id, token_ids)
        return
    try:
        _accept(compiled, request.request_id, token_ids)
    except GrammarMismatch:
        log.error("the grammar of %s rejects the first token of prefill", request.request_id)
        structured.grammar = _EndedGrammar()


def _advanced(compiled: Future[Any], request_id: str, token_ids: Sequence[int]) -> Future[Any]:
    """The grammar after these tokens, once it is compiled."""
    advanced: Future[Any] = Future()

    def advance(done: Future[Any]) -> None:
        try:
            advanced.set_result(_accept(done.result(), request_id, token_ids))
        # vLLM raises it again for this request.
        except Exception as error:  # noqa: BLE001
            advanced.set_exception(error)

    compiled.add_done_callback(advance)
    return advanced


def _accept(grammar: Any, request_id: str, token_ids: Sequence[int]) -> Any:
    if not grammar.accept_tokens(request_id, list(token_ids)):
        raise GrammarMismatch(f"{len(token_ids)} generated tokens do not follow the grammar")
    return grammar


def add_generated_tokens(request: Request) -> None:
    """On the scheduler, for a new request: the tokens that were generated elsewhere become its output."""
    generated = _generated(request.sampling_params)
    if generated:
        request.append_output_token_ids(list(generated))
        advance_grammar(request, generated)
        # vLLM asserts that a new request has only prompt tokens. Without it, vLLM counts no cached tokens.
        request.prefill_stats = None


def add_first_token(request: Request, token_id: int) -> None:
    """On the scheduler, before the request's first step: the answer continues after this token."""
    request.append_output_token_ids(token_id)
    advance_grammar(request, (token_id,))
    extra = request.sampling_params.extra_args or {}
    request.sampling_params.extra_args = {**extra, GENERATED_KEY: [token_id]}


def has_answer(request: Request) -> bool:
    """Whether an ended request has its whole answer: it was not aborted, and has not failed."""
    from vllm.v1.request import RequestStatus

    return request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def install(vllm_config: VllmConfig) -> None:
    """On a rank, before its first request. Makes the V1 model runner start such requests with their output.

    The V2 model runner, which vLLM uses on some devices, gets all tokens of a request and has no such batch.
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
    """Sets a new request's output and random state. A request that was preempted has them already."""
    generated = _generated(state.sampling_params)
    continues = bool(generated) and not state.output_token_ids
    if continues:
        state.output_token_ids.extend(generated)
    if state.generator is None:
        return
    if state.generator.device.type == "cpu" and not _follows(
        state.generator, state.output_token_ids
    ):
        seed = state.sampling_params.seed
        state.generator = RandomStream(seed, state.output_token_ids, sampler, vocabulary)
    elif continues:
        advance(state.generator, len(generated), sampler, vocabulary)


def _follows(generator: torch.Generator, output: list[int]) -> bool:
    """Whether it is the random stream of this list. With steps planned ahead, a resumed request gets another list."""
    return isinstance(generator, RandomStream) and generator.output is output


def _generated(sampling_params: Any) -> Sequence[int]:
    extra = getattr(sampling_params, "extra_args", None) or {}
    return extra.get(GENERATED_KEY, ())  # type: ignore[no-any-return]


def advance(generator: torch.Generator, token_count: int, sampler: Any, vocabulary: int) -> None:
    """Advances the random state as the sampler does for `token_count` tokens, by sampling them."""
    logits = torch.zeros((1, vocabulary), device=generator.device)
    for _ in range(token_count):
        sampler.forward(logits, {0: generator}, None, None)


class RandomStream(torch.Generator):
    """Random numbers of a seeded request on a CPU, positioned after the last token of its output.

    vLLM draws for every chunk of a prompt and then resets the generator's offset, which torch supports on CUDA only.
    `output` is the request's own list, which grows.
    """

    def __new__(cls, *_: Any) -> RandomStream:
        return super().__new__(cls, device="cpu")  # type: ignore[no-any-return]

    def __init__(self, seed: int, output: list[int], sampler: Any, vocabulary: int) -> None:
        self._seed = seed
        self.output = output
        """The list that it follows."""
        self._sampler = sampler
        self._vocabulary = vocabulary
        self._rewind()

    def get_offset(self) -> int:
        """A number that `set_offset` accepts. vLLM uses it only to undo a draw."""
        return len(self.output)

    def set_offset(self, offset: int) -> None:
        """Undoes all draws since the last token of the output, whatever the offset."""
        self._rewind()

    def _rewind(self) -> None:
        self.manual_seed(self._seed)
        advance(self, len(self.output), self._sampler, self._vocabulary)
