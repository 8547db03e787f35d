"""Frameworks of agents, each in a process of its own, against a real router. Its worker answers by a script."""

from __future__ import annotations

import json
from typing import Any

from headrace.decode.v1 import decode_pb2
from lock_requirements import parse
from tests.clients.commands import run
from tests.clients.installed import PYTHON_LISTS, ROOT, tools
from tests.clients.router import scripted

PINS = PYTHON_LISTS / "frameworks.txt"
FOLDER, installed = tools("frameworks", PINS)
PAGE = ROOT / "docs/clients.md"
CLIENTS = ("instructor", "langchain-openai", "openai-agents", "pydantic-ai-slim")
NOTE = "the word is ochre"
REPORT: dict[str, Any] = {"note": NOTE, "words": 4}
TWICE = [NOTE, NOTE]


def answer(prompt: str, request: decode_pb2.GenerateRequest) -> str:
    """Calls read_note, then reports what it returned, in the form that the constraint of the answer has."""
    outputs = request.sampling.structured_outputs
    schema = json.loads(outputs.json) if outputs.json else {}
    if schema.get("type") == "array":
        # Calls of functions, one of which must be made.
        names = [one["properties"]["name"]["enum"][0] for one in schema["items"]["anyOf"]]
        is_known = NOTE in prompt or "read_note" not in names
        name = next(name for name in names if (name != "read_note") == is_known)
        return json.dumps([{"name": name, "parameters": REPORT if is_known else {}}])
    if schema or "tool: {" not in prompt or (NOTE in prompt and "read_note" in prompt):
        return json.dumps(REPORT)
    call = {"name": "read_note", "arguments": {}}
    if NOTE in prompt:
        call = {"name": "Report", "arguments": REPORT}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


async def found(script: str) -> Any:
    """What a script found."""
    async with scripted(answer, tool_call_parser="hermes", reasoning_parser="none") as url:
        python = str(FOLDER / "bin/python")
        status, out, err = await run(
            python, str(PYTHON_LISTS / script), url, NOTE, NO_PROXY="127.0.0.1"
        )
    assert status == 0, err
    return json.loads(out)


@installed
async def test_the_agents_sdk_calls_a_tool_and_answers_in_a_form() -> None:
    runs = [[2, NOTE], [1, NOTE], [2, NOTE]]
    assert await found("openai_agents.py") == {
        "OpenAIChatCompletionsModel": runs,
        "OpenAIResponsesModel": runs,
        "previous": NOTE,
        "conversation": [NOTE, 6],
    }


@installed
async def test_pydantic_ai_calls_a_tool_and_answers_in_every_form() -> None:
    models, forms = ("Chat", "Responses"), ("NativeOutput", "ToolOutput", "PromptedOutput")
    assert await found("pydantic_ai_agents.py") == {
        f"OpenAI{model}Model {form}": TWICE for model in models for form in forms
    }


@installed
async def test_instructor_reads_objects_in_all_modes() -> None:
    modes = await found("instructor_modes.py")
    assert modes.pop("PARALLEL_TOOLS") == [NOTE]
    assert len(modes) == 9
    assert [mode for mode, notes in modes.items() if notes != TWICE] == []


@installed
async def test_langchain_binds_tools_beside_a_form() -> None:
    called = ["read_note", NOTE, NOTE]
    assert await found("langchain_tools.py") == {"chat": called, "responses": called}


def test_the_page_names_the_frameworks_versions() -> None:
    pins = {name: pin.version for name, pin in parse(PINS.read_text(encoding="utf-8")).items()}
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in CLIENTS if f"| {name} {pins[name]}" not in page] == []
