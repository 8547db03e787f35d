"""Clients without our code: two for Node, OpenAI's own and Vercel's, and buf curl from reflection alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.clients.commands import run
from tests.ports import free_port
from tests.suite.deployment import suite

ROOT = Path(__file__).resolve().parents[2]
NODE_CLIENT = ROOT / "tests/clients/node"
BUF = ROOT / "node_modules/.bin/buf"


@pytest.mark.node
@pytest.mark.skipif(
    not (NODE_CLIENT / "node_modules/openai").is_dir() or shutil.which("node") is None,
    reason="the Node client is not installed: make setup",
)
async def test_openais_node_client_uses_what_it_offers(tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with suite(tmp_path, settings=(("router", "http_listen", listen),)) as it:
        status, out, err = await run("node", str(NODE_CLIENT / "openai.mjs"), f"http://{listen}/v1")
        assert status == 0, err
        found = json.loads(out)
        assert found["models"] == ["sim"]
        text = found["chat"]["choices"][0]["message"]["content"]
        assert text
        assert found["streamed"] == text
        assert found["usage"]["completion_tokens"] == 12
        choices = found["choices"]["choices"]
        assert len({choice["message"]["content"] for choice in choices}) == 3
        assert all(len(choice["logprobs"]["content"]) == 12 for choice in choices)
        call = found["calls"]["message"]["tool_calls"][0]["function"]
        assert call["name"] == "weather"
        assert set(json.loads(call["arguments"])) == {"city", "days"}
        assert found["calls"]["finish_reason"] == "tool_calls"
        assert set(json.loads(found["json"]["choices"][0]["message"]["content"])) == {
            "city",
            "days",
        }
        assert found["aborted"]
        assert found["error"] == {"status": 400, "param": "temperature", "code": "invalid_value"}
        await it.wait_empty("decode-0")


@pytest.mark.node
@pytest.mark.skipif(
    not (NODE_CLIENT / "node_modules/ai").is_dir() or shutil.which("node") is None,
    reason="the Node client is not installed: make setup",
)
async def test_vercels_sdk_names_the_items_of_three_turns_with_a_tool(tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with suite(tmp_path, settings=(("router", "http_listen", listen),)):
        status, out, err = await run("node", str(NODE_CLIENT / "ai_sdk.mjs"), f"http://{listen}/v1")
        assert status == 0, err
        found = json.loads(out)
        assert found["turns"] == [{"called": [{"city": "Paris"}], "text": True}] * 3
        assert found["references"] == [0, 0, 1, 1, 2, 2]


@pytest.mark.node
@pytest.mark.skipif(not BUF.exists(), reason="buf is not installed: make setup")
async def test_a_client_that_only_has_reflection_chats(tmp_path: Path) -> None:
    async with suite(tmp_path) as it:
        address = f"http://{it.deployment.router}"
        method = f"{address}/headrace.inference.v1.InferenceService/Generate"
        curl = [str(BUF), "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--reflect"]
        request = {
            "chat": {"messages": [{"role": "user", "content": "Hello"}]},
            "sampling": {"temperature": 0, "maxTokens": 8, "ignoreEos": True},
        }
        status, out, err = await run(*curl, "-d", json.dumps(request), method)
        assert status == 0, err
        messages = json.loads("[" + out.replace("}\n{", "},{") + "]")
        assert messages[-1]["usage"]["completionTokens"] == 8
        assert messages[-1]["finishReason"] == "FINISH_REASON_LENGTH"
        request = {"text": "a", "tokens": {"ids": [1]}}
        status, out, err = await run(*curl, "-d", json.dumps(request), method)
        assert status != 0
        assert "invalid_argument" in out + err
