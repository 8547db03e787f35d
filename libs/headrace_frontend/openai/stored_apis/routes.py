"""The routes of responses and of conversations, which are stored between requests."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from urllib.parse import parse_qsl

from headrace.inference.v1 import inference_pb2
from headrace_common.callers.bounds import current_input
from headrace_common.deadlines import Deadline
from headrace_common.errors import InvalidRequest, NotFound
from headrace_common.http.exchange import HttpError, HttpExchange
from headrace_frontend.conversations import ContinuedChat
from headrace_frontend.openai.answers import AnswerRules
from headrace_frontend.openai.block_apis.responses_answers import RESPONSES_ERRORS, ResponsesFormat
from headrace_frontend.openai.block_apis.responses_bodies import (
    ResponsesBody,
    messages_of_output,
)
from headrace_frontend.openai.block_apis.stored import (
    PREFIXES,
    Arguments,
    ConversationBody,
    StoredObject,
    StoredObjects,
    items_by_id,
    require_kind,
    require_room,
    response_of_item,
    stored_items,
    stored_json,
)
from headrace_frontend.openai.body import checked_body
from headrace_frontend.openai.conversion import chat_message, openai_error
from headrace_frontend.openai.errors import serve
from headrace_frontend.openai.event_stream import STREAM_HEADERS
from headrace_frontend.openai.intake import ClientParts, Intake
from headrace_frontend.openai.responses import AnswerFormat, ResponseHead
from headrace_frontend.openai.routes import (
    Chat,
    GenerateRoutes,
    Generation,
    chat_of,
    request_id_of,
    with_request,
)
from headrace_frontend.openai.stored_apis.background import BackgroundClient
from headrace_frontend.request.computations import PARSE
from headrace_frontend.request.preparation import RequestPreparer

REFERRED_MAX: Final = 512
"""Responses that the items of one request refer to. Each may be on another router."""
# Of a token in JSON, and those that take as long to write as a byte to tokenize.
_TOKEN_BYTES: Final = 8
_JSON_BYTES: Final = 64


@dataclass(slots=True)
class _Turn:
    """One request for a response, with what is stored of it."""

    tenant: str
    body: ResponsesBody
    objects: StoredObjects
    stores: bool
    items: dict[str, str]
    """Those of its input, until nothing needs them any more."""
    chat: ContinuedChat
    preparer: RequestPreparer
    entry: StoredObject | None = field(default=None, init=False)

    def complete(self, request: inference_pb2.GenerateRequest) -> None:
        """Adds the earlier messages and the instructions."""
        self.chat.complete(request.chat, self.body.instructions or "")
        known = self.body.conversation_id or self.chat.name
        known = known or (PREFIXES["responses"] + request.request_id if self.stores else "")
        request.conversation_id = request.conversation_id or known

    def begin(self, response: Mapping[str, Any]) -> None:
        """Stores the response before its first text."""
        if self.stores:
            self.entry = StoredObject(
                ids={response["id"]: 0},
                value=json.dumps(response),
                items=dict(self.items),
                streams=bool(self.body.background and self.body.stream),
            )
            self.objects.put(self.tenant, self.entry)
        if not self.body.conversation_id:
            self.items.clear()

    async def save(self, response: Mapping[str, Any]) -> None:
        """Stores the whole response, also in its conversation."""
        output, conversation_id = response["output"], self.body.conversation_id
        if conversation_id:
            new = {**self.items, **items_by_id(output)}
            await self.objects.use(self.tenant, conversation_id, "append", items=new)
        elif self.entry is not None and not self.entry.ended:
            # It was not deleted meanwhile.
            self.chat.save(response["id"], map(chat_message, messages_of_output(output)))
        if self.entry is not None and not self.body.background:
            size = len(self.entry.value) + _TOKEN_BYTES * response["usage"]["output_tokens"]
            work = partial(stored_json, response)
            made = await self.preparer.threads.run(self.tenant, PARSE, size // _JSON_BYTES, work)
            self.entry.set_json(*made)
            self.entry.close()
            self.objects.put(self.tenant, self.entry)

    def end(self) -> None:
        """Drops what is stored of a response that has failed."""
        if self.entry is not None and not (self.entry.ended or self.body.background):
            self.objects.remove(self.tenant, self.entry)


class ResponsesRoutes:
    """/v1/responses, /v1/conversations and what is below them. A tenant finds its own entries only."""

    def __init__(self, parts: ClientParts, intake: Intake, generate: GenerateRoutes) -> None:
        self._parts = parts
        self._intake = intake
        self._objects = parts.objects
        self._generate = generate
        self._running: set[asyncio.Task[None]] = set()

    async def drain(self, deadline: Deadline) -> None:
        """Waits for what runs in the background, until the deadline."""
        if self._running:
            await asyncio.wait(set(self._running), timeout=deadline.remaining_s())

    async def respond(self, exchange: HttpExchange) -> None:
        """/v1/responses."""
        turn, chat = await self._read(exchange)
        body = turn.body
        echoed, namespaced = body.echoed | {"store": turn.stores}, body.namespaced
        customs = body.customs

        def new_format(head: ResponseHead, model: str, rules: AnswerRules) -> AnswerFormat:
            codec = self._parts.codecs[model]
            form = ResponsesFormat(head, rules, echoed, codec, namespaced, turn.save, customs)
            turn.begin(form.begun("queued" if body.background else "in_progress"))
            return form

        answer = partial(self._answer_in_background, turn) if body.background else None
        try:
            await self._generate.answer_chat(
                exchange,
                turn.tenant,
                chat,
                PREFIXES["responses"],
                new_format,
                turn.complete,
                answer,
            )
        finally:
            turn.end()

    async def _answer_in_background(
        self, turn: _Turn, exchange: HttpExchange, generation: Generation
    ) -> None:
        """Starts the answer, which goes on without the client."""
        entry = turn.entry
        if entry is None or entry.ended:
            raise InvalidRequest({"background": "has no room here: conversations_mib is too small"})
        client = BackgroundClient(entry, exchange, partial(self._objects.put, turn.tenant, entry))

        async def run() -> None:
            client.exchange.end_with_client()
            call, recheck = self._intake.in_bounds(client.exchange)
            with call, recheck:
                if (sent := current_input()) is not None:
                    sent.add(sum(request.ByteSize() for request in generation.requests))
                await self._generate.answer(client.exchange, generation)

        task = asyncio.create_task(serve(client.exchange, run(), RESPONSES_ERRORS))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        if turn.body.stream:
            response_id = PREFIXES["responses"] + generation.requests[0].request_id
            await self._follow(exchange, turn.tenant, response_id)
        else:
            await exchange.respond(200, entry.value.encode())

    async def _follow(
        self, exchange: HttpExchange, tenant: str, response_id: str, after: int = -1
    ) -> None:
        """Streams the events of a response after that with this sequence number."""
        ping_s, silent_s = self._parts.stream_ping_s, 0.0
        loop = asyncio.get_running_loop()
        ended = False
        while not ended:
            begun_s = loop.time()
            found = json.loads(
                await self._objects.use(tenant, response_id, "events", starting_after=after)
            )
            after, ended, events = found["last"], found["ended"], found["events"]
            silent_s = 0.0 if events else silent_s + loop.time() - begun_s
            if ping_s and silent_s >= ping_s:
                events, silent_s = [":"], 0.0
            if events or not exchange.started:
                data = "".join(f"{event}\n\n" for event in events).encode()
                await exchange.write(data, STREAM_HEADERS)
        await exchange.finish()

    async def count_tokens(self, exchange: HttpExchange) -> None:
        """/v1/responses/input_tokens."""
        turn, chat = await self._read(exchange)
        request = await self._generate.request_of(exchange, turn.tenant, chat, turn.complete)
        try:
            async with self._intake.admitted(turn.tenant):
                prepared = await self._parts.preparer.tokenize(request, turn.tenant)
        except InvalidRequest as error:
            renamed, formatted = ResponsesFormat.renamed, chat[0].formatted
            raise openai_error(error, chat=True, renamed=renamed, formatted=formatted) from error
        count = len(prepared.token_ids)
        await exchange.respond_object({"object": "response.input_tokens", "input_tokens": count})

    async def _read(self, exchange: HttpExchange) -> tuple[_Turn, Chat]:
        """The request, and the chat that it asks for."""

        def convert(body: ResponsesBody) -> tuple[dict[str, str], Chat | None]:
            items = stored_items(body.sent_input, request_id_of(exchange, body))
            later = body.needs_stored_items
            return items, None if later else with_request(exchange, chat_of(body))

        tenant, body, (items, chat) = await self._intake.converted(exchange, ResponsesBody, convert)
        previous_id = body.previous_response_id or ""
        try:
            resumed = await self._parts.conversations.resume(tenant, previous_id)
        except NotFound as error:
            raise HttpError(404, "previous_response_not_found", error.detail) from error
        stores = self._objects.keeps and body.store is not False
        turn = _Turn(tenant, body, self._objects, stores, items, resumed, self._parts.preparer)
        if chat is None:
            chat = await self._with_stored_items(exchange, turn)
        # Its images take memory.
        body.use_input(())
        return turn, chat

    async def _with_stored_items(self, exchange: HttpExchange, turn: _Turn) -> Chat:
        """The chat with the items that the request names. Raises NotFound, and InvalidRequest for too many."""
        body, tenant = turn.body, turn.tenant
        if len(set(map(response_of_item, body.references))) > REFERRED_MAX:
            remedy = f"refers to more than {REFERRED_MAX} responses; send the items themselves"
            raise InvalidRequest({"input": remedy})
        earlier: list[dict[str, Any]] = []
        if body.conversation_id:
            require_kind(body.conversation_id, "conversations")
            earlier = await self._items_of(tenant, body.conversation_id)
            require_room(len(earlier) + len(turn.items))
        in_context = {item["id"] for item in earlier}
        known: dict[str, str] = {}
        for item_id in body.references:
            if item_id in in_context:
                del turn.items[item_id]
                continue
            if item_id not in known:
                known |= items_by_id(await self._items_of(tenant, response_of_item(item_id)))
            if item_id not in known:
                raise NotFound(f"{item_id[:64]} is no stored item; send the item itself")
            turn.items[item_id] = known[item_id]

        def convert() -> Chat:
            body.use_input([*earlier, *map(json.loads, turn.items.values())])
            return with_request(exchange, chat_of(body))

        return await self._parts.preparer.threads.run(tenant, PARSE, PARSE.loop_max + 1, convert)

    async def _items_of(self, tenant: str, entry_id: str) -> list[dict[str, Any]]:
        """All items of an entry. They count as if the client had sent them again: see RequestInput."""
        found = await self._objects.use(tenant, entry_id, "all")
        if (sent := current_input()) is not None:
            sent.add(len(found))
        items: list[dict[str, Any]] = await self._parts.preparer.threads.run(
            tenant, PARSE, PARSE.loop_max + 1, partial(json.loads, found)
        )
        return items

    async def create_conversation(self, exchange: HttpExchange) -> None:
        """/v1/conversations."""
        name = secrets.token_hex(24)
        tenant, body, items = await self._new_items(exchange, name)
        if not self._objects.keeps:
            raise InvalidRequest({"conversation": "none is kept here: conversations_mib is 0"})
        conversation_id = PREFIXES["conversations"] + name
        fields = {"object": "conversation", "created_at": int(time.time())}
        value = json.dumps({"id": conversation_id, **fields, "metadata": body.metadata})
        entry = StoredObject(ids={conversation_id: 0}, value=value, items=items)
        self._objects.put(tenant, entry)
        await exchange.respond(200, value.encode())

    async def _new_items(
        self, exchange: HttpExchange, owner: str
    ) -> tuple[str, ConversationBody, dict[str, str]]:
        """The tenant, what it sets of a conversation, and the items with their ids."""
        return await self._intake.converted(
            exchange, ConversationBody, lambda body: stored_items(body.sent_items, owner)
        )

    async def retrieve(self, exchange: HttpExchange) -> None:
        """GET /v1/responses/{id}."""
        query = _query(exchange)
        if not query.stream:
            await self.use("retrieve", exchange)
            return
        tenant, (response_id, *_) = self._intake.tenant_of(exchange), _names(exchange)
        await self._follow(exchange, tenant, response_id, query.starting_after)

    async def use(self, operation: str, exchange: HttpExchange) -> None:
        """Answers with the result of an operation on the entry that the path names."""
        entry_id, *item_ids = _names(exchange)
        given = _query(exchange).model_dump(exclude_unset=True)
        if operation in ("add", "update"):
            tenant, body, items = await self._new_items(exchange, secrets.token_hex(24))
            given |= {"metadata": body.metadata, "items": items}
        else:
            tenant = self._intake.tenant_of(exchange)
        if item_ids:
            given["item_id"] = item_ids[0]
        found = await self._objects.use(tenant, entry_id, operation, **given)
        await exchange.respond(200, found.encode())


def _query(exchange: HttpExchange) -> Arguments:
    return checked_body(Arguments, dict(parse_qsl(exchange.query)))


def _names(exchange: HttpExchange) -> list[str]:
    """The ids in a path such as /v1/conversations/{id}/items/{item_id}. Raises InvalidRequest."""
    _, kind, *rest = exchange.path.strip("/").split("/")
    require_kind(rest[0], kind)
    return rest[::2]
