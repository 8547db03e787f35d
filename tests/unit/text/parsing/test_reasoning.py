"""The parsers of reasoning."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_text.parsing.registry import REASONING_PARSERS, AnswerParser, new_reasoning_parser
from tests.unit.text.parsing.test_tool_calls import parse


def new_parser(name: str, constrained: bool = False, **variables: Any) -> AnswerParser:
    return AnswerParser(new_reasoning_parser(name, variables, constrained=constrained), None)


@pytest.mark.parametrize("name", sorted(REASONING_PARSERS))
def test_reasoning_is_apart_from_content(name: str) -> None:
    form = REASONING_PARSERS[name]
    text = f"{form.opening}2 < 3</{form.closing}4"
    switches = dict.fromkeys(form.switches, True)
    for parts in ([text], list(text)):
        assert parse(new_parser(name, **switches), parts) == ("2 < 3</", "4", [])


def test_the_prompt_can_have_the_opening_tag() -> None:
    assert parse(new_parser("qwen3"), list("why</think>so")) == ("why", "so", [])
    assert parse(new_parser("deepseek_r1"), ["never ends"]) == ("never ends", "", [])
    assert parse(new_parser("mistral"), ["no reasoning"]) == ("", "no reasoning", [])


def test_the_template_turns_reasoning_off() -> None:
    assert parse(new_parser("qwen3", enable_thinking=False), ["so"]) == ("", "so", [])
    assert parse(new_parser("deepseek_v3"), ["so"]) == ("", "so", [])
    assert parse(new_parser("deepseek_v3", thinking=True), ["why</think>so"]) == ("why", "so", [])


def test_a_constrained_answer_begins_with_its_content() -> None:
    assert parse(new_parser("qwen3", constrained=True), ['{"a": 1}']) == ("", '{"a": 1}', [])
    text = '<think>why</think>{"a": 1}'
    assert parse(new_parser("qwen3", constrained=True), [text]) == ("why", '{"a": 1}', [])
