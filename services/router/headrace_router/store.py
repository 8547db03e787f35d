"""What clients of this router have stored: here, and on the other routers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any, Final

import grpc.aio

from headrace.inference.v1 import inference_pb2, store_pb2, store_pb2_grpc
from headrace.registry.v1 import registry_pb2
from headrace_common.errors import InvalidRequest, NotFound
from headrace_common.rpc.status import error_from_rpc
from headrace_frontend.answers import request_id_of
from headrace_frontend.conversations import ConversationStore
from headrace_frontend.openai.batches.batches import Arguments, Batches
from headrace_frontend.openai.batches.folder import BATCH, FILE
from headrace_frontend.openai.block_apis.stored import StoredObjects
from headrace_frontend.openai.body import parse_body
from headrace_frontend.request.response_stream import ResponseWriter

_ASK_S: Final = 2.0
# Asked at once.
_ROUTERS_MAX: Final = 64


class OtherRouters:
    """Finds entries on the routers of the deployment. This router is asked again, which finds nothing."""

    def __init__(self, open_channel: Callable[[str], grpc.aio.Channel]) -> None:
        self._open_channel = open_channel
        self._endpoints: list[str] = []

    def update(self, members: Collection[registry_pb2.Member]) -> None:
        """Replaces the members that the registry lists."""
        self._endpoints = [
            member.endpoint for member in members if member.role == registry_pb2.Member.ROLE_ROUTER
        ][:_ROUTERS_MAX]

    async def ask(
        self, tenant: str, entry_id: str, operation: str, arguments: bytes
    ) -> bytes | None:
        """The result of an operation on an entry. None when no router answers with one within 2 s.

        Raises InvalidRequest when the entry does not permit it.
        """
        request = store_pb2.UseEntryRequest(
            tenant=tenant, id=entry_id, operation=operation, arguments=arguments
        )
        asked = [asyncio.create_task(self._ask(one, request)) for one in self._endpoints]
        try:
            for answered in asyncio.as_completed(asked, timeout=_ASK_S):
                if (found := await answered) is not None:
                    return found
        except TimeoutError:
            pass
        finally:
            for task in asked:
                task.cancel()
        return None

    async def _ask(self, endpoint: str, request: store_pb2.UseEntryRequest) -> bytes | None:
        async with self._open_channel(endpoint) as channel:
            try:
                answer = await store_pb2_grpc.StoreServiceStub(channel).UseEntry(
                    request, timeout=_ASK_S
                )
            except grpc.aio.AioRpcError as rpc_error:
                error = error_from_rpc(rpc_error)
                if isinstance(error, InvalidRequest):
                    raise error from rpc_error
                # It has no such entry, or does not answer. Then the client sends the whole.
                return None
        return answer.result


class StoreServicer(store_pb2_grpc.StoreServiceServicer):
    """Answers other routers."""

    def __init__(self, objects: StoredObjects, batches: Batches | None) -> None:
        self._objects, self._batches = objects, batches

    async def UseEntry(
        self,
        request: store_pb2.UseEntryRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> store_pb2.UseEntryResponse:
        """See store.proto."""
        asked = request.tenant, request.id, request.operation
        if request.id.startswith((FILE, BATCH)):
            given = parse_body(Arguments, request.arguments)
            found = None if self._batches is None else await self._batches.use_here(*asked, given)
        else:
            found = await self._objects.use_for_others(*asked, request.arguments)
        if found is None:
            raise NotFound("this router does not have the entry; ask another one")
        return store_pb2.UseEntryResponse(result=found)


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
