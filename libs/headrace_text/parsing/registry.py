"""The parsers by the names that vLLM gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from headrace_text.parsing.buffered import TextParser
from headrace_text.parsing.json_calls import LeadingCalls, ListedCalls, NamedCall, TaggedCalls
from headrace_text.parsing.named_calls import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    MistralCalls,
    NamedCalls,
)
from headrace_text.parsing.pythonic_calls import PythonicCalls
from headrace_text.parsing.reasoning import TaggedReasoning
from headrace_text.parsing.xml_calls import XmlCalls

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


TOOL_CALL_PARSERS: Final[Mapping[str, Callable[[Mapping[str, Any]], TextParser]]] = {
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


def new_tool_call_parser(name: str, schemas: Mapping[str, Any]) -> TextParser:
    """A parser for one answer. `schemas` has the JSON schema of each tool's arguments by name."""
    return TOOL_CALL_PARSERS[name](schemas)


def new_required_call_parser(named: str = "") -> TextParser:
    """A parser for an answer that a schema constrains to calls: to the arguments of `named`, or to a list of calls."""
    return NamedCall(named) if named else ListedCalls("")


def new_reasoning_parser(
    name: str, template_variables: Mapping[str, Any], *, constrained: bool
) -> TextParser | None:
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
