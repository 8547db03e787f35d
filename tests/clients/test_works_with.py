"""Clients that people use, each in a process of its own, against a simulated deployment."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lock_requirements import parse
from tests.clients.commands import run
from tests.ports import free_port
from tests.suite.deployment import suite

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/clients.md"
FOLDER = ROOT / "tests/clients/python"
PINS = FOLDER / "requirements.txt"
# `make test-clients` installs the pins there, and then copies their file.
INSTALLED = ROOT / ".cache/works-with"
PYTHON = INSTALLED / "bin/python"
CLIENTS = ("anthropic", "langchain-openai", "litellm", "llama-index-llms-openai-like", "openai")
ENVIRONMENT = {
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "127.0.0.1",
}
SHARED = {"chat": True, "stream": True}
TOOL = {"tool": {"a": "b"}}

installed = pytest.mark.skipif(
    not (INSTALLED / PINS.name).exists()
    or (INSTALLED / PINS.name).read_bytes() != PINS.read_bytes(),
    reason="the Python clients are not installed: make test-clients",
)


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[str]:
    """The URL of a deployment, which must hold nothing at the end."""
    listen = f"127.0.0.1:{free_port()}"
    async with suite(folder, settings=(("router", "http_listen", listen),)) as it:
        yield f"http://{listen}"
        await it.wait_empty("decode-0")


async def found(folder: Path, script: str, python: Path = PYTHON) -> Any:
    """What a script of the folder `python` found."""
    async with served(folder) as url:
        status, out, err = await run(str(python), str(FOLDER / script), url, **ENVIRONMENT)
        assert status == 0, err
        return json.loads(out)


@installed
async def test_langchain_chats_streams_and_calls_a_bound_tool(tmp_path: Path) -> None:
    assert await found(tmp_path, "langchain_chat.py") == SHARED | TOOL


@installed
async def test_litellm_recognises_a_long_prompt_and_falls_back(tmp_path: Path) -> None:
    assert await found(tmp_path, "litellm_completion.py") == SHARED | {
        "too long": "ContextWindowExceededError",
        "fallback": "from long",
    }


@installed
async def test_llama_index_chats_and_streams(tmp_path: Path) -> None:
    assert await found(tmp_path, "llama_index_chat.py") == SHARED


@pytest.mark.parametrize(
    "python",
    [pytest.param(PYTHON, marks=installed, id="pinned"), pytest.param(sys.executable, id="ours")],
)
async def test_openais_library_uses_both_apis(tmp_path: Path, python: Path) -> None:
    assert await found(tmp_path, "openai_sdk.py", python) == SHARED | TOOL | {
        "responses": True,
        "too long": "context_length_exceeded",
    }


@installed
async def test_anthropics_library_uses_messages(tmp_path: Path) -> None:
    assert await found(tmp_path, "anthropic_sdk.py") == SHARED | TOOL | {
        "count": True,
        "too long": "invalid_request_error",
    }


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_offers_an_upgrade_to_http2(tmp_path: Path) -> None:
    request = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    async with served(tmp_path) as url:
        status, out, err = await run(
            *("curl", "--silent", "--show-error", "--http2", "--fail", "--max-time", "30"),
            *("--json", json.dumps(request), f"{url}/v1/chat/completions"),
            **ENVIRONMENT,
        )
        assert status == 0, err
        assert json.loads(out)["usage"]["completion_tokens"] == 8


@pytest.mark.skipif(shutil.which("javac") is None, reason="no JDK is installed")
async def test_the_jdks_client_offers_an_upgrade_to_http2(tmp_path: Path) -> None:
    async with served(tmp_path) as url:
        source = ROOT / "tests/clients/java/HttpChat.java"
        status, out, err = await run("java", str(source), url)
        assert (status, out) == (0, "200 true\n200 true\n"), err


def test_the_page_names_the_pinned_versions() -> None:
    pins = {name: pin.version for name, pin in parse(PINS.read_text(encoding="utf-8")).items()}
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in CLIENTS if f"| {name} {pins[name]}" not in page] == []
