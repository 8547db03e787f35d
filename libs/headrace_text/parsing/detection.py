"""Finds a model's parsers from its chat template: what a template writes of calls and reasoning, its model writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from headrace_common.errors import InvalidRequest
from headrace_text.codec import ChatMessage, ToolCall
from headrace_text.parsing.buffered import CallArguments, CallStart
from headrace_text.parsing.registry import TOOL_CALL_PARSERS

Render = Callable[[Sequence[ChatMessage], Mapping[str, Any], bool], str]
"""Renders messages with a tool and with variables of the template, and with the beginning of an answer where the last
is true. Raises InvalidRequest where the template does."""

_NAME: Final = "headrace_probe"
_ARGUMENTS: Final = {"city": "Oslo"}
_SCHEMA: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "A city."}},
    "required": ["city"],
}
PROBE_TOOL: Final = {
    "type": "function",
    "function": {"name": _NAME, "description": "A probe.", "parameters": _SCHEMA},
}
_QUESTION: Final = ChatMessage("user", "A question.")
_TEXT: Final = "An answer."
# Mistral's templates want ids of nine letters and digits.
_CALL: Final = ToolCall("headrace1", _NAME, _ARGUMENTS)
_THINK: Final = "<think>"
_OWN_TAGS: Final = {"[THINK]": "mistral", "<seed:think>": "seed_oss"}
"""Reasoning parsers by a tag that no other model has."""


def find_tool_call_parser(render: Render) -> str:
    """The parser that reads a call as the template writes it. Empty: none does."""
    try:
        start = render([_QUESTION], {}, False)
        plain = render([_QUESTION, ChatMessage("assistant", _TEXT)], {}, False)
        called = render([_QUESTION, ChatMessage("assistant", "", tool_calls=(_CALL,))], {}, False)
    except InvalidRequest:
        return ""
    before, found, after = plain.removeprefix(start).partition(_TEXT)
    if not found or not called.startswith(start):
        return ""
    text = called.removeprefix(start).removeprefix(before).removesuffix(after)
    # Of parsers that read one form, the shorter name is that of the plain form.
    return min((name for name in TOOL_CALL_PARSERS if _reads_back(name, text)), key=len, default="")


def _reads_back(name: str, text: str) -> bool:
    parser = TOOL_CALL_PARSERS[name]({_NAME: _SCHEMA})
    pieces = [*parser.feed(text), *parser.finish()]
    names = [piece.name for piece in pieces if isinstance(piece, CallStart)]
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
    try:
        return names == [_NAME] and json.loads(arguments) == _ARGUMENTS
    except ValueError:
        return False


def find_reasoning_parser(source: str, render: Render) -> str:
    """The parser of the reasoning that the template asks for. Empty: it asks for none. `source` is the template."""
    own = [name for tag, name in _OWN_TAGS.items() if tag in source]
    if own or _THINK not in source:
        return own[0] if own else ""
    try:
        prompt = render([_QUESTION], {}, True)
        silent = render([_QUESTION], {"enable_thinking": False}, True)
        asked = render([_QUESTION], {"thinking": True}, True)
    except InvalidRequest:
        return ""
    if silent != prompt:
        return "qwen3"
    if prompt.rstrip().endswith(_THINK):
        return "deepseek_r1"
    return "deepseek_v3" if asked.rstrip().endswith(_THINK) else ""
