"""The parsers of tool calls, over all ways in which a text can be divided."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_text.parsing.buffered import CallArguments, CallStart, Content, Piece, Reasoning
from headrace_text.parsing.registry import TOOL_CALL_PARSERS, AnswerParser, new_tool_call_parser
from tests.unit.text.parsing.examples import EXAMPLES, SCHEMAS, Example


def joined(pieces: Sequence[Piece]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content and calls, each call as its name and its arguments."""
    reasoning, content = "", ""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        match piece:
            case Reasoning(text):
                reasoning += text
            case Content(text):
                content += text
            case CallStart(name):
                calls.append((name, ""))
            case CallArguments(text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return reasoning, content, calls


def parse(parser: AnswerParser, parts: Sequence[str]) -> tuple[str, str, list[tuple[str, str]]]:
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return joined(pieces + parser.finish())


def divided(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({cut % (len(text) + 1) for cut in cuts})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def new_parser(name: str) -> AnswerParser:
    return AnswerParser(None, new_tool_call_parser(name, SCHEMAS))


def test_every_parser_has_an_example() -> None:
    aliases = {"qwen3_xml"}
    assert {example.parser for example in EXAMPLES} | aliases == set(TOOL_CALL_PARSERS)


@pytest.mark.parametrize("example", EXAMPLES)
def test_calls_and_content_are_found(example: Example) -> None:
    for parts in ([example.text], list(example.text)):
        _, content, calls = parse(new_parser(example.parser), parts)
        assert [(name, json.loads(text)) for name, text in calls] == list(example.calls)
        assert content == example.content


@given(
    st.sampled_from(EXAMPLES), st.lists(st.integers(0, 1_000), max_size=12), st.integers(0, 1_000)
)
def test_parts_change_nothing_in_whole_and_cut_texts(
    example: Example, cuts: list[int], length: int
) -> None:
    text = example.text[: 1 + length % len(example.text)]
    whole = parse(new_parser(example.parser), [text])
    assert parse(new_parser(example.parser), divided(text, cuts)) == whole


_FRAGMENTS = st.sampled_from(
    (
        *("<tool_call>", "</tool_call>", '{"name": "f"', ', "arguments": {', "}", "}}", "[", "]"),
        *("{", '"', "\\", "[f(a=1", ")", "[TOOL_CALLS]", "[ARGS]", "<function=f>", "<parameter=a>"),
        *("</function>", "<|python_tag|>", " ", "\n", "x", ";", ","),
    )
)


@given(
    st.sampled_from(sorted(TOOL_CALL_PARSERS)),
    st.lists(_FRAGMENTS, max_size=14).map("".join),
    st.lists(st.integers(0, 200), max_size=6),
)
def test_parts_change_nothing_in_malformed_texts(name: str, text: str, cuts: list[int]) -> None:
    assert parse(new_parser(name), divided(text, cuts)) == parse(new_parser(name), [text])


def test_arguments_are_returned_as_they_arrive() -> None:
    parser = new_parser("hermes")
    assert parser.feed('<tool_call>{"name": "weather", "arguments": {"city": "R') == [
        CallStart("weather"),
        CallArguments('{"city": "R'),
    ]
    assert parser.feed("om") == [CallArguments("om")]


def test_a_text_that_only_looks_like_a_call_is_content() -> None:
    for text in ('{"answer": 4}', '{"name": 4}', "{"):
        assert parse(new_parser("llama3_json"), [text]) == ("", text, [])
    text = "<tool_call>weather in Rome</tool_call>"
    assert parse(new_parser("hermes"), [text]) == ("", text, [])
    for value in ("[" * 500 + "]" * 500, "-" * 50_000 + "1", "1+" * 50_000 + "1", "open('x')"):
        text = f"[f(a={value})]"
        assert parse(new_parser("pythonic"), [text]) == ("", text, [])


def test_the_model_can_write_the_id_of_a_call() -> None:
    parser = new_parser("kimi_k2")
    pieces = parser.feed(
        "<|tool_call_begin|>functions.now:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    )
    assert pieces[0] == CallStart("now", "functions.now:3")
