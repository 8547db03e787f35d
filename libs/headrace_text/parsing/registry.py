"""The parsers by the names that vLLM gives them, of reasoning and of the whole text of an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace_text.parsing.buffered import (
    BufferedParser,
    CallArguments,
    Content,
    Piece,
    Reasoning,
)
from headrace_text.parsing.json_calls import LeadingCalls, ListedCalls, NamedCall, TaggedCalls
from headrace_text.parsing.named_calls import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    MistralCalls,
    NamedCalls,
)
from headrace_text.parsing.pythonic_calls import PythonicCalls
from headrace_text.parsing.xml_calls import XmlCalls


class TaggedReasoning(BufferedParser):
    """Reasoning at the beginning, up to the tag that ends it.

    With `inside`, the text begins within the reasoning, and the opening tag may be absent: the prompt can have it.
    Without, reasoning is only what follows an opening tag at the beginning of the text.
    """

    def __init__(self, opening: str, closing: str, *, inside: bool) -> None:
        super().__init__()
        self._opening = opening
        self._closing = closing
        self._inside = inside

    def _start(self) -> bool:
        text = self._text.lstrip()
        if text.startswith(self._opening):
            self._text = text.removeprefix(self._opening)
            self._state = self._read_reasoning
        elif self._opening.startswith(text) and not self._ended:
            return False
        else:
            self._state = self._read_reasoning if self._inside else self._pass_on
        return True

    def _read_reasoning(self) -> bool:
        text, tag = self._take_before([self._closing])
        if text:
            self._pieces.append(Reasoning(text))
        if tag:
            self._state = self._pass_on
        return bool(tag)


class AnswerParser:
    """Finds reasoning first, and tool calls in what follows it. Either parser may be None.

    Spaces before and between tool calls are dropped.
    """

    def __init__(self, reasoning: BufferedParser | None, calls: BufferedParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._spaces = ""
        """Spaces that are content only if a text follows."""
        self._has_text = False

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain after more text."""
        pieces: list[Piece] = [Content(text)]
        if self._reasoning is not None:
            pieces = self._reasoning.feed(text)
        return self._merged(self._with_calls(pieces))

    def finish(self) -> list[Piece]:
        """The remaining pieces, at the end of the text."""
        pieces = [] if self._reasoning is None else self._reasoning.finish()
        pieces = self._with_calls(pieces)
        if self._calls is not None:
            pieces += self._calls.finish()
        return self._merged(pieces)

    def _with_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._calls is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            found += self._calls.feed(piece.text) if isinstance(piece, Content) else [piece]
        return found

    def _merged(self, pieces: list[Piece]) -> list[Piece]:
        """Joins pieces of one kind, and holds back spaces before the first text and after calls."""
        merged: list[Piece] = []
        for piece in map(self._held_back, pieces):
            last = merged[-1] if merged else None
            joined = None if last is None else _join(last, piece)
            if joined is not None:
                merged[-1] = joined
            elif not isinstance(piece, Content) or piece.text:
                merged.append(piece)
        return merged

    def _held_back(self, piece: Piece) -> Piece:
        if self._calls is None or isinstance(piece, Reasoning):
            return piece
        if not isinstance(piece, Content):
            self._spaces, self._has_text = "", False
            return piece
        text = self._spaces + piece.text
        if not self._has_text and not text.strip():
            self._spaces = text
            return Content("")
        self._spaces, self._has_text = "", True
        return Content(text)


_TEXTS: Final[Sequence[type[Content | Reasoning | CallArguments]]] = (
    Content,
    Reasoning,
    CallArguments,
)


def _join(first: Piece, second: Piece) -> Piece | None:
    """Both pieces as one, if they are of one kind."""
    for kind in _TEXTS:
        if isinstance(first, kind) and isinstance(second, kind):
            return kind(first.text + second.text)
    return None


