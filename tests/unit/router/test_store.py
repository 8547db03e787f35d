"""What is stored over gRPC."""

from __future__ import annotations

import pytest

from headrace.inference.v1 import inference_pb2
from headrace_common.errors import InvalidRequest
from headrace_frontend.conversations import ConversationStore
from headrace_frontend.store import Store
from headrace_router.store import stored


async def test_a_router_that_keeps_nothing_refuses_to_store() -> None:
    async def write(message: inference_pb2.GenerateResponse) -> None:
        raise AssertionError

    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="a")])
    request = inference_pb2.GenerateRequest(chat=chat, store=True)
    with pytest.raises(InvalidRequest, match=r"store: .*conversations_mib"):
        await stored(ConversationStore(Store(0, 1.0)), request, "t", write)
