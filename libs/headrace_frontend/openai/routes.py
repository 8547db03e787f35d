"""The routes that generate: completions, and chats in the forms of three APIs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import InvalidRequest, NotFound
from headrace_common.http.exchange import HttpError, HttpExchange
from headrace_frontend.openai.answers import AnswerRules, rules_of
from headrace_frontend.openai.block_apis.anthropic import (
    CountTokensBody,
    MessagesBody,
    MessagesFormat,
)
from headrace_frontend.openai.block_apis.responses_answers import ResponsesFormat
from headrace_frontend.openai.block_apis.responses_bodies import ResponsesBody, messages_of_output
from headrace_frontend.openai.body import checked_body
from headrace_frontend.openai.completion_format import CompletionFormat
from headrace_frontend.openai.conversion import (
    chat_message,
    chat_request,
    completion_requests,
    id_of,
    openai_error,
    tokenize_request,
)
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
from headrace_frontend.request.response_stream import Outlet

_AnswerField: TypeAlias = Literal["text", "token_ids", "logprobs", "stop_text"]
_ANSWER_FIELDS: Final[Sequence[_AnswerField]] = ("text", "token_ids", "logprobs", "stop_text")

_STREAM_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies such as nginx would collect events.
    "x-accel-buffering": "no",
}


@dataclass(frozen=True, slots=True)
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
        return sum(request.n for request in self.requests)


class Answering:
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
            ask_to_keep(exchange.headers.get(KEEP_HEADER), generation.requests)
            if (includes.prompt or includes.prompt_text) and isinstance(form, ResponseFormat):
                for request in generation.requests:
                    tokens, text = await self._prompt_of(generation, request)
                    form.add_prompt(tokens, request.n, text)
            if isinstance(form, MessagesFormat):
                async with self._intake.admitted(generation.tenant):
                    await self._parts.preparer.fit(generation.requests[0], generation.tenant)
            await exchange.run_while_connected(respond(exchange, generation))
        except InvalidRequest as error:
            raise openai_error(
                error,
                chat=not isinstance(form, CompletionFormat),
                formatted=body.formatted,
                echoed=not includes.prompt_logprobs,
            ) from error

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
                text = await preparer.run(tenant, DECODE, len(prepared.token_ids), decode)
        return prepared.token_ids, text

    async def _stream(self, exchange: HttpExchange, generation: Generation) -> None:
        """Sends an event for each message of each choice."""
        prompts = len(generation.requests)
        events = _EventStream(
            exchange, generation.format, choices=generation.choices, prompts=prompts
        )
        await self._run_all(generation, events.write, events)
        await events.finish()

    async def _collect(self, exchange: HttpExchange, generation: Generation) -> None:
        """Sends one object at the end."""
        form = generation.format
        choices = [CollectedChoice() for _ in range(generation.choices)]

        async def write(index: int, message: inference_pb2.GenerateResponse) -> None:
            choices[index].add(message, form.tokens_of(message))

        await self._run_all(generation, write)
        prompt_tokens = sum(len(choice.prompt_token_ids) for choice in choices)
        body = await self._parts.preparer.run(
            generation.tenant,
            FORMAT_PROMPT,
            prompt_tokens,
            partial(form.whole, choices, len(generation.requests)),
        )
        await exchange.respond(200, body)

    async def _run_all(
        self,
        generation: Generation,
        write: Callable[[int, inference_pb2.GenerateResponse], Awaitable[None]],
        events: _EventStream | None = None,
    ) -> None:
        """Runs the requests of all prompts. The first error ends them all. `events` may send messages at once."""

        async def run(first_index: int, request: inference_pb2.GenerateRequest) -> None:
            async def write_choice(message: inference_pb2.GenerateResponse) -> None:
                if not generation.generates:
                    _leave_out_answer(message)
                await write(first_index + message.choice, message)

            outlet: Outlet | None = None
            if events is not None and generation.generates:
                outlet = events.outlet(first_index)
            await self._parts.runner.run(
                request, generation.tenant, generation.deadline, write_choice, outlet
            )

        if len(generation.requests) == 1:
            await run(0, generation.requests[0])
            return
        first_index = 0
        try:
            async with asyncio.TaskGroup() as group:
                for request in generation.requests:
                    group.create_task(run(first_index, request))
                    first_index += request.n
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None


class _EventStream:
    """Sends an event for each message of each choice. `prompts` share the choices evenly."""

    def __init__(
        self, exchange: HttpExchange, form: AnswerFormat, *, choices: int, prompts: int
    ) -> None:
        self._exchange = exchange
        self._form = form
        self._prompts = prompts
        self._usages = [inference_pb2.Usage() for _ in range(choices)]
        self._begun: set[int] = set()
        """The choices with an event."""
        self._ending = b""

    async def write(self, index: int, message: inference_pb2.GenerateResponse) -> None:
        """Sends a message of choice `index`. Waits while the client does not read."""
        data = self._event(index, message)
        if message.finish_reason:
            self._usages[index] = message.usage
            if len(self._usages) == 1:
                # One write for all that is left.
                self._ending = data
                return
        if not self._exchange.started:
            await self._exchange.start(200, _STREAM_HEADERS)
        if data:
            await self._exchange.write(data)

    def outlet(self, index: int) -> Outlet:
        """Sends messages of choice `index` at once."""
        return _ChoiceOutlet(index, self._exchange, self._form, self._event)

    async def finish(self) -> None:
        """Sends what is left, once all choices have ended."""
        exchange = self._exchange
        data = self._ending + self._form.last_event(self._usages, self._prompts)
        if not exchange.started:
            await exchange.start(200, _STREAM_HEADERS)
        await exchange.finish(data)

    def _event(self, index: int, message: inference_pb2.GenerateResponse) -> bytes:
        if index in self._begun:
            return self._form.event(index, message)
        self._begun.add(index)
        return self._form.first_event(index) + self._form.event(index, message)


@dataclass(frozen=True, slots=True)
class _ChoiceOutlet:
    """Sends one choice of an event stream at once. See Outlet."""

    index: int
    exchange: HttpExchange
    form: AnswerFormat
    event: Callable[[int, inference_pb2.GenerateResponse], bytes]

    @property
    def writable(self) -> bool:
        return self.exchange.writable

    def write_message(self, message: inference_pb2.GenerateResponse) -> None:
        data = self.event(self.index, message)
        if not self.exchange.started:
            self.exchange.start_now(_STREAM_HEADERS, data)
        elif data:
            self.exchange.write_now(data)

    def write_text(self, text: str) -> bool:
        if not self.exchange.writable:
            return False
        data = self.form.text_event(self.index, text)
        if data is None:
            return False
        # Tokens without text are a part of a character.
        if text:
            self.exchange.write_now(data)
        return True


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
        data = await preparer.run(
            tenant, LIST_TOKENS, len(tokens), lambda: json.dumps(answer).encode()
        )
        await exchange.respond(200, data)

    async def _tokens_of(self, body: TokenizeBody, tenant: str) -> tuple[str, Sequence[int]]:
        """The model, and the tokens of the prompt."""
        preparer = self._parts.preparer
        if body.messages is not None:
            model = preparer.choice(body.model).model
            await self._parts.images.fetch(body.messages, self._parts.codecs[model])
        try:
            async with self._intake.admitted(tenant):
                size = PARSE.loop_max + 1 if body.prompt is None else len(body.prompt)
                convert = partial(tokenize_request, body)
                prepared = await preparer.tokenize(
                    await preparer.run(tenant, PARSE, size, convert),
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


class GenerateRoutes:
    """Makes requests of the InferenceService from bodies, and formats for the answers."""

    def __init__(self, parts: ClientParts, intake: Intake) -> None:
        self._parts = parts
        self._intake = intake
        self._answering = Answering(parts, intake)

    async def complete(self, exchange: HttpExchange) -> None:
        """/v1/completions."""
        tenant, body, requests = await self._intake.converted(
            exchange,
            CompletionBody,
            lambda body: completion_requests(body, _request_id(exchange, body)),
        )
        head, model = self._head(body, f"cmpl-{_request_id(exchange, body)}")
        form = CompletionFormat(
            head,
            self._parts.codecs[model],
            includes=body.includes,
            skip_special_tokens=body.skip_special_tokens is not False,
            alternatives=body.logprobs or 0,
        )
        generation = Generation(
            tenant,
            body,
            requests,
            deadline=self._intake.deadline(body.timeout_s),
            format=form,
            generates=body.generates,
        )
        await self._answering.answer(exchange, generation)

    async def chat(self, exchange: HttpExchange) -> None:
        """/v1/chat/completions."""
        tenant, body, chat = await self._intake.converted(
            exchange, ChatCompletionBody, partial(_with_request, exchange)
        )

        def new_format(head: ResponseHead, model: str, rules: AnswerRules) -> AnswerFormat:
            codec = self._parts.codecs[model]
            return ChatFormat(head, codec, includes=body.includes, rules=rules)

        await self._answer_chat(exchange, tenant, chat, "chatcmpl-", new_format)

    async def messages(self, exchange: HttpExchange) -> None:
        """/v1/messages."""
        tenant, _, chat = await self._intake.converted(
            exchange, MessagesBody, lambda body: _with_request(exchange, _chat_of(body))
        )
        await self._answer_chat(
            exchange, tenant, chat, "msg_", lambda head, _, rules: MessagesFormat(head, rules)
        )

    async def respond(self, exchange: HttpExchange) -> None:
        """/v1/responses."""
        tenant, body, chat = await self._intake.converted(
            exchange, ResponsesBody, lambda body: _with_request(exchange, _chat_of(body))
        )
        store = self._parts.conversations
        stores = store.keeps and body.store is not False
        echoed, namespaced = body.echoed | {"store": stores}, body.namespaced
        try:
            turn = await store.resume(tenant, body.previous_response_id or "")
        except NotFound as error:
            raise HttpError(404, "previous_response_not_found", error.detail) from error

        def complete(request: inference_pb2.GenerateRequest) -> None:
            turn.complete(request.chat, body.instructions or "")
            known = turn.name or (f"resp_{request.request_id}" if stores else "")
            request.conversation_id = request.conversation_id or known

        def new_format(head: ResponseHead, model: str, rules: AnswerRules) -> AnswerFormat:
            def save(output: Sequence[Mapping[str, Any]]) -> None:
                if stores:
                    turn.save(head.id, map(chat_message, messages_of_output(output)))

            codec = self._parts.codecs[model]
            return ResponsesFormat(head, rules, echoed, codec, namespaced, save)

        await self._answer_chat(exchange, tenant, chat, "resp_", new_format, complete=complete)

    async def _answer_chat(
        self,
        exchange: HttpExchange,
        tenant: str,
        chat: _Chat,
        id_prefix: str,
        new_format: Callable[[ResponseHead, str, AnswerRules], AnswerFormat],
        complete: Callable[[inference_pb2.GenerateRequest], None] = lambda request: None,
    ) -> None:
        """Answers a chat. `new_format` gets the head, the model and the rules of the answer.

        `complete` adds messages that the body does not have.
        """
        body, request = chat
        request_id = _request_id(exchange, body)
        head, model = self._head(body, id_prefix + request_id)
        rules = rules_of(body, self._parts.parsers[model])
        if request is None:
            await self._parts.images.fetch(body.messages, self._parts.codecs[model])
            request = await self._parts.preparer.run(
                tenant, PARSE, PARSE.loop_max + 1, partial(chat_request, body, request_id)
            )
        complete(request)
        if rules.divides:
            # The tags around calls and reasoning may be special tokens. vLLM sets it for calls, too.
            request.sampling.skip_special_tokens = False
        generation = Generation(
            tenant,
            body,
            [request],
            deadline=self._intake.deadline(body.timeout_s),
            format=new_format(head, model, rules),
        )
        await self._answering.answer(exchange, generation)

    def _head(self, body: GenerationBody, response_id: str) -> tuple[ResponseHead, str]:
        """The head, and the served model. Raises InvalidRequest when neither a model nor an adapter is served."""
        choice = self._parts.preparer.choice(body.model)
        fingerprint = self._parts.models.system_fingerprint(choice) or None
        head = ResponseHead(response_id, int(time.time()), choice.name, fingerprint)
        return head, choice.model


_Chat: TypeAlias = tuple[ChatCompletionBody, inference_pb2.GenerateRequest | None]
"""A body, and its request unless images must be fetched before."""


def _with_request(exchange: HttpExchange, body: ChatCompletionBody) -> _Chat:
    if has_remote_images(body.messages):
        return body, None
    return body, chat_request(body, _request_id(exchange, body))


def _chat_of(body: MessagesBody | ResponsesBody) -> ChatCompletionBody:
    return checked_body(ChatCompletionBody, body.chat)


def _request_id(exchange: HttpExchange, body: GenerationBody) -> str:
    """The id of the request in traces. No header is too long for it, and none has a character that it may not have."""
    own = body.request_id and "x-request-id" not in exchange.headers
    given = body.request_id if own else exchange.request_id
    return id_of(given)