_THINK = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model writes its reasoning.

    `switches` are the variables of the chat template that turn reasoning on or off, and `default` counts where a
    request sets none of them.
    """

    opening: str
    closing: str
    switches: tuple[str, ...] = ()
    default: bool = True
    starts_inside: bool = True
    """Whether a text may begin within the reasoning."""


NO_PARSER: Final = "none"
"""In settings, in place of a parser's name."""
CALL_OPENINGS: Final[Mapping[str, str]] = {
    "deepseek_v3": DEEPSEEK_V3.section,
    "deepseek_v31": DEEPSEEK_V31.section,
    "granite": "<|tool_call|>",
    "jamba": "<tool_calls>",
    "kimi_k2": KIMI_K2.section,
    "longcat": "<longcat_tool_call>",
    "mistral": "[TOOL_CALLS]",
    "phi4_mini_json": "functools",
    **dict.fromkeys(("hermes", "qwen3_coder", "qwen3_xml"), "<tool_call>"),
    **dict.fromkeys(("llama3_json", "llama4_json"), ""),
    **dict.fromkeys(("pythonic", "llama4_pythonic"), "[NAME("),
}
"""The text that an answer with calls begins with, by parser. NAME is the name of a tool. Empty for JSON."""

TOOL_CALL_PARSERS: Final[Mapping[str, Callable[[Mapping[str, Any]], BufferedParser]]] = {
    "deepseek_v3": lambda _: NamedCalls(DEEPSEEK_V3),
    "deepseek_v31": lambda _: NamedCalls(DEEPSEEK_V31),
    "granite": lambda _: ListedCalls("<|tool_call|>"),
    "hermes": lambda _: TaggedCalls("<tool_call>", "</tool_call>"),
    "jamba": lambda _: ListedCalls("<tool_calls>", "</tool_calls>"),
    "kimi_k2": lambda _: NamedCalls(KIMI_K2),
    "llama3_json": lambda _: LeadingCalls("<|python_tag|>"),
    "llama4_json": lambda _: LeadingCalls("<|python_tag|>"),
    "llama4_pythonic": lambda _: PythonicCalls(("<|python_start|>", "<|python_end|>")),
    "longcat": lambda _: TaggedCalls("<longcat_tool_call>", "</longcat_tool_call>"),
    "mistral": lambda _: MistralCalls(),
    "phi4_mini_json": lambda _: ListedCalls("functools"),
    "pythonic": lambda _: PythonicCalls(),
    "qwen3_coder": XmlCalls,
    "qwen3_xml": XmlCalls,
}
"""Makes a parser, from the JSON schemas of the tools' arguments by name."""

REASONING_PARSERS: Final[Mapping[str, ReasoningFormat]] = {
    "deepseek_r1": ReasoningFormat(*_THINK),
    "deepseek_v3": ReasoningFormat(*_THINK, ("thinking", "enable_thinking"), default=False),
    "glm45": ReasoningFormat(*_THINK, ("enable_thinking",)),
    "holo2": ReasoningFormat(*_THINK, ("thinking", "enable_thinking")),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", starts_inside=False),
    "qwen3": ReasoningFormat(*_THINK, ("enable_thinking",)),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
}


def new_tool_call_parser(name: str, schemas: Mapping[str, Any]) -> BufferedParser:
    """A parser for one answer. `schemas` has the JSON schema of each tool's arguments by name."""
    return TOOL_CALL_PARSERS[name](schemas)


def new_required_call_parser(named: str = "") -> BufferedParser:
    """A parser for an answer that a schema constrains to calls: to the arguments of `named`, or to a list of calls."""
    return NamedCall(named) if named else ListedCalls("")


def new_reasoning_parser(
    name: str, template_variables: Mapping[str, Any], *, constrained: bool
) -> BufferedParser | None:
    """A parser for one answer. None where the request turns reasoning off.

    A `constrained` answer begins with its content, unless it has an opening tag.
    """
    form = REASONING_PARSERS[name]
    values = [template_variables[key] for key in form.switches if key in template_variables]
    if not (any(values) if values else form.default):
        return None
    return TaggedReasoning(
        form.opening, form.closing, inside=form.starts_inside and not constrained
    )
