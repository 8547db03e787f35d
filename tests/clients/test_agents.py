"""Coding agents, each in a process of its own, against a real router. Its worker answers by a script."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import sampling_pb2
from tests.clients.commands import run
from tests.clients.installed import NODE_LISTS, ROOT, tools
from tests.documented import blocks_of
from tests.kit.router import Rig
from tests.kit.workers import FakeDecode, reply

FOLDER, installed = tools("agents", NODE_LISTS / "package-lock.json")
PROGRAMS = FOLDER / "node_modules/.bin"
CLAUDE = FOLDER / "node_modules/@anthropic-ai/claude-code-linux-x64/claude"
PAGE = ROOT / "docs/openai.md"
CLIENTS = ROOT / "docs/clients.md"
NAMES = {"@anthropic-ai/claude-code": "Claude Code", "@openai/codex": "Codex CLI"}
# Claude Code asks for 32,000 tokens after a prompt of some 77,000 bytes.
CONTEXT = 100_000
QUESTION = "What does my note say?"
NOTE = "the word is ochre"
# Nothing listens there, so an agent that needs more than the router fails.
NOWHERE = "http://127.0.0.1:9"

pytestmark = [installed, pytest.mark.node]


@asynccontextmanager
async def served(
    call: dict[str, Any], context: int = CONTEXT
) -> AsyncIterator[tuple[str, list[str]]]:
    """The URL of a router, and the prompts so far. Its model makes `call`, then repeats what that returned."""
    prompts: list[str] = []

    async def answer(worker: FakeDecode, request: decode_pb2.GenerateRequest) -> AsyncIterator[Any]:
        prompt = bytes(token for token in request.token_ids if token < 256).decode()
        prompts.append(prompt)
        text = "<think>Easy.</think>"
        if NOTE in prompt:
            text += f"It says: {NOTE}"
        else:
            text += f"I look.<tool_call>{json.dumps(call)}</tool_call>"
        async for event in reply(text)(worker, request):
            if isinstance(event, decode_pb2.Finished):
                event.reason = sampling_pb2.FINISH_REASON_STOP
            yield event

    rig = await Rig(
        http_listen="127.0.0.1:0", tool_call_parser="hermes", reasoning_parser="deepseek_r1"
    ).start()
    server = rig.http_server()
    try:
        decode = await rig.add_decode(answer)
        decode.change_member(max_model_len=context)
        rig.refresh()
        server.start()
        yield server.url, prompts
    finally:
        await server.stop()
        await rig.close()


async def run_in(folder: Path, *command: str, **environment: str) -> tuple[int, str]:
    """Exit status and standard output of an agent with an empty home in `folder`."""
    (folder / "note.txt").write_text(NOTE)
    home = folder / "home"
    home.mkdir()
    status, out, err = await run(
        *("bash", "-c", f"cd {folder} && exec {shlex.join(command)}"),
        HOME=str(home),
        HTTPS_PROXY=NOWHERE,
        HTTP_PROXY=NOWHERE,
        NO_PROXY="127.0.0.1",
        **environment,
    )
    assert out, err
    return status, out


def of_page(text: str, url: str) -> str:
    """A text of the page with the test's server and model."""
    return text.replace("http://127.0.0.1:7056", url).replace("SmolLM2-135M-Instruct", "sim")


async def claude(folder: Path, url: str) -> dict[str, Any]:
    """The result that Claude Code prints."""
    (command,) = (
        word for block in blocks_of(PAGE) if block.runs == "claude" for word in block.commands
    )
    *settings, program = shlex.split(of_page(command, url).replace("\\\n", " "))
    assert program == "claude"
    _, out = await run_in(
        folder,
        *(str(CLAUDE), "-p", QUESTION, "--output-format", "json"),
        **dict(setting.split("=", 1) for setting in settings),
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    found: dict[str, Any] = json.loads(out)
    return found


async def codex(folder: Path, url: str, setting: str) -> list[dict[str, Any]]:
    """The events that Codex CLI prints."""
    (settings,) = re.findall(
        r"^```toml\n(model = .*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    (folder / "config.toml").write_text(of_page(settings, url))
    _, out = await run_in(
        folder,
        *(str(PROGRAMS / "codex"), "exec", "--json", "--skip-git-repo-check"),
        *("--dangerously-bypass-approvals-and-sandbox", "-c", setting, QUESTION),
        CODEX_HOME=str(folder),
        HEADRACE_KEY="none",
    )
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


async def test_claude_code_reads_a_file(tmp_path: Path) -> None:
    call = {"name": "Read", "arguments": {"file_path": str(tmp_path / "note.txt")}}
    async with served(call) as (url, prompts):
        found = await claude(tmp_path, url)
    assert (found["is_error"], found["result"]) == (False, f"It says: {NOTE}"), found
    assert found["usage"]["input_tokens"] > 0
    assert len([prompt for prompt in prompts if QUESTION in prompt]) == 2


async def test_claude_code_recognises_a_prompt_that_is_too_long(tmp_path: Path) -> None:
    async with served({}, context=2_048) as (url, _):
        found = await claude(tmp_path, url)
    assert found["is_error"]
    assert found["result"].startswith("Prompt is too long"), found


@pytest.mark.parametrize("own", [True, False], ids=["own", "mcp"])
async def test_codex_calls_a_tool(tmp_path: Path, own: bool) -> None:
    notes = [str(NODE_LISTS / "notes.py"), str(tmp_path / "note.txt")]
    settings = f'mcp_servers.notes={{command="{sys.executable}",args={json.dumps(notes)}}}'
    call = {"name": "exec_command", "arguments": {"cmd": "cat note.txt"}}
    if not own:
        call = {"name": "mcp__notes__read_note", "arguments": {}}
    async with served(call) as (url, prompts):
        events = await codex(tmp_path, url, settings)
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    (made,) = (item for item in items if item["type"] in ("command_execution", "mcp_tool_call"))
    assert (made["type"], made["status"]) == (
        "command_execution" if own else "mcp_tool_call",
        "completed",
    )
    said = [item["text"] for item in items if item["type"] == "agent_message"]
    assert said == ["I look.", f"It says: {NOTE}"], events
    assert (events[-1]["type"], len(prompts)) == ("turn.completed", 2)


async def test_codex_recognises_a_prompt_that_is_too_long(tmp_path: Path) -> None:
    async with served({}, context=2_048) as (url, _):
        events = await codex(tmp_path, url, 'web_search="disabled"')
    assert events[-1]["type"] == "turn.failed"
    assert "ran out of room in the model's context window" in events[-1]["error"]["message"]


def test_the_page_names_the_agents_versions() -> None:
    listed = json.loads((NODE_LISTS / "package.json").read_text())["dependencies"]
    page = CLIENTS.read_text(encoding="utf-8")
    assert [name for name in NAMES if f"| {NAMES[name]} {listed[name]}" not in page] == []
