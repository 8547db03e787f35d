"""Reasoning and tool calls in the answers to chats."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.inference.v1 import sampling_pb2
from headrace_common.errors import InvalidRequest
from headrace_frontend.openai.requests import ChatCompletionBody
from headrace_frontend.request.schema import schema_problem
from headrace_text.codec import TextCodec
from headrace_text.constraints import call_or_form
from headrace_text.parsing.buffered import CallArguments, CallStart, Content, Piece, Reasoning
from headrace_text.parsing.registry import (
    CALL_OPENINGS,
    NO_PARSER,
    REASONING_PARSERS,
    AnswerParser,
    new_reasoning_parser,
    new_required_call_parser,
    new_tool_call_parser,
)

# The first is that of vLLM and its clients, the second that of DeepSeek and older ones.
_REASONING_FIELDS = ("reasoning", "reasoning_content")
_MISTRAL_ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ModelParsers:
    """The names of the parsers for one model. Empty: none."""

    tool_calls: str = ""
    reasoning: str = ""


def parsers_of(codec: TextCodec, tool_calls: str, reasoning: str) -> ModelParsers:
    """Those that settings name, or else those that the model's chat template shows."""
    chosen = (tool_calls or codec.tool_call_parser, reasoning or codec.reasoning_parser)
    return ModelParsers(*("" if name == NO_PARSER else name for name in chosen))


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """How to divide the answers to one chat. `None` for all three means that text is content."""

    tool_calls: str | None = None
    """The name of the parser of tool calls, where the model decides about them."""
    required: str | None = None
    """The function that must be called, or an empty text for any. The answer then is JSON."""
    reasoning: str | None = None
    schemas: Mapping[str, Any] = field(default_factory=dict)
    """The JSON Schema of each tool's arguments by name."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    constrained: bool = False
    single_call: bool = False
    """Whether only the first call is returned."""
    calls_one_function: bool = False
    """Whether the call is returned as `function_call`, OpenAI's older form."""
    hides_reasoning: bool = False

    @property
    def divides(self) -> bool:
        """Whether answers can have other parts than content."""
        return (self.tool_calls, self.required, self.reasoning) != (None, None, None)

    def new_parser(self) -> AnswerParser:
        """A parser for one answer."""
        calls = None
        if self.required is not None:
            calls = new_required_call_parser(self.required)
        elif self.tool_calls is not None:
            calls = new_tool_call_parser(self.tool_calls, self.schemas)
        reasoning = None
        if self.reasoning is not None:
            reasoning = new_reasoning_parser(
                self.reasoning, self.variables, constrained=self.constrained
            )
        return AnswerParser(reasoning, calls)

    def new_call_id(self, piece: CallStart) -> str:
        """An id in the form that the model's chat template accepts."""
        if self.tool_calls == "mistral":
            return "".join(secrets.choice(_MISTRAL_ID_CHARACTERS) for _ in range(9))
        return piece.call_id or f"chatcmpl-tool-{secrets.token_hex(16)}"


def rules_of(body: ChatCompletionBody, parsers: ModelParsers) -> AnswerRules:
    """The rules for a request. Raises InvalidRequest when the model needs a parser that it does not have."""
    choice = body.tool_choice
    required: str | None = None
    automatic = False
    if body.tools and choice == "required":
        required = ""
    elif body.tools and choice is not None and not isinstance(choice, str):
        required = choice.function.name
    elif body.tools:
        automatic = choice != "none"
    if automatic and not parsers.tool_calls:
        raise InvalidRequest(
            {
                "tool_choice": "is auto, and the model's chat template has no calls that a parser knows; choose "
                "required, a function or none, or set the router's tool_call_parser"
            }
        )
    return AnswerRules(
        tool_calls=parsers.tool_calls if automatic else None,
        required=required,
        reasoning=parsers.reasoning or None,
        schemas={tool.function.name: tool.function.parameters for tool in body.tools or ()},
        variables=body.template_variables,
        constrained=body.formatted or required is not None or body.structured_outputs is not None,
        single_call=not body.parallel_tool_calls or body.functions is not None,
        calls_one_function=body.functions is not None,
        hides_reasoning=not body.include_reasoning,
    )


