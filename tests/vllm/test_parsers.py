"""Our parsers of generated text beside vLLM's of the same names."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from headrace_text.parsing.registry import REASONING_PARSERS, TOOL_CALL_PARSERS
from tests.unit.text.parsing.examples import EXAMPLES, SCHEMAS, Example
from tests.unit.text.parsing.test_reasoning import new_parser
from tests.unit.text.parsing.test_tool_calls import parse
from tests.vllm.conftest import IMPORTS_VLLM

pytestmark = IMPORTS_VLLM

_TAGS = re.compile(r"</?[^<>\s=]+>|\[/?[A-Z_]+\]")


class Vocabulary:
    """As much of a tokenizer as vLLM's parsers use: each tag of the texts is a token."""

    all_special_tokens = ()
    all_special_ids = ()

    def __init__(self, *texts: str) -> None:
        tags = {tag: None for text in texts for tag in _TAGS.findall(text)}
        self._ids = {tag: 1_000 + index for index, tag in enumerate(tags)}

    def get_vocab(self) -> dict[str, int]:
        return self._ids

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self._ids.get(text, 1)]


def request(**fields: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], model="m", **fields)


def test_the_names_are_vllms() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert set(TOOL_CALL_PARSERS) <= set(ToolParserManager.list_registered())
    assert set(REASONING_PARSERS) <= set(ReasoningParserManager.list_registered())


@pytest.mark.parametrize("example", EXAMPLES)
def test_tool_calls_equal_those_of_vllm(example: Example) -> None:
    from vllm.tool_parsers import ToolParserManager

    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in SCHEMAS.items()
    ]
    asked = request(tools=tools)
    extra = ("<|python_tag|>", "<tool_call></tool_call>", "<think></think>", "[TOOL_CALLS]")
    # With this token vLLM's parser expects the form of newer models.
    newer = () if "[TOOL_CALLS][" in example.text else ("[ARGS]",)
    tokenizer: Any = Vocabulary(example.text, *extra, *newer)
    parser = ToolParserManager.get_tool_parser(example.parser)(tokenizer, asked.tools)
    found = parser.extract_tool_calls(example.text, asked)
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]
    assert calls == list(example.calls)
    # Its newer parsers drop the spaces before a call.
    assert (found.content or "").rstrip() == example.content.rstrip()


@pytest.mark.parametrize("name", sorted(REASONING_PARSERS))
@pytest.mark.parametrize("text", ["{0}why{1}so", "why{1}so", "{0}never ends", "so"])
@pytest.mark.parametrize("switch", [None, True, False])
def test_reasoning_equals_that_of_vllm(name: str, text: str, switch: bool | None) -> None:
    from vllm.reasoning import ReasoningParserManager

    form = REASONING_PARSERS[name]
    if text.startswith("why") and not form.starts_inside:
        pytest.skip("a closing tag alone is no format of this model")
    variables = {} if switch is None else dict.fromkeys(form.switches, switch)
    generated = text.format(form.opening, form.closing)
    tokenizer: Any = Vocabulary(form.opening + form.closing, "<tool_call></tool_call>[TOOL_CALLS]")
    parser = ReasoningParserManager.get_reasoning_parser(name)(
        tokenizer, chat_template_kwargs=variables
    )
    reasoning, content = parser.extract_reasoning(
        generated, request(chat_template_kwargs=variables)
    )
    ours = parse(new_parser(name, **variables), [generated])
    assert ours == (reasoning or "", content or "", [])
