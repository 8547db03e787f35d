"""Responses that continue stored ones: equal to a client that sends the whole conversation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from headrace_common import limits
from headrace_common.callers.bounds import CallerBounds
from headrace_common.errors import WorkerGone
from headrace_frontend.openai.block_apis.stored import stored_json
from headrace_frontend.request.computations import Computation
from tests.kit.openai_app import LocalApp, NoThreads, Reply, Request


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


@pytest.mark.parametrize(("characters", "on_thread"), [(10, False), (100_000, True)])
async def test_a_large_response_is_serialized_on_a_thread(
    characters: int, on_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = LocalApp(texts=["x" * characters], store_bytes=2**24)
    found: list[bool] = []

    async def run(
        self: NoThreads, tenant: str, kind: Computation, units: int, work: Callable[[], Any]
    ) -> Any:
        if isinstance(work, partial) and work.func is stored_json:
            found.append(units > kind.loop_max)
        return work()

    monkeypatch.setattr(NoThreads, "run", run)
    await respond(app, "hi")
    assert found == [on_thread]


async def test_what_is_not_stored_is_not_found() -> None:
    app = LocalApp()
    _, first = await respond(app, "hi", store=False)
    assert first["store"] is False
    reply = await app.post(
        "/v1/responses", {"model": "sim", "input": "x", "previous_response_id": first["id"]}
    )
    assert (reply.status, reply.error["code"]) == (404, "previous_response_not_found")
    assert "send all of its messages" in reply.error["message"]


async def use(app: LocalApp, method: str, path: str, body: Any = None, query: str = "") -> Reply:
    data = json.dumps(body or {}).encode()
    request = Request(data, path=path, method=method, query=query)
    await app.status(request)
    return request.reply()


ITEM = {"role": "user", "content": "x"}
REFERENCE = {"type": "item_reference", "id": "msg_1_0"}
REFERENCES = [{**REFERENCE, "id": f"msg_{number}_0"} for number in range(513)]
BACKGROUND = {"background": True, "stream": True}


@pytest.mark.parametrize(
    "method, path, body, query, status, text",
    [
        ("PUT", "/v1/responses/resp_1", {}, "", 405, "use GET, DELETE, HEAD"),
        ("GET", "/v1/responses/resp_1/x", {}, "", 404, "use one of"),
        ("GET", "/v1/conversations/conv_1/items/i/x/y", {}, "", 404, "use one of"),
        ("GET", "/v1/responses/conv_1", {}, "", 400, "must begin with 'resp_'"),
        ("GET", "/v1/conversations/resp_1", {}, "", 400, "must begin with 'conv_'"),
        ("GET", f"/v1/responses/resp_{'x' * 300}", {}, "", 404, "send all items"),
        ("GET", "/v1/responses/{id}", {}, "stream=true", 400, "background and stream"),
        ("GET", "/v1/responses/{id}", {}, "starting_after=-2", 400, "-1 or more"),
        ("GET", "/v1/responses/{id}/input_items", {}, "limit=101", 400, "100 or less"),
        ("GET", "/v1/responses/{id}/input_items", {}, "limit=0", 400, "1 or more"),
        ("GET", "/v1/responses/{id}/input_items", {}, "order=up", 400, "'asc' or 'desc'"),
        ("GET", "/v1/responses/{id}/input_items", {}, "after=x", 400, "is no item of this list"),
        ("POST", "/v1/responses/{id}/cancel", {}, "", 400, "background: true"),
        ("POST", "/v1/conversations", {"items": [ITEM] * 21}, "", 400, "at most 20 items"),
        ("POST", "/v1/conversations", {"items": [{"role": 1}]}, "", 400, "items"),
        ("POST", "/v1/conversations", {"items": [REFERENCE]}, "", 400, "send that itself"),
        ("POST", "/v1/responses", {"input": [{"type": "item_reference", "id": 1}]}, "", 400, "id"),
        ("POST", "/v1/responses", {"input": REFERENCES}, "", 400, "more than 512 responses"),
        ("POST", "/v1/responses", {"input": [REFERENCE]}, "", 404, "send all items"),
        ("POST", "/v1/responses", {"input": "x", "conversation": "resp_1"}, "", 400, "conv_"),
        ("POST", "/v1/responses", {"input": "x", "conversation": "conv_1"}, "", 404, "send all"),
        ("POST", "/v1/conversations", {"metadata": {"k" * 65: ""}}, "", 400, "metadata"),
        ("POST", "/v1/conversations", {"metadata": {"k": "v" * 513}}, "", 400, "metadata"),
        (
            "POST",
            "/v1/conversations",
            {"metadata": {str(i): "" for i in range(17)}},
            "",
            400,
            "metadata",
        ),
        ("POST", "/v1/conversations", {"items": [ITEM | {"x": "y" * 2**20}]}, "", 413, "bytes"),
    ],
)
async def test_what_a_stored_entry_does_not_permit_is_refused(
    method: str, path: str, body: Any, query: str, status: int, text: str
) -> None:
    app = LocalApp()
    _, made = await respond(app, "hi")
    reply = await use(app, method, path.replace("{id}", made["id"]), body, query)
    assert reply.status == status, reply.body
    assert text in reply.error["message"]


async def test_a_conversation_takes_so_many_items() -> None:
    app = LocalApp(context=10**6)
    made = (await use(app, "POST", "/v1/conversations")).json
    path = f"/v1/conversations/{made['id']}/items"
    for _ in range(limits.CHAT_MESSAGES_MAX // 20):
        assert (await use(app, "POST", path, {"items": [ITEM] * 20})).status == 200
    refused = await use(app, "POST", path, {"items": [ITEM] * 20})
    assert (refused.status, refused.error["param"]) == (400, "conversation")
    refused = await use(
        app, "POST", "/v1/responses", {"input": [ITEM] * 20, "conversation": made["id"]}
    )
    assert (refused.status, refused.error["param"]) == (400, "conversation")


async def test_a_failed_response_is_not_stored() -> None:
    app = LocalApp(texts=("a", "b"))
    app.runner.error = WorkerGone("gone")
    failed = await app.post("/v1/responses", {"input": "hi", "request_id": "1", "stream": True})
    assert b"response.failed" in failed.body
    assert (await use(app, "GET", "/v1/responses/resp_1")).status == 404


async def test_a_running_response_loses_its_room_to_newer_ones() -> None:
    app = LocalApp(store_bytes=30_000)
    app.runner.wait_s = 5.0
    body = {"input": "hi", "background": True, "request_id": "1"}
    assert (await app.post("/v1/responses", body)).status == 200
    for _ in range(20):
        await use(app, "POST", "/v1/conversations")
    assert (await use(app, "GET", "/v1/responses/resp_1")).status == 404
    await asyncio.sleep(10.0)
    assert app.runner.ended == 0


async def test_a_background_response_counts_as_a_call_of_its_caller() -> None:
    callers = CallerBounds(1)
    app = LocalApp(callers=callers)
    app.runner.wait_s = 5.0
    made = await app.post("/v1/responses", {"input": "hi", "background": True})
    await asyncio.sleep(1.0)
    assert (await use(app, "GET", f"/v1/responses/{made.json['id']}")).status == 429
    await asyncio.sleep(10.0)
    found = await use(app, "GET", f"/v1/responses/{made.json['id']}")
    assert (found.status, found.json["status"]) == (200, "completed")


async def test_a_silent_stream_from_the_store_gets_comments() -> None:
    app = LocalApp()
    app.runner.wait_s = 25.0
    reply = await app.post("/v1/responses", {"input": "hi", **BACKGROUND})
    assert reply.body.startswith(b":\n\n") or reply.body.startswith(b"event: response.created")
    assert reply.body.count(b":\n\n") >= 1
    assert b"response.completed" in reply.body


async def test_a_newer_response_takes_the_id_of_one_that_runs() -> None:
    app = LocalApp()
    app.runner.wait_s = 5.0
    body = {"input": "old", "background": True, "request_id": "1"}
    assert (await app.post("/v1/responses", body)).status == 200
    await asyncio.sleep(1.0)
    app.runner.wait_s = 0.0
    await respond(app, "new", request_id="1")
    await asyncio.sleep(10.0)
    items = (await use(app, "GET", "/v1/responses/resp_1/input_items")).json["data"]
    assert [item["content"][0]["text"] for item in items] == ["new"]
    assert app.runner.ended == 1


async def test_a_conversation_gets_the_items_of_a_response_that_is_not_stored() -> None:
    app = LocalApp(reasoning="")
    made = (await use(app, "POST", "/v1/conversations", {"items": [ITEM]})).json
    _, answer = await respond(app, "hi", conversation=made["id"], store=False)
    assert (await use(app, "GET", f"/v1/responses/{answer['id']}")).status == 404
    listed = await use(app, "GET", f"/v1/conversations/{made['id']}/items", query="order=asc")
    assert [item["role"] for item in listed.json["data"]] == ["user", "user", "assistant"]
    item = {"type": "item_reference", "id": listed.json["last_id"]}
    named, _ = await respond(app, [item, ITEM], conversation=made["id"])
    assert len(named.requests[0].chat.messages) == 4


async def test_an_item_that_is_named_twice_is_stored_once() -> None:
    app = LocalApp(reasoning="")
    _, first = await respond(app, "hi")
    item = {"type": "item_reference", "id": first["output"][0]["id"]}
    _, second = await respond(app, [item, item, ITEM])
    path = f"/v1/responses/{second['id']}/input_items"
    listed = (await use(app, "GET", path, query="order=asc")).json["data"]
    assert [one["type"] for one in listed] == ["message", "message"]


async def test_a_response_without_room_does_not_run_in_the_background() -> None:
    app = LocalApp(store_bytes=1_000)
    refused = await app.post("/v1/responses", {"input": "hi", "background": True})
    assert (refused.status, refused.error["param"]) == (400, "background")


async def test_the_stream_of_a_response_that_was_dropped_ends_with_an_error() -> None:
    app = LocalApp()
    app.runner.wait_s = 5.0
    body = {"input": "hi", "request_id": "1", **BACKGROUND}
    streaming = asyncio.ensure_future(app.post("/v1/responses", body))
    await asyncio.sleep(2.5)
    await use(app, "DELETE", "/v1/responses/resp_1")
    assert b"event: error" in (await streaming).body


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
@pytest.mark.parametrize(
    "fields, name",
    [
        ({"input": "x" * 5_000}, "input"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "text.format.schema",
        ),
    ],
)
async def test_an_error_names_the_field_of_the_api(path: str, fields: Any, name: str) -> None:
    refused = await LocalApp().post(path, {"input": "hi", **fields})
    assert (refused.status, refused.error["param"]) == (400, name)
