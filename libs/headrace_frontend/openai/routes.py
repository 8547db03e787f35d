"""The routes that generate: completions, and chats in the forms of three APIs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError, InvalidRequest
from headrace_common.http.exchange import HttpExchange
from headrace_common.latency.clocks import clocks_now
from headrace_common.rpc.trace_context import SERVED
from headrace_frontend.answers import CHAT, COMPLETION, MESSAGE
from headrace_frontend.openai.answers import AnswerRules, permit_calls, rules_of
from headrace_frontend.openai.block_apis.anthropic import (
    CountTokensBody,
    MessagesBody,
    MessagesFormat,
)
from headrace_frontend.openai.block_apis.responses_bodies import ResponsesBody
from headrace_frontend.openai.body import checked_body
from headrace_frontend.openai.completion_format import CompletionFormat
from headrace_frontend.openai.conversion import (
    chat_request,
    completion_requests,
    id_of,
    openai_error,
    tokenize_request,
)
from headrace_frontend.openai.event_stream import EventStream
from headrace_frontend.openai.image_fetch import has_remote_images
from headrace_frontend.openai.intake import ClientParts, Intake
from headrace_frontend.openai.requests import (
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)
from headrace_frontend.openai.responses import (
    AnswerFormat,
    ChatFormat,
    CollectedChoice,
    ResponseFormat,
    ResponseHead,
)
from headrace_frontend.promises import KEEP_HEADER, ask_to_keep
from headrace_frontend.request.computations import DECODE, FORMAT_PROMPT, LIST_TOKENS, PARSE

_AnswerField: TypeAlias = Literal["text", "token_ids", "logprobs", "stop_text"]
_MAX_TOKENS: Final = ("max_tokens", "max_completion_tokens")
_ANSWER_FIELDS: Final[Sequence[_AnswerField]] = ("text", "token_ids", "logprobs", "stop_text")


@dataclass(slots=True)
class Generation:
    """One HTTP request as requests of the InferenceService, one for each prompt."""

    tenant: str
    body: GenerationBody
    requests: Sequence[inference_pb2.GenerateRequest]
    deadline: Deadline
    format: AnswerFormat
    generates: bool = True
    """Whether the choices have more than the prompt."""

    @property
    def choices(self) -> int:
        """The number of choices of all prompts."""
        return sum([request.n for request in self.requests])


class _Answering:
    """Answers generations."""

    def __init__(self, parts: ClientParts, intake: Intake) -> None:
        self._parts = parts
        self._intake = intake

    async def answer(self, exchange: HttpExchange, generation: Generation) -> None:
        """Sends the answer. Raises InvalidRequest with OpenAI's names of the fields."""
        form, body = generation.format, generation.body
        includes = body.includes
        respond = self._stream if body.stream else self._collect
        try:
            header = exchange.headers.get(KEEP_HEADER)
            ask_to_keep(header, body.keep_s, generation.requests)
            if header is not None and isinstance(form, ResponseFormat):
                form.include_usage()
            if (includes.prompt or includes.prompt_text) and isinstance(form, ResponseFormat):
                for request in generation.requests:
                    tokens, text = await self._prompt_of(generation, request)
                    form.add_prompt(tokens, request.n, text)
            await respond(exchange, generation)
        except HeadraceError as error:
            shown = error
            if isinstance(error, InvalidRequest):
                sent = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
                shown = openai_error(
                    error,
                    chat=not isinstance(form, CompletionFormat),
                    max_tokens=sent,
                    renamed=form.renamed,
                    formatted=body.formatted,
                    echoed=not includes.prompt_logprobs,
                )
            end = form.failure_event(shown) if exchange.started else b""
            if not end:
                raise shown from error
            await exchange.finish(end)

    async def _prompt_of(
        self, generation: Generation, request: inference_pb2.GenerateRequest
    ) -> tuple[Sequence[int], str]:
        """The tokens of a prompt, where the response needs them before its first event, and its text if it has that."""
        preparer, tenant = self._parts.preparer, generation.tenant
        async with self._intake.admitted(tenant, generation.deadline):
            prepared = await preparer.tokenize(request, tenant)
            text = request.text
            if generation.body.includes.prompt_text and not text:
                decode = partial(
                    prepared.codec.decode, prepared.token_ids, skip_special_tokens=False
                )
                text = await preparer.threads.run(tenant, DECODE, len(prepared.token_ids), decode)
        return prepared.token_ids, text

    async def _stream(self, exchange: HttpExchange, generation: Generation) -> None:
        """Sends an event for each message of each choice."""
        prompts = len(generation.requests)
        events = EventStream(
            exchange, generation.format, choices=generation.choices, prompts=prompts
        )
        try:
            events.ping_each(self._parts.stream_ping_s)
            await self._running(exchange, generation, events.write, events)
        finally:
            events.close()
        await events.finish()

    async def _collect(self, exchange: HttpExchange, generation: Generation) -> None:
        """Sends one object at the end."""
        form = generation.format
        choices = [CollectedChoice() for _ in range(generation.choices)]

        async def write(index: int, message: inference_pb2.GenerateResponse) -> None:
            choices[index].add(message, form.tokens_of(message))

        await self._running(exchange, generation, write)
        prompt_tokens = sum(len(choice.prompt_token_ids) for choice in choices)
        body = await self._parts.preparer.threads.run(
            generation.tenant,
            FORMAT_PROMPT,
            prompt_tokens,
            partial(form.whole, choices, len(generation.requests)),
        )
        await form.stored()
        await exchange.respond(200, body)

    def _running(
        self,
        exchange: HttpExchange,
        generation: Generation,
        write: Callable[[int, inference_pb2.GenerateResponse], Awaitable[None]],
        events: EventStream | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Runs the requests of all prompts. The first error ends them all. `events` may send messages at once."""
        is_sent = not generation.body.model_fields_set.isdisjoint(_MAX_TOKENS)
        is_refused = is_sent and self._parts.rejects_unknown_fields
        refuses = is_refused and not isinstance(generation.format, MessagesFormat)
        on_lowered = None if refuses else partial(_name_lowered, exchange)
        runs: list[Coroutine[Any, Any, None]] = []
        first_index = 0
        outlet = events if generation.generates and len(generation.requests) == 1 else None
        for request in generation.requests:
            writes = partial(_write_choice, generation, write, first_index)
            runs.append(
                self._parts.runner.run(
                    request, generation.tenant, generation.deadline, writes, outlet, on_lowered
                )
            )
            first_index += request.n
        return runs[0] if len(runs) == 1 else _all(runs)


async def _all(runs: Sequence[Coroutine[Any, Any, None]]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for run in runs:
                group.create_task(run)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _write_choice(
    generation: Generation,
    write: Callable[[int, inference_pb2.GenerateResponse], Awaitable[None]],
    first_index: int,
    message: inference_pb2.GenerateResponse,
) -> Awaitable[None]:
    if not generation.generates:
        _leave_out_answer(message)
    return write(first_index + message.choice, message)


def _name_lowered(exchange: HttpExchange, max_tokens: int) -> None:
    exchange.add_header("x-headrace-max-tokens", str(max_tokens))


def _leave_out_answer(message: inference_pb2.GenerateResponse) -> None:
    """Leaves nothing but the prompt in a message."""
    for name in _ANSWER_FIELDS:
        message.ClearField(name)
    if message.finish_reason:
        message.finish_reason = sampling_pb2.FINISH_REASON_LENGTH
        message.usage.completion_tokens = 0


class TokenizeRoutes:
    """Answers about tokens, without a worker."""

    def __init__(self, parts: ClientParts, intake: Intake) -> None:
        self._parts = parts
        self._intake = intake

    async def count_tokens(self, exchange: HttpExchange) -> None:
        """/v1/messages/count_tokens."""
        tenant, _, prompt = await self._intake.converted(
            exchange, CountTokensBody, lambda body: checked_body(TokenizeBody, body.prompt)
        )
        _, tokens = await self._tokens_of(prompt, tenant)
        await exchange.respond_object({"input_tokens": len(tokens)})

    async def tokenize(self, exchange: HttpExchange) -> None:
        """/tokenize."""
        tenant, body = await self._intake.read(exchange, TokenizeBody)
        model, tokens = await self._tokens_of(body, tenant)
        preparer = self._parts.preparer
        texts = None
        if body.return_token_strs:
            texts = await preparer.token_texts(model, tokens, tenant)
        answer = {
            "count": len(tokens),
            "max_model_len": preparer.max_model_len(model),
            "tokens": list(tokens),
            "token_strs": texts,
        }
        data = await preparer.threads.run(
            tenant, LIST_TOKENS, len(tokens), lambda: json.dumps(answer).encode()
        )
        await exchange.respond(200, data)

    async def _tokens_of(self, body: TokenizeBody, tenant: str) -> tuple[str, Sequence[int]]:
        """The model, and the tokens of the prompt."""
        preparer = self._parts.preparer
        model = preparer.choice(body.model).model
        try:
            async with self._intake.admitted(tenant):
                if body.messages is not None:
                    await self._parts.images.fetch(body.messages, self._parts.codecs[model], tenant)
                size = PARSE.loop_max + 1 if body.prompt is None else len(body.prompt)
                convert = partial(tokenize_request, body)
                prepared = await preparer.tokenize(
                    await preparer.threads.run(tenant, PARSE, size, convert),
                    tenant,
                    add_generation_prompt=body.add_generation_prompt,
                )
                tokens: Sequence[int] = prepared.token_ids
                if body.prompt is not None and not body.adds_special_tokens:
                    tokens = await preparer.tokenize_part(prepared.model, body.prompt, tenant)
                elif body.prompt is None and body.adds_special_tokens:
                    before, after = preparer.special_tokens(prepared.model)
                    tokens = (*before, *tokens, *after)
        except InvalidRequest as error:
            raise openai_error(error, chat=False) from error
        return prepared.model, tokens

    async def detokenize(self, exchange: HttpExchange) -> None:
        """/detokenize."""
        tenant, body = await self._intake.read(exchange, DetokenizeBody)
        model = self._parts.preparer.choice(body.model).model
        async with self._intake.admitted(tenant):
            text = await self._parts.preparer.detokenize(model, body.tokens, tenant)
        await exchange.respond_object({"prompt": text})


Chat: TypeAlias = tuple[ChatCompletionBody, inference_pb2.GenerateRequest | None]
"""A body, and its request unless images must be fetched before."""
Complete: TypeAlias = Callable[[inference_pb2.GenerateRequest], None]
_Answer: TypeAlias = Callable[[HttpExchange, Generation], Awaitable[None]]


def _as_it_is(request: inference_pb2.GenerateRequest) -> None:
    """The request has all messages."""


class GenerateRoutes(_Answering):
    """Makes requests of the InferenceService from bodies, and formats for the answers."""

    async def complete(self, exchange: HttpExchange) -> None:
        """/v1/completions."""
        tenant, body, requests = await self._intake.converted(
            exchange,
            CompletionBody,
            lambda body: completion_requests(body, request_id_of(exchange, body)),
        )
        head, model = self._head(body, COMPLETION + requests[0].request_id)
        form = CompletionFormat(
            head,
            self._parts.codecs[model],
            includes=body.includes,
            skip_special_tokens=body.skip_special_tokens is not False,
            alternatives=body.logprobs or 0,
        )
        deadline = self._intake.deadline(body.timeout_s)
        generation = Generation(
            tenant, body, requests, deadline=deadline, format=form, generates=body.generates
        )
        await self.answer(exchange, generation)

    async def chat(self, exchange: HttpExchange) -> None:
        """/v1/chat/completions."""
        tenant, body, chat = await self._intake.converted(
            exchange, ChatCompletionBody, partial(with_request, exchange)
        )

        def new_format(head: ResponseHead, model: str, rules: AnswerRules) -> AnswerFormat:
            codec = self._parts.codecs[model]
            return ChatFormat(head, codec, includes=body.includes, rules=rules)

        await self.answer_chat(exchange, tenant, chat, CHAT, new_format)

    async def messages(self, exchange: HttpExchange) -> None:
        """/v1/messages."""
        tenant, _, chat = await self._intake.converted(
            exchange, MessagesBody, lambda body: with_request(exchange, chat_of(body))
        )
        await self.answer_chat(
            exchange, tenant, chat, MESSAGE, lambda head, _, rules: MessagesFormat(head, rules)
        )

    async def answer_chat(
        self,
        exchange: HttpExchange,
        tenant: str,
        chat: Chat,
        id_prefix: str,
        new_format: Callable[[ResponseHead, str, AnswerRules], AnswerFormat],
        complete: Complete = _as_it_is,
        answer: _Answer | None = None,
    ) -> None:
        """Answers a chat. `new_format` gets the head, the model and the rules of the answer.

        `complete` adds messages that the body does not have. `answer` sends the answer, in place of this method.
        """
        body, _ = chat
        head, model = self._head(body, id_prefix + request_id_of(exchange, body))
        rules = rules_of(body, self._parts.parsers[model])
        deadline = self._intake.deadline(body.timeout_s)
        request = await self.request_of(exchange, tenant, chat, complete, deadline)
        if request.sampling.HasField("structured_outputs"):
            outputs = request.sampling.structured_outputs
            permit = partial(permit_calls, outputs, rules, self._parts.codecs[model])
            await self._parts.preparer.threads.run(tenant, PARSE, outputs.ByteSize(), permit)
        if rules.divides:
            # The tags around calls and reasoning may be special tokens. vLLM sets it for calls, too.
            request.sampling.skip_special_tokens = False
        form = new_format(head, model, rules)
        generation = Generation(tenant, body, [request], deadline=deadline, format=form)
        await (answer or self.answer)(exchange, generation)

    async def request_of(
        self,
        exchange: HttpExchange,
        tenant: str,
        chat: Chat,
        complete: Complete = _as_it_is,
        deadline: Deadline | None = None,
    ) -> inference_pb2.GenerateRequest:
        """The request of a chat, with its images and what `complete` adds."""
        body, request = chat
        if request is None:
            codec = self._parts.codecs[self._parts.preparer.choice(body.model).model]
            async with self._intake.admitted(tenant, deadline):
                begin = clocks_now()
                await self._parts.images.fetch(body.messages, codec, tenant)
            if (served := SERVED.get()) is not None:
                SERVED.set(served._replace(fetch=(begin, clocks_now())))
            convert = partial(chat_request, body, request_id_of(exchange, body))
            request = await self._parts.preparer.threads.run(
                tenant, PARSE, PARSE.loop_max + 1, convert
            )
        complete(request)
        return request

    def _head(self, body: GenerationBody, response_id: str) -> tuple[ResponseHead, str]:
        """The head, and the served model. Raises InvalidRequest when neither a model nor an adapter is served."""
        choice = self._parts.preparer.choice(body.model)
        fingerprint = self._parts.models.system_fingerprint(choice) or None
        head = ResponseHead(response_id, int(time.time()), choice.name, fingerprint)
        return head, choice.model


def with_request(exchange: HttpExchange, body: ChatCompletionBody) -> Chat:
    """The chat of a body."""
    if has_remote_images(body.messages):
        return body, None
    return body, chat_request(body, request_id_of(exchange, body))


def chat_of(body: MessagesBody | ResponsesBody) -> ChatCompletionBody:
    """The body of the same chat for /v1/chat/completions."""
    return checked_body(ChatCompletionBody, body.chat)


def request_id_of(exchange: HttpExchange, body: GenerationBody | ResponsesBody) -> str:
    """The id of the request in traces. No header is too long for it, and none has a character that it may not have."""
    own = body.request_id and "x-request-id" not in exchange.headers
    given = body.request_id if own else exchange.request_id
    return id_of(given)
