"""Validates and tokenizes requests off the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from headrace.inference.v1 import inference_pb2
from headrace_common.callers.bounds import current_input
from headrace_common.callers.priority import Priority
from headrace_common.deadlines import Deadline
from headrace_common.errors import InvalidRequest
from headrace_common.limits import UNKNOWN_CONTEXT_TOKENS
from headrace_frontend.request.chat import plain_text_bytes, text_bytes
from headrace_frontend.request.computations import (
    DECODE,
    TOKENIZE,
    TextThreads,
)
from headrace_frontend.request.images import has_images
from headrace_frontend.request.model_names import Adapters, ModelChoice, resolve_model
from headrace_frontend.request.sampling import beyond_vocabulary
from headrace_frontend.request.validation import PreparedRequest, prepare
from headrace_text.codec import TextCodec

# The event loop itself prepares a request of this size, if it has little but text for a fast encoder.
_INLINE_TEXT_BYTES = 8_192
# An image is hashed, and its metadata is read, which takes less time than tokenizing.
_IMAGE_BYTES_PER_TEXT_BYTE = 32


class ModelWorkers(Protocol):
    """The decode workers of each served model."""

    def max_model_len(self) -> Mapping[str, int]:
        """The context length of each model with a live worker."""
        ...

    def adapters(self) -> Adapters:
        """The adapters of each model with a live worker, by name."""
        ...

    async def wait_for_worker(self, model: str, deadline: Deadline) -> bool:
        """Waits for a worker of the model if a lost one may return. True when it had to wait."""
        ...


@dataclass(eq=False, slots=True)
class RequestPreparer:
    """Prepares requests for the models in `codecs`, by served name.

    `salt_of` gives the cache salt of a tenant.
    """

    codecs: Mapping[str, TextCodec]
    workers: ModelWorkers
    salt_of: Callable[[str], str]
    # They run work in the tenants' turns.
    threads: TextThreads = field(default_factory=TextThreads, init=False)

    def close(self) -> None:
        """Ends the threads."""
        self.threads.close()

    async def prepare(
        self,
        request: inference_pb2.GenerateRequest,
        request_id: str,
        deadline: Deadline | None,
        tenant: str,
        priority: Priority = Priority.NORMAL,
        on_lowered: Callable[[int], None] | None = None,
    ) -> PreparedRequest:
        """The validated request. Raises InvalidRequest.

        `on_lowered` permits to lower max_tokens of the request to what the prompt leaves of the context, and gets it.
        Waits for a decode worker if a lost one may return, unless `deadline` is None.
        """
        model = request.model
        if deadline is not None and model and model not in self.codecs:
            # It may be an adapter. Workers that may return have announced theirs.
            for served in self.codecs:
                await self.workers.wait_for_worker(served, deadline)
        try:
            prepared = await self._run(request, request_id, tenant, priority)
        except InvalidRequest as error:
            is_lowered = error.cause and error.violations.keys() == {"sampling.max_tokens"}
            if on_lowered is None or not is_lowered:
                raise
            request.sampling.ClearField("max_tokens")
            prepared = await self._run(request, request_id, tenant, priority)
            on_lowered(prepared.sampling.max_tokens)
        if deadline is not None and await self.workers.wait_for_worker(prepared.model, deadline):
            # The workers' context length is known only now.
            prepared = await self._run(request, request_id, tenant, priority)
        return prepared

    async def tokenize(
        self,
        request: inference_pb2.GenerateRequest,
        tenant: str,
        *,
        add_generation_prompt: bool = True,
    ) -> PreparedRequest:
        """The validated request, outside any trace. Raises InvalidRequest."""
        return await self._run(request, "", tenant, add_generation_prompt=add_generation_prompt)

    async def tokenize_part(self, model: str, text: str, tenant: str) -> list[int]:
        """Tokens of a text that `tokenize` accepts, without special tokens around it."""
        codec = self.codecs[model]
        size_bytes = len(text.encode())
        return await self.threads.run(tenant, TOKENIZE, size_bytes, lambda: codec.encode_part(text))

    async def token_texts(self, model: str, token_ids: Sequence[int], tenant: str) -> list[str]:
        """The tokenizer's own text of each token that `tokenize` returned."""
        codec = self.codecs[model]
        return await self.threads.run(
            tenant, DECODE, len(token_ids), lambda: codec.token_texts(token_ids)
        )

    def special_tokens(self, model: str) -> tuple[Sequence[int], Sequence[int]]:
        """The special tokens that a model's tokenizer adds before and after a text."""
        codec = self.codecs[model]
        whole, part = codec.encode("a"), codec.encode_part("a")
        start = next(i for i in range(len(whole)) if whole[i : i + len(part)] == part)
        return whole[:start], whole[start + len(part) :]

    async def detokenize(self, model: str, token_ids: Sequence[int], tenant: str) -> str:
        """The text of tokens. Raises InvalidRequest when they are invalid or exceed the context length."""
        codec = self.codecs[model]
        length_max = self.max_model_len(model) or UNKNOWN_CONTEXT_TOKENS
        if len(token_ids) > length_max:
            raise InvalidRequest(
                {"tokens": f"must hold at most {length_max} tokens, not {len(token_ids)}"}
            )

        def decode() -> str:
            if violations := beyond_vocabulary("tokens", token_ids, 0, codec.vocabulary_size):
                raise InvalidRequest(violations)
            return codec.decode(token_ids)

        return await self.threads.run(tenant, DECODE, len(token_ids), decode)

    def choice(self, model: str) -> ModelChoice:
        """What a client selects by the name of a model or of an adapter. Raises InvalidRequest."""
        return resolve_model(model, self.codecs, self.workers.adapters())

    def max_model_len(self, model: str) -> int:
        """The context length of a served model. 0 while it is unknown."""
        return self.workers.max_model_len().get(model) or self.codecs[model].max_model_len

    async def _run(
        self,
        request: inference_pb2.GenerateRequest,
        request_id: str,
        tenant: str,
        priority: Priority = Priority.NORMAL,
        *,
        add_generation_prompt: bool = True,
    ) -> PreparedRequest:
        prepare_request = partial(
            prepare,
            request,
            request_id=request_id,
            codecs=self.codecs,
            max_model_len=self.workers.max_model_len(),
            cache_salt=self.salt_of(tenant),
            adapters=self.workers.adapters(),
            tenant=tenant,
            priority=priority,
            start_ns=time.monotonic_ns(),
            add_generation_prompt=add_generation_prompt,
        )
        if request.HasField("chat") and has_images(request.chat):
            sent = current_input()
            image_bytes = 0 if sent is None else sent.size
            cost_bytes = text_bytes(request.chat) + image_bytes // _IMAGE_BYTES_PER_TEXT_BYTE
            return await self.threads.run(
                tenant, TOKENIZE, max(cost_bytes, TOKENIZE.loop_max + 1), prepare_request
            )
        size_bytes = request.ByteSize()
        if size_bytes <= TOKENIZE.loop_max or self._is_quick(request, size_bytes):
            return prepare_request()
        return await self.threads.run(tenant, TOKENIZE, size_bytes, prepare_request)

    def _is_quick(self, request: inference_pb2.GenerateRequest, size_bytes: int) -> bool:
        """Whether a request has little but a prompt that is encoded fast."""
        codecs = self.codecs.values()
        is_fast = all(one.encodes_fast and not one.encoder_differences for one in codecs)
        if size_bytes > _INLINE_TEXT_BYTES or not is_fast:
            return False
        return size_bytes - plain_text_bytes(request) <= TOKENIZE.loop_max
