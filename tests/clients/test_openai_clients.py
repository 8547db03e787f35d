"""OpenAI's own clients over TLS with a key: they retry when the router says."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from build_clients import ROOT, SOURCES
from tests.clients.commands import run
from tests.clients.router import KEY, full_at_first, secured_listen
from tests.documented import blocks_of
from tests.kit.router import Rig
from tests.kit.workers import FakeDecode
from tests.suite.certificates import Authority

PAGE = ROOT / "docs" / "clients.md"
MESSAGES: Any = [{"role": "user", "content": "Hello"}]
NODE_FOLDER = SOURCES / "node"


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[str, str, FakeDecode]]:
    """Base URL, file of the authority, and the worker behind a router that rejects the first request."""
    authority = Authority(folder / "authority")
    listen = secured_listen(folder, authority)
    rig = await Rig(http_listen="127.0.0.1:0", **listen).start()
    rig.policy.retry_budget = 0
    server = rig.http_server()
    try:
        decode = await rig.add_decode(full_at_first)
        server.start()
        yield f"{server.url}/v1", str(authority.file), decode
    finally:
        await server.stop()
        await rig.close()


async def test_openais_python_client_retries(tmp_path: Path) -> None:
    async with served(tmp_path) as (url, authority, decode):
        trusting = openai.DefaultAsyncHttpxClient(
            verify=ssl.create_default_context(cafile=authority)
        )
        client = openai.AsyncOpenAI(
            base_url=url, api_key=KEY, max_retries=2, timeout=20, http_client=trusting
        )
        async with client:
            once = client.with_options(max_retries=0)
            with pytest.raises(openai.RateLimitError) as refused:
                await once.chat.completions.create(model="sim", messages=MESSAGES)
            assert refused.value.code == "rate_limit_exceeded"
            decode.requests.clear()
            answer = await client.chat.completions.create(model="sim", messages=MESSAGES)
        assert answer.choices[0].message.content == "ok"
        assert len(decode.requests) == 2


def command_of_page() -> str:
    """The command of the page on clients."""
    (block,) = (block for block in blocks_of(PAGE) if block.runs == "openai client")
    (command,) = block.commands
    return command


@pytest.mark.node
@pytest.mark.skipif(
    not (NODE_FOLDER / "node_modules/openai").is_dir() or shutil.which("node") is None,
    reason="the Node client is not installed: make setup",
)
async def test_openais_node_client_retries(tmp_path: Path) -> None:
    async with served(tmp_path) as (url, authority, decode):
        command = command_of_page().replace("http://127.0.0.1:7056/v1", url)
        command = command.replace("OPENAI_API_KEY=none ", "")
        status, out, err = await run(
            *("bash", "-c", f"cd {ROOT} && {command}"),
            OPENAI_API_KEY=KEY,
            NODE_EXTRA_CA_CERTS=authority,
        )
        assert (status, out) == (0, "ok\n"), err
        assert len(decode.requests) == 2
