"""Requests through the HTTP API in this process: headers, errors and options that need more than one part of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace_common.limits import CLIENT_SALT_CHARACTERS_MAX
from headrace_kv.prefix.cache_salt import is_cache_salt
from tests.kit.openai_app import ANSWER, CONTEXT, FINGERPRINT, LocalApp, Request

USER = {"role": "user", "content": "hi"}
TRACE = "0af7651916cd43dd8448eb211c80319c"
CHAT = "/v1/chat/completions"
HELLO = {"type": "text", "text": "hello"}


@pytest.mark.parametrize(
    "request_id", ["with a space", "\xe9\x80", '{"a": 1}', "x" * 128, "x" * 999]
)
async def test_no_request_id_fails_a_request(request_id: str) -> None:
    app = LocalApp()
    body = {"prompt": ["a", "b"]}
    reply = await app.post("/v1/completions", body, x_request_id=request_id)
    assert (reply.status, len(reply.requests)) == (200, 2)
    assert reply.headers["x-request-id"] == request_id
    assert len({request.request_id for request in reply.requests}) == 2


async def test_every_response_has_a_request_id() -> None:
    app = LocalApp()
    for path, body in ((CHAT, {}), (CHAT, b"{"), ("/nowhere", {}), ("/tokenize", {"prompt": "a"})):
        assert (await app.post(path, body, x_request_id="mine")).headers["x-request-id"] == "mine"
        assert (await app.post(path, body)).headers["x-request-id"]
    (request,) = (await app.chat(request_id="of the body")).requests
    assert request.request_id == "of_the_body"
    reply = await app.post(CHAT, {"messages": [USER], "request_id": "b"}, x_request_id="header")
    assert reply.requests[0].request_id == "header"


async def test_the_trace_of_the_caller_goes_on_with_its_state() -> None:
    app = LocalApp()
    parent = f"00-{TRACE}-b7ad6b7169203331-01"
    await app.post(CHAT, {"messages": [USER]}, traceparent=parent, tracestate="vendor=1,other=2")
    (context,) = app.runner.contexts
    assert f"{context.trace_id:032x}" == TRACE
    assert context.trace_state.to_header() == "vendor=1,other=2"
    await app.post(CHAT, {"messages": [USER]}, traceparent=parent, tracestate="no state,,=")
    assert app.runner.contexts[1].trace_id == context.trace_id


@pytest.mark.parametrize("origins", [(), ("https://chat.test:8443",), ("*",)])
@pytest.mark.parametrize("origin", ["https://chat.test:8443", "https://other.test"])
async def test_scripts_of_listed_pages_may_call_and_no_others(
    origins: tuple[str, ...], origin: str
) -> None:
    app = LocalApp(origins=origins)
    headers: dict[str, Any] = {"origin": origin, "access_control_request_headers": "x-a,\tb"}
    preflight = Request(path=CHAT, method="OPTIONS", **headers)
    assert await app.status(preflight) == (200 if origins else 405)
    replies = [await app.post(CHAT, body, **headers) for body in ({"messages": [USER]}, b"{")]
    replies.append(preflight.reply())
    expected = origin if origin in origins or "*" in origins else None
    for reply in replies:
        assert reply.headers.get("access-control-allow-origin") == expected
        assert reply.headers.get("vary") == ("origin" if origins else None)
    if origins:
        assert replies[-1].headers["access-control-allow-headers"] == "x-a,b"
        assert replies[-1].headers["access-control-allow-methods"] == "POST"


async def test_ignored_fields_are_named_in_a_header() -> None:
    header = "x-headrace-ignored-fields"
    app = LocalApp()
    for stream in (False, True):
        reply = await app.chat(verbosity="low", prediction={"type": "content"}, stream=stream)
        assert (reply.status, reply.headers[header]) == (200, "prediction, verbosity")
    assert header not in (await app.chat(user="u")).headers
    rejected = await LocalApp(rejects_unknown_fields=True).chat(verbosity="low")
    assert (rejected.status, rejected.error["param"]) == (400, "verbosity")
    assert rejected.error["code"] == "unknown_parameter"
    assert "correct its name" in rejected.error["message"]


@pytest.mark.parametrize(
    ("fields", "status", "code", "words"),
    [
        ({"model": "other"}, 404, "model_not_found", "use one of: sim"),
        ({"model": 5}, 400, "invalid_type", "must be a text"),
        ({"messages": None}, 400, "missing_required_parameter", "is missing"),
        ({"temperature": 9}, 400, "invalid_value", "from 0 to 2"),
        (
            {"messages": [{**USER, "content": "x" * CONTEXT}]},
            *(400, "context_length_exceeded", "maximum context length is 512"),
        ),
    ],
)
async def test_errors_have_openais_codes(
    fields: dict[str, Any], status: int, code: str, words: str
) -> None:
    reply = await LocalApp().chat(**fields)
    assert (reply.status, reply.error["code"]) == (status, code)
    assert words in reply.error["message"]
    assert reply.error["headrace"]["reason"] == "INVALID_FIELD"


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_max_tokens_is_lowered_to_the_rest_of_the_context_or_refused(path: str) -> None:
    app = LocalApp()
    body = {"messages": [USER], "max_tokens": 32_000}
    for stream in (False, True):
        reply = await app.post(path, body | {"stream": stream})
        (prepared,) = reply.prepared
        left = CONTEXT - len(prepared.token_ids)
        assert (reply.status, prepared.sampling.max_tokens) == (200, left)
        assert reply.headers["x-headrace-max-tokens"] == str(left)
    reply = await app.post(path, {"messages": [USER], "max_tokens": 5})
    assert reply.prepared[0].sampling.max_tokens == 5
    assert "x-headrace-max-tokens" not in reply.headers
    refused = await LocalApp(rejects_unknown_fields=True).post(path, body)
    # Anthropic's clients must send it.
    assert refused.status == (400 if path == CHAT else 200)


async def test_max_tokens_that_no_client_sent_and_a_byte_order_mark_fail_no_request() -> None:
    app = LocalApp(rejects_unknown_fields=True)
    reply = await app.post("/v1/completions", {"prompt": "x" * (CONTEXT - 5)})
    assert reply.prepared[0].sampling.max_tokens == 5
    body = json.dumps({"prompt": "x"}).encode("utf-8-sig")
    assert (await app.post("/v1/completions", body)).status == 200


async def test_messages_call_a_prompt_too_long_as_anthropic_does() -> None:
    long = {"messages": [{**USER, "content": "x" * CONTEXT}], "max_tokens": 5}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        reply = await LocalApp().post(path, long)
        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
        assert reply.error["message"].startswith("prompt is too long: messages")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [USER], "max_tokens": 5}),
        ("/v1/responses", {"input": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [97]}),
    ],
)
async def test_null_counts_as_left_out_in_every_api(path: str, body: dict[str, Any]) -> None:
    names = ("model", "stream", "tools", "tool_choice", "metadata", "text", "store", "unheard_of")
    reply = await LocalApp().post(path, {**body, **dict.fromkeys(names)})
    assert (reply.status, reply.headers.get("x-headrace-ignored-fields")) == (200, None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 5}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
async def test_every_api_asks_for_promises_and_has_them_in_the_usage(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    app = LocalApp()
    promise = {"id": "known", "tokens": 96, "tier": "host", "seconds": 1.5}
    reply = await app.post(path, {**body, "stream": stream}, x_headrace_keep="1.5")
    assert reply.requests[0].keep.ToMilliseconds() == 1_500
    assert f'"headrace_kept": {json.dumps(promise)}' in reply.body.decode()
    plain = await app.post(path, {**body, "stream": stream})
    assert not plain.requests[0].HasField("keep")
    assert "headrace_kept" not in plain.body.decode()


@pytest.mark.parametrize(
    ("path", "body", "seconds"),
    [
        (CHAT, {"prompt_cache_options": {"ttl": "30m"}}, 1_800),
        (CHAT, {"prompt_cache_options": {"mode": "implicit"}, "prompt_cache_key": "a"}, 1_800),
        (CHAT, {"prompt_cache_retention": "24h"}, 3_600),
        (CHAT, {"prompt_cache_retention": "in_memory"}, 300),
        (CHAT, {"prompt_cache_key": "a"}, 300),
        (CHAT, {"prompt_cache_key": "a", "n": 2}, 0),
        (CHAT, {"prompt_cache_options": {"ttl": "soon"}}, 0),
        ("/v1/responses", {"prompt_cache_options": {"ttl": "1h"}}, 3_600),
        ("/v1/responses", {"prompt_cache_key": "a"}, 300),
        ("/v1/messages", {"cache_control": {"type": "ephemeral"}}, 300),
        ("/v1/messages", {"tools": [{"name": "f", "cache_control": {"ttl": "1h"}}]}, 3_600),
        ("/v1/messages", {"system": [{**HELLO, "cache_control": {"ttl": "5m"}}]}, 300),
        (
            "/v1/messages",
            {"messages": [{**USER, "content": [{**HELLO, "cache_control": {"ttl": "1h"}}]}]},
            3_600,
        ),
    ],
)
async def test_the_fields_of_prompt_caches_ask_for_promises(
    path: str, body: dict[str, Any], seconds: int
) -> None:
    given = {"input": "hi"} if path == "/v1/responses" else {"messages": [USER], "max_tokens": 5}
    reply = await LocalApp().post(path, {**given, **body})
    assert reply.requests[0].keep.seconds == seconds, reply.body
    assert ("headrace_kept" in reply.body.decode()) == (seconds > 0)
    streamed = await LocalApp().post(path, {**given, **body, "stream": True})
    # Clients read a choice from each event, unless they want the usage.
    assert path != CHAT or all(event["choices"] for event in streamed.events)


@pytest.mark.parametrize("header", ["", "soon", "nan", "inf", "0", "-1", "3601", "1e300"])
async def test_a_promise_needs_a_time_of_at_most_an_hour(header: str) -> None:
    app = LocalApp()
    reply = await app.post("/v1/completions", {"prompt": "hi"}, x_headrace_keep=header)
    assert (reply.status, reply.error["param"]) == (400, "x-headrace-keep")
    assert reply.requests == []


@pytest.mark.parametrize("body", [{"prompt": "hi", "n": 2}, {"prompt": ["hi", "ho"]}])
async def test_a_promise_is_for_one_answer(body: dict[str, Any]) -> None:
    reply = await LocalApp().post("/v1/completions", body, x_headrace_keep="60")
    assert (reply.status, reply.error["param"]) == (400, "x-headrace-keep")


async def test_promises_are_renewed_and_ended() -> None:
    app = LocalApp()
    renewed = await app.post("/v1/headrace/keep", {"id": "known", "seconds": 30})
    assert renewed.json == {"id": "known", "tokens": 96, "tier": "host", "seconds": 30}
    ended = await app.post("/v1/headrace/keep", {"id": "known"})
    assert ended.json == {"tokens": 0, "reason": "it was ended"}
    assert (await app.post("/v1/headrace/keep", {"id": "other"})).status == 404
    assert (await app.post("/v1/headrace/keep", {"id": "known", "seconds": 3_601})).status == 400


async def test_requests_with_another_salt_share_no_cache() -> None:
    app = LocalApp()
    for salt in (None, "a", "b", "a"):
        assert (await app.complete(cache_salt=salt)).status == 200
    none, first, second, again = (prepared.cache_salt for prepared in app.runner.prepared)
    assert none == ""
    assert len({none, first, second}) == 3
    assert first == again
    assert is_cache_salt(first)
    reply = await app.complete(cache_salt="x" * (CLIENT_SALT_CHARACTERS_MAX + 1))
    assert (reply.status, reply.error["param"]) == (400, "cache_salt")


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_are_known_before_the_first_event(stream: bool) -> None:
    app = LocalApp()
    prompts = {"prompt": ["ab", "c"], "n": 2}
    reply = await app.complete(**prompts, return_token_ids=True, stream=stream)
    events = reply.events if stream else [reply.json]
    choices = {choice["index"]: choice for event in events for choice in event["choices"]}
    assert [choices[index]["prompt_token_ids"] for index in range(4)] == [[97, 98]] * 2 + [[99]] * 2
    assert choices[3]["token_ids"] == list(ANSWER.encode())


async def test_the_usage_so_far_is_in_every_event() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = (await LocalApp().chat(stream=True, stream_options=options)).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == [0, len(ANSWER), len(ANSWER)]
    assert len({event["usage"]["prompt_tokens"] for event in events}) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_have_the_fingerprint_of_the_system(stream: bool) -> None:
    app = LocalApp()
    for reply in (await app.chat(stream=stream), await app.complete(stream=stream)):
        events = reply.events if stream else [reply.json]
        assert {event["system_fingerprint"] for event in events} == {FINGERPRINT}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": "hi"}, "hi"),
        ({"prompt": "hi", "add_special_tokens": True}, "hi"),
        ({"messages": [USER]}, "user: hi\nassistant: "),
        ({"messages": [USER], "add_special_tokens": False}, "user: hi\nassistant: "),
        ({"messages": [USER], "add_generation_prompt": False}, "user: hi"),
        ({"messages": [USER], "continue_final_message": True}, "user: hi"),
        ({"messages": [USER], "chat_template_kwargs": {"a": 1}}, "a: 1\nuser: hi\nassistant: "),
    ],
)
async def test_tokens_of_prompts_and_chats(fields: dict[str, Any], text: str) -> None:
    app = LocalApp()
    for named in (False, True):
        reply = await app.post("/tokenize", {**fields, "return_token_strs": named})
        assert reply.json == {
            "count": len(text),
            "max_model_len": CONTEXT,
            "tokens": list(text.encode()),
            "token_strs": list(text) if named else None,
        }
    detokenized = await app.post("/detokenize", {"tokens": list(text.encode())})
    assert detokenized.json == {"prompt": text}


async def test_no_tokens_are_an_empty_text() -> None:
    assert json.loads((await LocalApp().post("/detokenize", {"tokens": []})).body)["prompt"] == ""


async def test_a_template_of_a_request_is_rejected_with_its_name() -> None:
    for path in ("/tokenize", CHAT):
        reply = await LocalApp().post(path, {"messages": [USER], "chat_template": "x"})
        assert (reply.status, reply.error["param"]) == (400, "chat_template")


@pytest.mark.parametrize("prompt", ["hey", list(b"hey"), ["hey", "you"], [list(b"hey"), [104]]])
async def test_an_echo_begins_with_the_text_of_the_prompt(prompt: Any) -> None:
    app = LocalApp()
    prompts = prompt if isinstance(prompt[0], list) or prompt[0] == "hey" else [prompt]
    texts = [one if isinstance(one, str) else bytes(one).decode() for one in prompts]
    reply = await app.complete(prompt=prompt, echo=True, n=2)
    choices = reply.json["choices"]
    assert [choice["text"] for choice in choices] == [
        text + ANSWER for text in texts for _ in range(2)
    ]
    assert {choice["logprobs"] for choice in choices} == {None}
    scored = json.loads((await app.complete(prompt=prompt, echo=True, logprobs=0)).body)["choices"]
    for choice, text in zip(scored, texts, strict=True):
        assert choice["logprobs"]["tokens"] == list(text + ANSWER)
        assert choice["logprobs"]["text_offset"] == list(range(len(text + ANSWER)))


async def test_an_echo_without_tokens_to_generate_is_the_prompt_alone() -> None:
    app = LocalApp()
    fields: dict[str, Any] = {"prompt": "hey", "echo": True, "max_tokens": 0}
    whole = json.loads((await app.complete(**fields, logprobs=1)).body)
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hey", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert whole["usage"]["completion_tokens"] == 0
    assert (await app.complete(prompt="hey", max_tokens=0)).status == 400
    events = (await app.complete(**fields, stream=True)).events
    assert "".join(event["choices"][0]["text"] for event in events) == "hey"
    assert events[-1]["choices"][0]["finish_reason"] == "length"


async def test_too_many_prompt_logprobs_are_refused() -> None:
    app = LocalApp()
    for fields in ({"echo": True, "logprobs": 21}, {"prompt_logprobs": 21}):
        reply = await app.complete(**fields)
        assert (reply.status, reply.error["param"]) == (400, list(fields)[-1])
    # 512 tokens of the context, 21 values each, 16 choices.
    reply = await app.complete(prompt=[1] * 500, echo=True, logprobs=20, max_tokens=1, n=16)
    assert (reply.status, reply.error["param"]) == (400, "logprobs")
    assert "at most 131072 are reported" in reply.error["message"]


async def test_a_silent_stream_gets_a_ping_each_ten_seconds() -> None:
    app = LocalApp(reasoning="", texts=["a", "b"])
    app.runner.wait_s = 25.0
    user = {"messages": [USER], "stream": True}
    asked = {
        CHAT: (user, b":\n\n"),
        "/v1/responses": ({"input": "hi", "stream": True}, b":\n\n"),
        "/v1/messages": (user | {"max_tokens": 9}, b'event: ping\ndata: {"type": "ping"}\n\n'),
    }
    for path, (body, ping) in asked.items():
        silent = await app.post(path, body)
        assert (silent.status, silent.body.count(ping)) == (200, 2)
        app.runner.wait_s = 5.0
        assert silent.body.replace(ping, b"").count(b"\n\n") == (
            await app.post(path, body)
        ).body.count(b"\n\n")
        app.runner.wait_s = 25.0
