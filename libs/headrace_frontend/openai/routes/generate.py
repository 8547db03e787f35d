"""The routes that generate: completions, and chats in the forms of three APIs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.inference.v1 import inference_pb2
from headrace_common.errors import NotFound
from headrace_frontend.openai.answers import AnswerRules, rules_of
from headrace_frontend.openai.block_apis.anthropic_answers import MessagesFormat
from headrace_frontend.openai.block_apis.anthropic_bodies import MessagesBody
from headrace_frontend.openai.block_apis.responses_answers import ResponsesFormat
from headrace_frontend.openai.block_apis.responses_bodies import ResponsesBody, messages_of_output
from headrace_frontend.openai.body import checked_body
from headrace_frontend.openai.completion_format import CompletionFormat
from headrace_frontend.openai.conversion import (
    chat_message,
    chat_request,
    completion_requests,
    id_of,
)
from headrace_frontend.openai.errors import HttpError
from headrace_frontend.openai.exchange import HttpExchange
from headrace_frontend.openai.parts import OpenAiParts
from headrace_frontend.openai.requests import ChatCompletionBody, CompletionBody, GenerationBody
from headrace_frontend.openai.responses import AnswerFormat, ChatFormat, ResponseHead
from headrace_frontend.openai.routes.answering import Answering, Generation
from headrace_frontend.openai.routes.intake import Intake


class GenerateRoutes:
    """Makes requests of the InferenceService from bodies, and formats for the answers."""

    def __init__(self, parts: OpenAiParts, intake: Intake) -> None:
        self._parts = parts
        self._intake = intake
        self._answering = Answering(parts, intake)

    async def complete(self, exchange: HttpExchange) -> None:
        """/v1/completions."""
        tenant, body = await self._intake.read(exchange, CompletionBody)
        request_id = _request_id(exchange, body)
        head, model = self._head(body, f"cmpl-{request_id}")
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
            completion_requests(body, request_id),
            deadline=self._intake.deadline(body.timeout_s),
            format=form,
            generates=body.generates,
        )
        await self._answering.answer(exchange, generation)

    async def chat(self, exchange: HttpExchange) -> None:
        """/v1/chat/completions."""
        tenant, body = await self._intake.read(exchange, ChatCompletionBody)

        def new_format(head: ResponseHead, model: str, rules: AnswerRules) -> AnswerFormat:
            codec = self._parts.codecs[model]
            return ChatFormat(head, codec, includes=body.includes, rules=rules)

        await self._answer_chat(exchange, tenant, body, "chatcmpl-", new_format)

    async def messages(self, exchange: HttpExchange) -> None:
        """/v1/messages."""
        tenant, _, chat = await self._intake.converted(exchange, MessagesBody, _chat_of)
        await self._answer_chat(
            exchange, tenant, chat, "msg_", lambda head, _, rules: MessagesFormat(head, rules)
        )

    async def respond(self, exchange: HttpExchange) -> None:
        """/v1/responses."""
        tenant, body, chat = await self._intake.converted(exchange, ResponsesBody, _chat_of)
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


def _chat_of(body: MessagesBody | ResponsesBody) -> ChatCompletionBody:
    return checked_body(ChatCompletionBody, body.chat)


def _request_id(exchange: HttpExchange, body: GenerationBody) -> str:
    """The id of the request in traces. No header is too long for it, and none has a character that it may not have."""
    own = body.request_id and "x-request-id" not in exchange.headers
    given = body.request_id if own else exchange.request_id
    return id_of(given)
