"""Random bodies of HTTP requests, most of them one or two changes away from a valid one."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping
from typing import Any, Final

from headrace_frontend.openai.block_apis.anthropic import BlockBody, MessagesBody
from headrace_frontend.openai.block_apis.responses_bodies import ItemBody, ResponsesBody
from headrace_frontend.openai.body import Body
from headrace_frontend.openai.messages import MessageBody
from headrace_frontend.openai.requests import ChatCompletionBody, CompletionBody, TokenizeBody

TEXTS: Final = (
    *("", "a", "user", "assistant", "tool", "\x00", "é", "😀", "\ufffe", "�", "{{ 1 }}", "<|end|>"),
    *("\\ud800", "5", "-1", "a" * 300, "[", "{}", "[]", "null", '{"type": "object"}'),
    *('{"const": "\\ud800"}', '{"enum": ["\\udc00\\ud800"]}', '{"type": "string"}'),
    *('{"$ref": "#"}', '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'),
    *('{"minimum": 1e999}', '{"items": {"minItems": 1e30}, "type": "array", "minItems": 1e9}'),
    *('{"type": ["null"]}', '{"enum": []}', '{"anyOf": [true, false]}', '{"$defs": {"a": 5}}'),
    *(
        '{"const": 1e400}',
        '{"properties": {"\\ud83d\\ude00": {}}}',
        '{"type": "array", "items": [{}]}',
    ),
    *(
        '{"a": 1' + "0" * 500 + "}",
        "(a",
        "root ::= root",
        "[a-",
        "\\p{L}+",
        '{"a":' * 70 + "1" + "}" * 70,
    ),
)
NUMBERS: Final = (*(0, 1, 2, -1, 31_999, 32_000, 2**31, 2**32 - 1, 2**32, 2**63, 2**64, -(2**63)),)
FLOATS: Final = (0.0, -0.0, 0.5, 1.0, 2.0, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
_SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "string"}}}
_TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}
_SHORT: Final = {"max_tokens": 2}
_IMAGE: Final = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAAAAAAALAAAAAABAAEAAAICTAEAOw=="
BODIES: Final[Mapping[str, tuple[type[Body], tuple[dict[str, Any], ...]]]] = {
    "/v1/chat/completions": (
        ChatCompletionBody,
        (
            {"messages": [{"role": "user", "content": "a"}], **_SHORT},
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
                "tools": [_TOOL],
                "tool_choice": "required",
                **_SHORT,
            },
            {
                "messages": [{"role": "user", "content": "a"}],
                "response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}},
                **_SHORT,
            },
            {
                "messages": [{"role": "user", "content": "a"}],
                "structured_outputs": {"json": json.dumps(_SCHEMA)},
                "chat_template_kwargs": {"a": "b"},
                **_SHORT,
            },
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": _IMAGE, "detail": "low"}},
                            {"type": "text", "text": "a"},
                        ],
                    }
                ],
                **_SHORT,
            },
        ),
    ),
    "/v1/completions": (
        CompletionBody,
        ({"prompt": "a", "stop": ["b"], **_SHORT}, {"prompt": [1, 2, 3], "logprobs": 1, **_SHORT}),
    ),
    "/v1/messages": (
        MessagesBody,
        (
            {"messages": [{"role": "user", "content": "a"}], **_SHORT},
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a"}]},
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "1", "content": "b"},
                            {"type": "image", "source": {"type": "url", "url": _IMAGE}},
                        ],
                    },
                ],
                "tools": [{"name": "f", "input_schema": _SCHEMA}],
                **_SHORT,
            },
        ),
    ),
    "/v1/responses": (
        ResponsesBody,
        (
            {"input": "a", "max_output_tokens": 2},
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "1", "output": "b"},
                    {"role": "user", "content": [{"type": "input_image", "image_url": _IMAGE}]},
                ],
                "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA}],
                "max_output_tokens": 2,
            },
        ),
    ),
    "/v1/messages/count_tokens": (
        MessagesBody,
        ({"messages": [{"role": "user", "content": "a"}]},),
    ),
    "/tokenize": (
        TokenizeBody,
        ({"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}),
    ),
}
_NAMES: Final = tuple({*MessageBody.model_fields, *BlockBody.model_fields, *ItemBody.model_fields})


class Fuzzer:
    """Makes requests from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def body(self, path: str) -> bytes:
        """The body of an HTTP request to one of BODIES."""
        chance = self._random
        kind, bases = BODIES[path]
        body: Any = copy.deepcopy(chance.choice(bases))
        for _ in range(chance.randint(1, 3)):
            self._change(body, tuple(kind.model_fields))
        data = json.dumps(body, ensure_ascii=chance.random() < 0.9).encode("utf-8", "surrogatepass")
        if chance.random() < 0.1:
            at = chance.randrange(len(data))
            data = data[:at] + chance.randbytes(2) + data[at + 1 :]
        return data

    def value(self, level: int = 0) -> Any:
        """A JSON value. Lone surrogates and infinite numbers are some of them."""
        chance = self._random
        kind = chance.randrange(8 if level < 3 else 5)
        if kind == 0:
            return chance.choice((None, True, False))
        if kind == 1:
            return chance.choice((*NUMBERS, *FLOATS))
        if kind < 5:
            return self._text(surrogates=True)
        if kind == 5:
            return [self.value(level + 1) for _ in range(chance.randrange(3))]
        names = [chance.choice(_NAMES), self._text(surrogates=True)]
        return {name: self.value(level + 1) for name in names[: chance.randrange(3)]}

    def _text(self, *, surrogates: bool = False) -> str:
        found = self._random.choice(TEXTS)
        if surrogates and self._random.random() < 0.2:
            return found + self._random.choice(("\ud800", "\udfff", "\udc00\ud800"))
        return found

    def _change(self, value: Any, names: tuple[str, ...]) -> None:
        """Changes one member of a JSON value, at any depth."""
        chance = self._random
        inner = [one for one in (value.values() if isinstance(value, dict) else value) if one]
        inner = [one for one in inner if isinstance(one, dict | list)]
        if inner and chance.random() < 0.6:
            self._change(chance.choice(inner), _NAMES)
        elif isinstance(value, list):
            value[chance.randrange(len(value))] = self.value()
        else:
            value[chance.choice((*value, chance.choice(names)))] = self.value()
