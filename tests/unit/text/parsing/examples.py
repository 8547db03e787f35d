"""Generated texts with tool calls and reasoning, and what they contain, by the parser's name."""

from __future__ import annotations

from typing import Any, NamedTuple

WIDE = "\uff5c"
SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"type": "object"},
        },
    },
    "now": {"type": "object", "properties": {}},
}


class Example(NamedTuple):
    """A text of a model, with the calls and the content in it."""

    parser: str
    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    content: str = ""


def _deepseek(word: str) -> str:
    return f"<{WIDE}tool\u2581{word}{WIDE}>"


_CALLS, _CALLS_END = _deepseek("calls\u2581begin"), _deepseek("calls\u2581end")
_CALL, _CALL_END = _deepseek("call\u2581begin"), _deepseek("call\u2581end")
_SEP = _deepseek("sep")
_PARIS = ("weather", {"city": 'P "a"{ris}', "days": 2})
_ROME = ("weather", {"city": "Rome", "where": {"a": [1, {"b": "}"}]}})
_PARIS_JSON = r'{"city": "P \"a\"{ris}", "days": 2}'
_ROME_JSON = '{"city": "Rome", "where": {"a": [1, {"b": "}"}]}}'

EXAMPLES = (
    Example(
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {_PARIS_JSON}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "weather", "arguments": {_ROME_JSON}}}\n</tool_call>',
        (_PARIS, _ROME),
        "Let me see.\n",
    ),
    Example("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', (("now", {}),)),
    Example(
        "hermes",
        "The tag <tool is no tag, {nor} is this.",
        (),
        "The tag <tool is no tag, {nor} is this.",
    ),
    Example(
        "longcat",
        f'<longcat_tool_call>{{"name": "weather", "arguments": {_ROME_JSON}}}</longcat_tool_call>',
        (_ROME,),
    ),
    Example(
        "llama3_json",
        f'<|python_tag|>{{"name": "weather", "parameters": {_PARIS_JSON}}}; '
        f'{{"name": "weather", "parameters": {_ROME_JSON}}}',
        (_PARIS, _ROME),
    ),
    Example("llama4_json", f'{{"name": "weather", "arguments": {_ROME_JSON}}}', (_ROME,)),
    Example("llama3_json", "It is {warm}.", (), "It is {warm}."),
    Example(
        "mistral",
        f'Well.[TOOL_CALLS][{{"name": "weather", "arguments": {_PARIS_JSON}}}, '
        f'{{"name": "weather", "arguments": {_ROME_JSON}}}]',
        (_PARIS, _ROME),
        "Well.",
    ),
    Example(
        "mistral",
        f"[TOOL_CALLS]weather[ARGS]{_PARIS_JSON}[TOOL_CALLS]weather[ARGS]{_ROME_JSON}",
        (_PARIS, _ROME),
    ),
    Example("mistral", f"[TOOL_CALLS]weather{_PARIS_JSON}", (_PARIS,)),
    Example(
        "jamba",
        f'<tool_calls>[\n    {{"name": "weather", "arguments": {_PARIS_JSON}}}\n]</tool_calls>',
        (_PARIS,),
    ),
    Example(
        "granite", f'<|tool_call|>[{{"name": "weather", "arguments": {_PARIS_JSON}}}]', (_PARIS,)
    ),
    Example(
        "phi4_mini_json", f'functools[{{"name": "weather", "arguments": {_PARIS_JSON}}}]', (_PARIS,)
    ),
    Example(
        "deepseek_v3",
        f"Let me see.{_CALLS}{_CALL}function{_SEP}weather\n```json\n{_PARIS_JSON}\n```{_CALL_END}\n"
        f"{_CALL}function{_SEP}weather\n```json\n{_ROME_JSON}\n```{_CALL_END}{_CALLS_END}",
        (_PARIS, _ROME),
        "Let me see.",
    ),
    Example(
        "deepseek_v31",
        f"{_CALLS}{_CALL}weather{_SEP}{_PARIS_JSON}{_CALL_END}{_CALL}weather{_SEP}{_ROME_JSON}{_CALL_END}{_CALLS_END}",
        (_PARIS, _ROME),
    ),
    Example(
        "kimi_k2",
        "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{_PARIS_JSON}<|tool_call_end|><|tool_call_begin|>functions.weather:1"
        f"<|tool_call_argument_begin|>{_ROME_JSON}<|tool_call_end|><|tool_calls_section_end|>",
        (_PARIS, _ROME),
        "Let me see.",
    ),
    Example(
        "pythonic",
        "[weather(city='P \"a\"{ris}', days=2), weather(city=\"Rome\", where={'a': [1, {'b': '}'}]}), now()]",
        (_PARIS, _ROME, ("now", {})),
    ),
    Example("pythonic", "[1] is a footnote.", (), "[1] is a footnote."),
    Example(
        "llama4_pythonic",
        "<|python_start|>[weather(city='P \"a\"{ris}', days=2)]<|python_end|>",
        (_PARIS,),
    ),
    Example(
        "qwen3_coder",
        "Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nNew\nYork <x>\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=exact>\ntrue\n</parameter>\n"
        '<parameter=where>\n{"a": 1}\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        (
            ("weather", {"city": "New\nYork <x>", "days": 3, "exact": True, "where": {"a": 1}}),
            ("now", {}),
        ),
        "Let me see.\n",
    ),
)
