"""What is stored over gRPC."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.inference.v1 import inference_pb2, store_pb2
from headrace_common.errors import InvalidRequest, NotFound
from headrace_frontend.conversations import ConversationStore
from headrace_frontend.openai.block_apis.stored import StoredObject, StoredObjects
from headrace_frontend.store import Store
from headrace_router.store import StoreServicer, stored


async def test_a_router_that_keeps_nothing_refuses_to_store() -> None:
    async def write(message: inference_pb2.GenerateResponse) -> None:
        raise AssertionError

    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="a")])
    request = inference_pb2.GenerateRequest(chat=chat, store=True)
    with pytest.raises(InvalidRequest, match=r"store: .*conversations_mib"):
        await stored(ConversationStore(Store(0, 1.0)), request, "t", write)


@pytest.mark.parametrize("operation", ["all", "cancel", "events", "items", "item", "x", "messages"])
@pytest.mark.parametrize("arguments", [b"", b"\xff", b"[]", b'{"limit": {}}', b'{"item_id": "y"}'])
async def test_a_malformed_request_of_a_router_is_refused_by_name(
    operation: str, arguments: bytes
) -> None:
    store = Store(2**20, 60.0)
    objects = StoredObjects(store, ConversationStore(store))
    objects.put("t", StoredObject(ids={"resp_1": 0}, value="{}", items={}))
    request = store_pb2.UseEntryRequest(
        tenant="t", id="resp_1", operation=operation, arguments=arguments
    )
    context: Any = None
    try:
        answer = await StoreServicer(objects, None).UseEntry(request, context)
    except (InvalidRequest, NotFound):
        return
    assert json.loads(answer.result) == [] or json.loads(answer.result)["data"] == []