def permit_calls(
    outputs: sampling_pb2.StructuredOutputs, rules: AnswerRules, codec: TextCodec
) -> None:
    """Lets an answer be calls of tools in place of the form, where the model decides. Not in place of a grammar."""
    form: str | Iterable[str] = outputs.choice.texts
    if outputs.json or outputs.json_object:
        form = outputs.json or '{"type": "object"}'
    if rules.tool_calls is None or not form or (outputs.json and schema_problem(outputs.json)):
        # What is invalid is reported with the whole request.
        return
    opening = CALL_OPENINGS[rules.tool_calls]
    tokens = codec.encode_part(opening)
    token_id = tokens[0] if len(tokens) == 1 else None
    outputs.grammar = call_or_form(opening, token_id, rules.schemas, form)


class ChatAnswer:
    """One answer to a chat, divided as its text arrives."""

    def __init__(self, rules: AnswerRules) -> None:
        self._rules = rules
        self._parser = rules.new_parser()
        self._arguments: list[str] = []
        """Of each call so far."""

    @property
    def called(self) -> bool:
        """Whether the answer, which has ended, has tool calls, all of them whole and valid."""
        returned = self._arguments[:1] if self._rules.single_call else self._arguments
        return bool(returned) and all(map(_is_json, returned))

    def whole(self, text: str) -> dict[str, Any]:
        """The fields of a whole answer's message. With a call that was cut or is no JSON, calls stay content."""
        delta = self.delta(text, last=True)
        if self.called or not self._arguments:
            return delta
        return ChatAnswer(replace(self._rules, tool_calls=None, required=None)).whole(text)

    def reasoning_in(self, text: str) -> range:
        """The characters of the reasoning in the text of a whole answer, hidden or not."""
        if self._rules.reasoning is None:
            return range(0)
        pieces = self._parser.feed(text) + self._parser.finish()
        length = sum(len(piece.text) for piece in pieces if isinstance(piece, Reasoning))
        opening, begun = REASONING_PARSERS[self._rules.reasoning].opening, text.lstrip()
        tag = len(text) - len(begun) + len(opening) if begun.startswith(opening) else 0
        return range(tag, tag + length)

    def delta(self, text: str, *, last: bool) -> dict[str, Any]:
        """The fields of a message's delta that more text completes. Empty if there are none."""
        pieces = self._parser.feed(text)
        if last:
            pieces += self._parser.finish()
        return self._delta(pieces)

    def _delta(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        for piece in pieces:
            match piece:
                case Content(text):
                    delta["content"] = delta.get("content", "") + text
                case Reasoning(text):
                    if not self._rules.hides_reasoning:
                        for field_name in _REASONING_FIELDS:
                            delta[field_name] = delta.get(field_name, "") + text
                case CallStart(name):
                    self._arguments.append("")
                    function = {"name": name, "arguments": ""}
                    calls.append(
                        {
                            "index": len(self._arguments) - 1,
                            "id": self._rules.new_call_id(piece),
                            "type": "function",
                            "function": function,
                        }
                    )
                case CallArguments(text):
                    if not calls:
                        number = len(self._arguments) - 1
                        calls.append({"index": number, "function": {"arguments": ""}})
                    self._arguments[-1] += text
                    calls[-1]["function"]["arguments"] += text
        if self._rules.single_call:
            calls = [call for call in calls if not call["index"]]
        if calls and self._rules.calls_one_function:
            delta["function_call"] = calls[0]["function"]
        elif calls:
            delta["tool_calls"] = calls
        return delta


def whole_message(text: str, rules: AnswerRules) -> dict[str, Any]:
    """The message of a whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if not rules.divides:
        return message
    delta = ChatAnswer(rules).whole(text)
    calls = delta.pop("tool_calls", None)
    message["content"] = None if delta or calls else ""
    message.update(delta)
    if calls:
        message["tool_calls"] = [
            {name: value for name, value in call.items() if name != "index"} for call in calls
        ]
    return message


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
