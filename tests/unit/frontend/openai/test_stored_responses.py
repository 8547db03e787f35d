"""Responses that continue stored ones: equal to a client that sends the whole conversation."""

from __future__ import annotations

import json
from typing import Any

from tests.kit.openai_app import LocalApp, Reply


async def respond(app: LocalApp, given: Any, **fields: Any) -> tuple[Reply, dict[str, Any]]:
    reply = await app.post("/v1/responses", {"model": "sim", "input": given, **fields})
    assert reply.status == 200, reply.body
    body: dict[str, Any] = json.loads(reply.body)
    return reply, body


async def test_a_continued_response_has_the_prompt_of_the_whole_conversation() -> None:
    app = LocalApp()
    ask = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    _, first = await respond(app, ask, instructions="old", request_id="1")
    assert first["store"] is True
    more = [{"role": "user", "content": "and now?"}]
    reply, second = await respond(app, more, previous_response_id=first["id"], instructions="new")
    assert second["previous_response_id"] == first["id"]
    whole, _ = await respond(app, [*ask, *first["output"], *more], instructions="new", store=False)
    assert reply.prepared[0].token_ids == whole.prepared[0].token_ids
    assert reply.requests[0].chat == whole.requests[0].chat
    assert reply.requests[0].chat.messages[0].content == "new\n\nbe brief"


async def test_a_streamed_response_can_be_continued_once_its_end_is_sent() -> None:
    app = LocalApp()
    streamed = await app.post("/v1/responses", {"model": "sim", "input": "hi", "stream": True})
    last = json.loads(streamed.body.strip().rsplit(b"data: ", 1)[1])
    reply, _ = await respond(app, "more", previous_response_id=last["response"]["id"])
    roles = [message.role for message in reply.requests[0].chat.messages]
    assert roles == ["user", "assistant", "user"]


async def test_what_is_not_stored_is_not_found() -> None:
    app = LocalApp()
    _, first = await respond(app, "hi", store=False)
    assert first["store"] is False
    reply = await app.post(
        "/v1/responses", {"model": "sim", "input": "x", "previous_response_id": first["id"]}
    )
    assert (reply.status, reply.error["code"]) == (404, "previous_response_not_found")
    assert "send all of its messages" in reply.error["message"]
