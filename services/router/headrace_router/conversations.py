"""Conversations that clients continue: on this router, and found on the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any, Final

import grpc.aio

from headrace.inference.v1 import conversation_pb2, conversation_pb2_grpc, inference_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.errors import InvalidRequest, NotFound
from headrace_frontend.answers import request_id_of
from headrace_frontend.conversations import ConversationStore
from headrace_frontend.request.response_stream import ResponseWriter

_FIND_S: Final = 2.0
# Asked at once.
_ROUTERS_MAX: Final = 64


class OtherRouters:
    """Finds conversations on the routers of the deployment. This router is asked again, which finds nothing."""

    def __init__(self, open_channel: Callable[[str], grpc.aio.Channel]) -> None:
        self._open_channel = open_channel
        self._endpoints: list[str] = []

    def update(self, members: Collection[registry_pb2.Member]) -> None:
        """Replaces the members that the registry lists."""
        self._endpoints = [
            member.endpoint for member in members if member.role == registry_pb2.Member.ROLE_ROUTER
        ][:_ROUTERS_MAX]

    async def find(self, tenant: str, response_id: str) -> bytes | None:
        """The messages of a conversation. None when no router answers with it within 2 s."""
        asked = [
            asyncio.create_task(self._ask(endpoint, tenant, response_id))
            for endpoint in self._endpoints
        ]
        try:
            for answered in asyncio.as_completed(asked, timeout=_FIND_S):
                if (found := await answered) is not None:
                    return found
        except TimeoutError:
            pass
        finally:
            for task in asked:
                task.cancel()
        return None

    async def _ask(self, endpoint: str, tenant: str, response_id: str) -> bytes | None:
        request = conversation_pb2.FindConversationRequest(tenant=tenant, response_id=response_id)
        async with self._open_channel(endpoint) as channel:
            stub = conversation_pb2_grpc.ConversationServiceStub(channel)
            try:
                answer = await stub.FindConversation(request, timeout=_FIND_S)
            except grpc.aio.AioRpcError:
                # It does not keep the conversation, or does not answer. Then the client sends the whole.
                return None
        return answer.chat.SerializeToString()


class ConversationServicer(conversation_pb2_grpc.ConversationServiceServicer):
    """Answers other routers."""

    def __init__(self, store: ConversationStore) -> None:
        self._store = store

    async def FindConversation(
        self,
        request: conversation_pb2.FindConversationRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> conversation_pb2.FindConversationResponse:
        """See conversation.proto."""
        found = self._store.find_here(request.tenant, request.response_id)
        if found is None:
            raise NotFound("this router does not keep the conversation; ask another one")
        return conversation_pb2.FindConversationResponse(chat=inference_pb2.Chat.FromString(found))


async def stored(
    store: ConversationStore,
    request: inference_pb2.GenerateRequest,
    tenant: str,
    write: ResponseWriter,
) -> ResponseWriter:
    """Completes a gRPC request that resumes a conversation, and returns a writer that stores its answer, if it asks so.

    The answer is stored as the client gets it, as content.

    Raises NotFound, and InvalidRequest where none can be stored.
    """
    if not (request.resume or request.store) or not request.HasField("chat"):
        return write
    if request.store and not store.keeps:
        raise InvalidRequest(
            {"store": "this router keeps no conversations: conversations_mib is 0"}
        )
    turn = await store.resume(tenant, request.resume)
    request.resume = ""
    turn.complete(request.chat)
    request.request_id = request_id_of(request)
    request.conversation_id = request.conversation_id or turn.name or request.request_id
    if not request.store:
        return write
    texts: list[str] = []

    async def write_and_store(message: inference_pb2.GenerateResponse) -> None:
        texts.append(message.text)
        if message.finish_reason:
            answer = inference_pb2.ChatMessage(role="assistant", content="".join(texts))
            turn.save(request.request_id, [answer])
        await write(message)

    return write_and_store
