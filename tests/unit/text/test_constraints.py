"""Objects get no properties that their schema does not name, and answers are calls or have a form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace_text.constraints import call_or_form, closed_schema
from headrace_text.parsing.registry import CALL_OPENINGS, TOOL_CALL_PARSERS

CLOSED = {"additionalProperties": False}
NAMED = {"properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "schema, closed",
    [
        (NAMED, NAMED | CLOSED),
        (NAMED | {"additionalProperties": True}, NAMED | {"additionalProperties": True}),
        ({"type": "object"}, {"type": "object"}),
        ({"items": NAMED, "default": NAMED}, {"items": NAMED | CLOSED, "default": NAMED}),
        ({"anyOf": [NAMED, True]}, {"anyOf": [NAMED | CLOSED, True]}),
        ({"$defs": {"items": NAMED}}, {"$defs": {"items": NAMED | CLOSED}}),
        ({"enum": [{"properties": {}}]}, {"enum": [{"properties": {}}]}),
        ({"allOf": [NAMED, NAMED]}, {"allOf": [NAMED, NAMED]}),
        (NAMED | {"anyOf": [NAMED]}, NAMED | {"anyOf": [NAMED]}),
    ],
)
def test_objects_are_closed_unless_the_schema_opens_them(schema: Any, closed: Any) -> None:
    assert json.loads(closed_schema(json.dumps(schema))) == closed


class Tokenizer:
    """Bytes, the end, and a tag that is one token."""

    eos_token_id = 256
    bos_token_id = unk_token_id = None
    special_token_ids = (256, 257)
    tokens = (*(bytes([value]) for value in range(256)), b"<eos>", b"<tool_call>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize("form", [json.dumps({"type": "object", **NAMED}), ("yes", "no")])
@pytest.mark.parametrize("parser", CALL_OPENINGS)
def test_an_answer_is_a_call_or_has_the_form(parser: str, form: str | tuple[str, ...]) -> None:
    opening = CALL_OPENINGS[parser]
    token_id = 257 if opening == "<tool_call>" else None
    grammar = call_or_form(opening, token_id, ["look_up", "stop"], form)
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Tokenizer()))

    def accepts(text: str, *before: int) -> bool:
        matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from("grammar", grammar))
        assert not matcher.get_error()
        tokens = [*before, *text.encode()]
        taken = matcher.try_consume_tokens(tokens)
        return bool(taken == len(tokens) and matcher.is_accepting())

    assert accepts('{"a": 1}' if isinstance(form, str) else "no")
    call = opening.replace("NAME", "stop") + " any\n text"
    assert accepts(call if opening else '{"name": "stop", "parameters": {"x": 1}}')
    assert accepts("more", 257) == (token_id is not None)
    assert not accepts("a text")
    assert not accepts('{"b": 1}')


def test_parsers_and_openings_have_the_same_names() -> None:
    assert CALL_OPENINGS.keys() == TOOL_CALL_PARSERS.keys()
