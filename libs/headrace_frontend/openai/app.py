"""The OpenAI HTTP API: routes, keys, and the way of a request through the process."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from opentelemetry import context as otel_context

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import (
    HeadraceError,
    InternalError,
    InvalidRequest,
    NotFound,
    Unauthenticated,
)
from headrace_common.http.server import Receive, Scope, Send
from headrace_common.rpc.callers import caller_name
from headrace_common.rpc.trace_context import SERVED, ServedCall, context_of_carrier
from headrace_common.version import version
from headrace_frontend.answers import Outlets
from headrace_frontend.openai.answers import AnswerRules, rules_of
from headrace_frontend.openai.block_apis.anthropic_answers import MESSAGES_ERRORS, MessagesFormat
from headrace_frontend.openai.block_apis.anthropic_bodies import CountTokensBody, MessagesBody
from headrace_frontend.openai.block_apis.responses_answers import RESPONSES_ERRORS, ResponsesFormat
from headrace_frontend.openai.block_apis.responses_bodies import (
    ResponsesBody,
    messages_of_output,
)
from headrace_frontend.openai.conversion import (
    chat_message,
    chat_request,
    completion_requests,
    id_of,
    openai_violations,
    tokenize_request,
)
from headrace_frontend.openai.errors import OPENAI_ERRORS, HttpError, unknown_path
from headrace_frontend.openai.event_stream import EventStream
from headrace_frontend.openai.exchange import HttpExchange
from headrace_frontend.openai.messages import UnknownFields
from headrace_frontend.openai.metrics_page import MetricsPage
from headrace_frontend.openai.parts import OpenAiParts
from headrace_frontend.openai.requests import (
    BodyKind,
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    Includes,
    KeepBody,
    TokenizeBody,
    checked_body,
    parse_body,
)
from headrace_frontend.openai.responses import (
    AnswerFormat,
    ChatFormat,
    CollectedChoice,
    CompletionFormat,
    ResponseFormat,
    ResponseHead,
    model_object,
    models_object,
)
from headrace_frontend.promises import KEEP_HEADER, ask_to_keep, kept_object
from headrace_frontend.request.text_threads import Result
from headrace_frontend.tenants import tenant_or_none

_LOG = logging.getLogger(__name__)


_AnswerField: TypeAlias = Literal["text", "token_ids", "logprobs", "stop_text"]
_ERRORS: Final = {
    "/v1/messages": MESSAGES_ERRORS,
    "/v1/messages/count_tokens": MESSAGES_ERRORS,
    "/v1/responses": RESPONSES_ERRORS,
}
_MODEL_PATH: Final = "/v1/models/"
_MODEL_ROUTE: Final = "/v1/models/{model}"
# Of one with logprobs in a response, about.
_PROMPT_TOKEN_BYTES: Final = 128
_ANSWER_FIELDS: Final[Sequence[_AnswerField]] = ("text", "token_ids", "logprobs", "stop_text")

_Handler: TypeAlias = Callable[[HttpExchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Generation:
    """One HTTP request as requests of the InferenceService, one for each prompt."""

    requests: Sequence[inference_pb2.GenerateRequest]
    deadline: Deadline
    streamed: bool
    format: AnswerFormat
    includes: Includes
    formatted: bool = False
    """Whether response_format sets the form of the answer."""
    generates: bool = True
    """Whether the choices have more than the prompt."""

    @property
    def choices(self) -> int:
        """The number of choices of all prompts."""
        return sum(request.n for request in self.requests)


class OpenAiApp:
    """The ASGI application. `deadline_s` bounds requests without a timeout, and `body_bytes_max` every body."""

    def __init__(
        self, parts: OpenAiParts, metrics: MetricsPage, *, deadline_s: float, body_bytes_max: int
    ) -> None:
        self._parts = parts
        self._deadline_s = deadline_s
        self._body_bytes_max = body_bytes_max
        self._started_s = int(time.time())
        self._unknown_fields = UnknownFields(rejected=parts.rejects_unknown_fields)
        self._routes: Mapping[str, tuple[str, _Handler]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._complete),
            "/v1/messages": ("POST", self._messages),
            "/v1/messages/count_tokens": ("POST", self._count_tokens),
            "/v1/responses": ("POST", self._respond),
            "/v1/headrace/keep": ("POST", self._keep),
            "/v1/models": ("GET", self._list_models),
            _MODEL_ROUTE: ("GET", self._describe_model),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/health": ("GET", self._report_health),
            "/ready": ("GET", self._report_ready),
            "/ping": ("GET", self._report_health),
            "/version": ("GET", self._report_version),
            "/load": ("GET", self._report_load),
            "/metrics": ("GET", metrics.respond),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one HTTP request."""
        errors = _ERRORS.get(scope["path"].rstrip("/"), OPENAI_ERRORS)
        exchange = HttpExchange(scope, receive, send, errors)
        exchange.add_header("x-request-id", exchange.request_id)
        try:
            await self._serve_in_bounds(exchange)
        except (HeadraceError, HttpError) as error:
            await exchange.respond_error(error)
        except Exception as error:  # noqa: BLE001 - the outermost frame of a request
            error_id = secrets.token_hex(4)
            _LOG.exception("%s failed, error %s", exchange.path, error_id)
            await exchange.respond_error(
                InternalError(
                    f"a bug in Headrace; the log of this process has error {error_id}",
                    metadata={"error_id": error_id, "exception": type(error).__name__},
                )
            )

    async def _serve_in_bounds(self, exchange: HttpExchange) -> None:
        callers = self._parts.callers
        tenant_now = partial(tenant_or_none, self._parts.tenants, exchange.headers.items())
        tenant = tenant_now()
        exchange.set_caller(caller_name(tenant, exchange.host))
        with callers.call(exchange.caller):
            async with callers.rechecked(tenant_now, tenant):
                await self._serve(exchange)

    async def _serve(self, exchange: HttpExchange) -> None:
        path = exchange.path.rstrip("/")
        if path.startswith(_MODEL_PATH):
            path = _MODEL_ROUTE
        method, handler = self._routes.get(path, ("", None))
        if handler is None:
            raise unknown_path(path, self._routes)
        # A server sends no body for HEAD.
        methods = ("GET", "HEAD") if method == "GET" else (method,)
        if exchange.method not in methods:
            allowed = ", ".join(methods)
            raise HttpError(405, "method", f"use {allowed} for {path}", {"allow": allowed})
        SERVED.set(ServedCall(path, method))
        headers = exchange.headers
        otel_context.attach(
            context_of_carrier(headers.get("traceparent", ""), headers.get("tracestate", ""))
        )
        await handler(exchange)

    def _tenant_of(self, exchange: HttpExchange) -> str:
        with self._parts.count_failures():
            try:
                return self._parts.tenants.tenant_of(exchange.headers.items())
            except Unauthenticated as error:
                # The remedy names gRPC's metadata.
                raise Unauthenticated(
                    "a valid API key is required; send it as header 'Authorization: Bearer KEY'"
                ) from error

    async def _body(self, exchange: HttpExchange, tenant: str, kind: type[BodyKind]) -> BodyKind:
        return (await self._converted(exchange, tenant, kind, lambda body: None))[0]

    async def _converted(
        self,
        exchange: HttpExchange,
        tenant: str,
        kind: type[BodyKind],
        convert: Callable[[BodyKind], Result],
    ) -> tuple[BodyKind, Result]:
        """The body, and what `convert` makes of it. On a thread, unless the body has few values."""
        async with exchange.json_body(self._body_bytes_max) as data:
            await self._parts.callers.wait_turn()
            cost_bytes = self._parts.size.check_json(data)

            def parse() -> tuple[BodyKind, list[str], Result]:
                body = parse_body(kind, data)
                return body, self._unknown_fields.check(body), convert(body)

            body, unknown, converted = await self._parts.preparer.run(tenant, cost_bytes, parse)
        if unknown:
            exchange.add_header("x-headrace-ignored-fields", ", ".join(unknown))
        return body, converted

    async def _chat(self, exchange: HttpExchange) -> None:
        tenant = self._tenant_of(exchange)
        body = await self._body(exchange, tenant, ChatCompletionBody)

        def new_format(head: ResponseHead, model: str, rules: AnswerRules) -> AnswerFormat:
            codec = self._parts.codecs[model]
            return ChatFormat(head, codec, includes=body.includes, rules=rules)

        await self._answer_chat(exchange, tenant, body, "chatcmpl-", new_format)

    async def _messages(self, exchange: HttpExchange) -> None:
        tenant = self._tenant_of(exchange)
        _, chat = await self._converted(
            exchange, tenant, MessagesBody, lambda body: checked_body(ChatCompletionBody, body.chat)
        )
        await self._answer_chat(
            exchange, tenant, chat, "msg_", lambda head, _, rules: MessagesFormat(head, rules)
        )

    async def _respond(self, exchange: HttpExchange) -> None:
        tenant = self._tenant_of(exchange)
        body, chat = await self._converted(
            exchange,
            tenant,
            ResponsesBody,
            lambda body: checked_body(ChatCompletionBody, body.chat),
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

        await self._answer_chat(
            exchange,
            tenant,
            chat,
            "resp_",
            new_format,
            complete=complete,
        )

    async def _answer_chat(
        self,
        exchange: HttpExchange,
        tenant: str,
        body: ChatCompletionBody,
        id_prefix: str,
        new_format: Callable[[ResponseHead, str, AnswerRules], AnswerFormat],
        complete: Callable[[inference_pb2.GenerateRequest], None] = lambda request: None,
    ) -> None:
        """Answers a chat. `new_format` gets the head, the model and the rules of the answer.

        `complete` adds messages that the body does not have.
        """
        request_id = _request_id(exchange, body)
        head, model = self._head(body, id_prefix + request_id)
        rules = rules_of(body, self._parts.parsers[model])
        await self._parts.images.fetch(body.messages, self._parts.codecs[model])
        request = chat_request(body, request_id)
        complete(request)
        if rules.divides:
            # The tags around calls and reasoning may be special tokens. vLLM sets it for calls, too.
            request.sampling.skip_special_tokens = False
        generation = _Generation(
            [request],
            deadline=self._deadline_of(body),
            streamed=body.stream,
            format=new_format(head, model, rules),
            includes=body.includes,
            formatted=body.formatted,
        )
        await self._generate(exchange, generation, tenant)

    async def _complete(self, exchange: HttpExchange) -> None:
        tenant = self._tenant_of(exchange)
        body = await self._body(exchange, tenant, CompletionBody)
        request_id = _request_id(exchange, body)
        head, model = self._head(body, f"cmpl-{request_id}")
        codec = self._parts.codecs[model]
        generation = _Generation(
            completion_requests(body, request_id),
            deadline=self._deadline_of(body),
            streamed=body.stream,
            format=CompletionFormat(
                head,
                codec,
                includes=body.includes,
                skip_special_tokens=body.skip_special_tokens is not False,
                alternatives=body.logprobs or 0,
            ),
            includes=body.includes,
            formatted=body.formatted,
            generates=body.generates,
        )
        await self._generate(exchange, generation, tenant)

    def _head(self, body: GenerationBody, response_id: str) -> tuple[ResponseHead, str]:
        """The head, and the served model. Raises InvalidRequest when neither a model nor an adapter is served."""
        choice = self._parts.preparer.choice(body.model)
        fingerprint = self._parts.models.system_fingerprint(choice) or None
        head = ResponseHead(response_id, int(time.time()), choice.name, fingerprint)
        return head, choice.model

    def _deadline_of(self, body: GenerationBody) -> Deadline:
        return Deadline.after(self._deadline_s if body.timeout_s is None else body.timeout_s)

    async def _generate(self, exchange: HttpExchange, generation: _Generation, tenant: str) -> None:
        respond = self._stream if generation.streamed else self._collect
        chat = not isinstance(generation.format, CompletionFormat)
        try:
            ask_to_keep(exchange.headers.get(KEEP_HEADER), generation.requests)
            form = generation.format
            includes = generation.includes
            if (includes.prompt or includes.prompt_text) and isinstance(form, ResponseFormat):
                for request in generation.requests:
                    tokens, text = await self._prompt_of(generation, request, tenant)
                    form.add_prompt(tokens, request.n, text)
            if isinstance(form, MessagesFormat):
                async with self._parts.runner.admitted(tenant, Deadline.after(self._deadline_s)):
                    await self._parts.preparer.fit(generation.requests[0], tenant)
            await exchange.run_while_connected(respond(exchange, generation, tenant))
        except InvalidRequest as error:
            violations = openai_violations(
                error.violations,
                chat=chat,
                formatted=generation.formatted,
                echoed=not generation.includes.prompt_logprobs,
            )
            raise InvalidRequest(violations, cause=error.cause) from error

    async def _prompt_of(
        self, generation: _Generation, request: inference_pb2.GenerateRequest, tenant: str
    ) -> tuple[Sequence[int], str]:
        """The tokens of a prompt, where the response needs them before its first event, and its text if it has that."""
        preparer = self._parts.preparer
        async with self._parts.runner.admitted(tenant, generation.deadline):
            prepared = await preparer.tokenize(request, tenant)
            text = request.text
            if generation.includes.prompt_text and not text:
                decode = partial(
                    prepared.codec.decode, prepared.token_ids, skip_special_tokens=False
                )
                text = await preparer.run(tenant, 4 * len(prepared.token_ids), decode)
        return prepared.token_ids, text

    async def _stream(self, exchange: HttpExchange, generation: _Generation, tenant: str) -> None:
        """Sends an event for each message of each choice."""
        prompts = len(generation.requests)
        events = EventStream(
            exchange, generation.format, choices=generation.choices, prompts=prompts
        )
        await self._run_all(generation, tenant, events.write, events)
        await events.finish()

    async def _collect(self, exchange: HttpExchange, generation: _Generation, tenant: str) -> None:
        """Sends one object at the end."""
        form = generation.format
        choices = [CollectedChoice() for _ in range(generation.choices)]

        async def write(index: int, message: inference_pb2.GenerateResponse) -> None:
            choices[index].add(message, form.tokens_of(message))

        await self._run_all(generation, tenant, write)
        prompt_tokens = sum(len(choice.prompt_token_ids) for choice in choices)
        body = await self._parts.preparer.run(
            tenant,
            _PROMPT_TOKEN_BYTES * prompt_tokens,
            partial(form.whole, choices, len(generation.requests)),
        )
        await exchange.respond(200, body)

    async def _run_all(
        self,
        generation: _Generation,
        tenant: str,
        write: Callable[[int, inference_pb2.GenerateResponse], Awaitable[None]],
        events: EventStream | None = None,
    ) -> None:
        """Runs the requests of all prompts. The first error ends them all. `events` may send messages at once."""

        async def run(first_index: int, request: inference_pb2.GenerateRequest) -> None:
            async def write_choice(message: inference_pb2.GenerateResponse) -> None:
                if not generation.generates:
                    _leave_out_answer(message)
                await write(first_index + message.choice, message)

            outlets: Outlets | None = None
            if events is not None and generation.generates:
                outlets = Outlets(
                    partial(events.write_text, first_index), partial(events.write_now, first_index)
                )
            await self._parts.runner.run(
                request, tenant, generation.deadline, write_choice, outlets
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

    async def _list_models(self, exchange: HttpExchange) -> None:
        self._tenant_of(exchange)
        models = self._parts.models.list_models()
        await exchange.respond_object(models_object(models, self._started_s))

    async def _describe_model(self, exchange: HttpExchange) -> None:
        self._tenant_of(exchange)
        name = exchange.path.rstrip("/").removeprefix(_MODEL_PATH)
        for model in self._parts.models.list_models():
            if model.name == name:
                await exchange.respond_object(model_object(model, self._started_s))
                return
        remedy = f"{name[:64]!r} is not served; /v1/models lists what is"
        raise InvalidRequest({"model": remedy}, cause="model_not_found")

    async def _count_tokens(self, exchange: HttpExchange) -> None:
        tenant = self._tenant_of(exchange)
        _, prompt = await self._converted(
            exchange, tenant, CountTokensBody, lambda body: checked_body(TokenizeBody, body.prompt)
        )
        _, tokens = await self._tokens_of(prompt, tenant)
        await exchange.respond_object({"input_tokens": len(tokens)})

    async def _keep(self, exchange: HttpExchange) -> None:
        tenant = self._tenant_of(exchange)
        body = await self._body(exchange, tenant, KeepBody)
        request = inference_pb2.KeepRequest(
            id=body.id, duration=duration_from_seconds(body.seconds)
        )
        deadline = Deadline.after(self._deadline_s)
        async with self._parts.runner.admitted(tenant, deadline):
            kept = await self._parts.keep(tenant, request, deadline)
        await exchange.respond_object(kept_object(kept))

    async def _tokenize(self, exchange: HttpExchange) -> None:
        tenant = self._tenant_of(exchange)
        body = await self._body(exchange, tenant, TokenizeBody)
        model, tokens = await self._tokens_of(body, tenant)
        preparer = self._parts.preparer
        texts = None
        if body.return_token_strs:
            texts = await preparer.token_texts(model, tokens, tenant)
        await exchange.respond_object(
            {
                "count": len(tokens),
                "max_model_len": preparer.max_model_len(model),
                "tokens": list(tokens),
                "token_strs": texts,
            }
        )

    async def _tokens_of(self, body: TokenizeBody, tenant: str) -> tuple[str, Sequence[int]]:
        """The model, and the tokens of the prompt."""
        preparer = self._parts.preparer
        if body.messages is not None:
            model = preparer.choice(body.model).model
            await self._parts.images.fetch(body.messages, self._parts.codecs[model])
        try:
            async with self._parts.runner.admitted(tenant, Deadline.after(self._deadline_s)):
                prepared = await preparer.tokenize(
                    tokenize_request(body),
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
            violations = openai_violations(error.violations, chat=False)
            raise InvalidRequest(violations, cause=error.cause) from error
        return prepared.model, tokens

    async def _detokenize(self, exchange: HttpExchange) -> None:
        tenant = self._tenant_of(exchange)
        body = await self._body(exchange, tenant, DetokenizeBody)
        model = self._parts.preparer.choice(body.model).model
        async with self._parts.runner.admitted(tenant, Deadline.after(self._deadline_s)):
            text = await self._parts.preparer.detokenize(model, body.tokens, tenant)
        await exchange.respond_object({"prompt": text})

    async def _report_health(self, exchange: HttpExchange) -> None:
        await exchange.respond_object({"status": "ok"})

    async def _report_version(self, exchange: HttpExchange) -> None:
        await exchange.respond_object({"version": version()})

    async def _report_load(self, exchange: HttpExchange) -> None:
        self._tenant_of(exchange)
        await exchange.respond_object({"server_load": self._parts.runner.requests})

    async def _report_ready(self, exchange: HttpExchange) -> None:
        """200 while new requests can be served."""
        self._parts.runner.reject_when_draining()
        if not self._parts.models.list_models():
            raise HttpError(503, "no_decode_worker", "no decode worker serves a model yet")
        await exchange.respond_object({"status": "ready"})


def _request_id(exchange: HttpExchange, body: GenerationBody) -> str:
    """The id of the request in traces. No header is too long for it, and none has a character that it may not have."""
    own = body.request_id and "x-request-id" not in exchange.headers
    given = body.request_id if own else exchange.request_id
    return id_of(given)


def _leave_out_answer(message: inference_pb2.GenerateResponse) -> None:
    """Leaves nothing but the prompt in a message."""
    for name in _ANSWER_FIELDS:
        message.ClearField(name)
    if message.finish_reason:
        message.finish_reason = sampling_pb2.FINISH_REASON_LENGTH
        message.usage.completion_tokens = 0
