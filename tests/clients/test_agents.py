"""Coding agents, each in a process of its own, against a real router. Its worker answers by a script."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from headrace.decode.v1 import decode_pb2
from headrace_text.codec import TextCodec
from headrace_text.load import load_codecs
from tests.clients.commands import run
from tests.clients.installed import NODE_LISTS, ROOT, tools
from tests.clients.router import FAILS, scripted
from tests.documented import blocks_of

FOLDER, installed = tools("agents", NODE_LISTS / "package-lock.json")
PROGRAMS = FOLDER / "node_modules/.bin"
CLAUDE = FOLDER / "node_modules/@anthropic-ai/claude-code-linux-x64/claude"
MODEL = ROOT / "models/SmolLM2-135M-Instruct"
PAGE = ROOT / "docs/openai.md"
CLIENTS = ROOT / "docs/clients.md"
NAMES = {"@anthropic-ai/claude-code": "Claude Code", "@openai/codex": "Codex CLI"}
QUESTION = "What does my note say?"
NOTE = "the word is ochre"
PDF = b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj 2 0 obj<</Type/Pages/Kids[]>>endobj\n%%EOF\n"
PATCH = "*** Begin Patch\n*** Add File: made.txt\n+ochre\n*** End Patch"
GUARD = (
    "{%- for one in messages %}{%- if one.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must be first') }}{%- endif %}{%- endfor %}"
)
# Nothing listens there, so an agent that needs more than the router fails.
NOWHERE = "http://127.0.0.1:9"

pytestmark = [installed, pytest.mark.node]


@asynccontextmanager
async def served(
    call: dict[str, Any], seen: str = NOTE, end: str = f"It says: {NOTE}", **options: Any
) -> AsyncIterator[tuple[str, list[str]]]:
    """The URL of a router, and the prompts so far. Its model makes `call` until a prompt has the text `seen`."""
    prompts: list[str] = []

    def answer(prompt: str, request: decode_pb2.GenerateRequest) -> str:
        prompts.append(prompt)
        # Each agent marks what shall stay cached.
        assert request.keep.duration.seconds == 300
        said = f"I look.<tool_call>{json.dumps(call)}</tool_call>"
        return f"<think>Easy.</think>{end if seen in prompt else said}"

    parsers: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}
    async with scripted(answer, **parsers, **options) as url:
        yield url, prompts


async def run_in(folder: Path, *command: str, **environment: str) -> tuple[int, str]:
    """Exit status and standard output of an agent with an empty home in `folder`."""
    (folder / "note.txt").write_text(NOTE)
    (folder / "note.pdf").write_bytes(PDF)
    home = folder / "home"
    home.mkdir(exist_ok=True)
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


def guarded(folder: Path) -> TextCodec:
    """The codec of a model with a template that refuses a system message after others."""
    shutil.copytree(MODEL, folder)
    settings = folder / "tokenizer_config.json"
    found = json.loads(settings.read_text())
    found["chat_template"] = GUARD + found["chat_template"]
    settings.write_text(json.dumps(found))
    return load_codecs({"sim": str(folder)})["sim"]


def of_page(text: str, url: str) -> str:
    """A text of the page with the test's server and model."""
    return text.replace("http://127.0.0.1:7056", url).replace("SmolLM2-135M-Instruct", "sim")


async def claude(folder: Path, url: str, question: str = QUESTION) -> dict[str, Any]:
    """The result that Claude Code prints."""
    (command,) = (
        word for block in blocks_of(PAGE) if block.runs == "claude" for word in block.commands
    )
    *settings, program = shlex.split(of_page(command, url).replace("\\\n", " "))
    assert program == "claude"
    _, out = await run_in(
        folder,
        *(str(CLAUDE), "-p", question, "--output-format", "json"),
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


async def test_claude_code_goes_on_after_a_pdf(tmp_path: Path) -> None:
    call = {"name": "Read", "arguments": {"file_path": str(tmp_path / "note.pdf")}}
    seen = "[application/pdf: not readable here]"
    async with served(call, seen, "It is a PDF.") as (url, prompts):
        found = await claude(tmp_path, url)
    assert (found["is_error"], found["result"]) == (False, "It is a PDF."), found
    assert seen in prompts[-1]


@pytest.mark.skipif(not MODEL.is_dir(), reason="the model is not there: make model")
async def test_claude_code_serves_a_template_that_wants_the_system_message_first(
    tmp_path: Path,
) -> None:
    call = {"name": "Read", "arguments": {"file_path": str(tmp_path / "note.txt")}}
    async with served(call, codec=guarded(tmp_path / "model")) as (url, _):
        found = await claude(tmp_path, url)
    assert (found["is_error"], found["result"]) == (False, f"It says: {NOTE}"), found


@pytest.mark.skipif(not MODEL.is_dir(), reason="the model is not there: make model")
async def test_two_conversations_of_claude_code_share_a_prefix(tmp_path: Path) -> None:
    # Its template writes no tools, which would be the same in front of the system message.
    async with served({}, "", codec=guarded(tmp_path / "model")) as (url, prompts):
        for question in (QUESTION, "Which word is in the note?"):
            await claude(tmp_path, url, question)
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(*prompts, strict=False))
    assert len(list(shared)) > 0.4 * len(prompts[0])


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


async def test_codex_edits_a_file_with_a_custom_tool(tmp_path: Path) -> None:
    call = {"name": "apply_patch", "arguments": {"input": PATCH}}
    catalog = f'model_catalog_json="{NODE_LISTS}/codex_models.json"'
    async with served(call, "A made.txt", "Done.") as (url, prompts):
        events = await codex(tmp_path, url, catalog)
    assert (events[-1]["type"], len(prompts)) == ("turn.completed", 2), events
    assert (tmp_path / "made.txt").read_text() == "ochre\n"


async def test_codex_shows_an_error_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    setting = "model_providers.headrace.stream_max_retries=0"
    async with served({}, QUESTION, f"It sa{FAILS}") as (url, _):
        events = await codex(tmp_path, url, setting)
    assert events[-1]["type"] == "turn.failed"
    assert "the worker has failed as scripted" in events[-1]["error"]["message"]


async def test_codex_recognises_a_prompt_that_is_too_long(tmp_path: Path) -> None:
    async with served({}, context=2_048) as (url, _):
        events = await codex(tmp_path, url, 'web_search="disabled"')
    assert events[-1]["type"] == "turn.failed"
    assert "ran out of room in the model's context window" in events[-1]["error"]["message"]


def test_the_page_names_the_agents_versions() -> None:
    listed = json.loads((NODE_LISTS / "package.json").read_text())["dependencies"]
    page = CLIENTS.read_text(encoding="utf-8")
    assert [name for name in NAMES if f"| {NAMES[name]} {listed[name]}" not in page] == []
