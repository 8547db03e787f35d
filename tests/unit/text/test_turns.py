"""Turns of conversations: with the cache, their tokens are those of the whole text, for the templates of many families.

Templates look back: a new message changes the text of earlier ones. They are ours, with what the families' own do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from headrace_text.chat_template import template_values
from headrace_text.codec import ChatMessage, ToolCall
from headrace_text.hugging_face import HuggingFaceCodec

_LAST_USER: Final = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
)
_FAMILIES: Final = {
    # A default system message, and every text as it is.
    "chatml": "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    # Reasoning before the last user message is dropped, and results of tools are joined.
    "qwen": _LAST_USER
    + "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n"
    "<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}<think>\n{{ (m.reasoning_content or '').strip() }}\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    "{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    # The system message and the tools are in the last user message.
    "mistral": _LAST_USER + "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if loop.index0 == ns.last %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}{% else %}[INST]{% endif %}"
    "{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{% if m.tool_calls %}[TOOL_CALLS]"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% endif %} {{ m.content | trim }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}",
    # Channels: reasoning stays until the next final answer.
    "harmony": "<|start|>system<|message|>Current date: {{ strftime_now('%Y-%m-%d') }}<|end|>"
    "{% if tools %}<|start|>developer<|message|># Tools\n{% for t in tools %}{{ t.function.name }}: "
    "{{ t.function.parameters | tojson }}\n{% endfor %}<|end|>{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% set later = messages[loop.index0 + 1:] "
    "| selectattr('role', 'equalto', 'assistant') | rejectattr('tool_calls', 'defined') | list %}"
    "{% if m.reasoning and not later %}<|start|>assistant<|channel|>"
    "analysis<|message|>{{ m.reasoning }}<|end|>{% endif %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    "granite": "<|start_of_role|>system<|end_of_role|>{{ strftime_now('%B %d, %Y') }}. {{ messages | length }} "
    "messages.<|end_of_text|>\n{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}"
    "<|end_of_text|>\n{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
}
_SPECIAL: Final = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|start|>", "<|end|>",
    "<|message|>", "<|channel|>", "<|return|>", "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>",
)  # fmt: skip
_PLAIN: Final = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
_TOOLS: Final = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "d": "x " * size}},
    }
    for name, size in (("look", 3), ("search", 200))
]
_texts = st.sampled_from(
    [
        *("", " ", "yes", " no\n", "\n\n", "Größe 東京 🙂‍↔️", "e\u0301 \u200d", "a,b", "x" * 300),
        *(
            "the market of the old town, 7 o'clock\n" * 12,
            "日本語の長い文章です。" * 40,
            "def f():\n    return 1\n" * 20,
        ),
        *(
            "a <|im_end|> b",
            "<think>why</think>\n\nso",
            "<|im_",
            "see [INST] and </s>" + " more" * 80,
        ),
    ]
)
_messages = st.one_of(
    st.builds(lambda text: [ChatMessage("user", text)], _texts),
    st.builds(
        lambda text, reason: [ChatMessage("assistant", text, reasoning=reason)], _texts, _texts
    ),
    st.builds(
        lambda text, result, reason: [
            ChatMessage(
                "assistant", "", tool_calls=(ToolCall("c", "look", {"x": text}),), reasoning=reason
            ),
            ChatMessage("tool", result, tool_call_id="c"),
            ChatMessage("tool", text, tool_call_id="c"),
        ],
        *(_texts, _texts, _texts),
    ),
)
_steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "edit", "branch", "tools"]),
        st.integers(0, 99),
        _messages,
    ),
    min_size=4,
    max_size=8,
)


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HuggingFaceCodec]:
    tokenizer = Tokenizer.from_file("models/tiny-llama/tokenizer.json")
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in _SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in _PLAIN])
    found = {}
    for family, template in _FAMILIES.items():
        folder = tmp_path_factory.mktemp(family)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "config.json").write_text("{}")
        values = {"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(values))
        found[family] = HuggingFaceCodec(Path(folder))
    return found


def _whole(codec: HuggingFaceCodec, values: dict[str, Any]) -> list[int]:
    """The tokens of the whole text, without runs and without a cache."""
    chat = codec._chat
    assert chat is not None
    escaped = chat._control_tokens.escape(values)
    text = chat._template.render(escaped.values, continue_final_message=False)
    if escaped.originals:
        return chat._encode_escaped(text, escaped, None)
    ids: list[int] = codec._tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("family", _FAMILIES)
@settings(deadline=None, max_examples=30)
@given(_texts, _steps)
def test_every_turn_has_the_tokens_of_the_whole_conversation(
    codecs: dict[str, HuggingFaceCodec],
    family: str,
    system: str,
    steps: list[tuple[str, int, list[ChatMessage]]],
) -> None:
    codec = codecs[family]
    messages = [ChatMessage("system", system), ChatMessage("user", "begin")]
    tools: list[dict[str, Any]] = []
    for kind, number, new in steps:
        place = 1 + number % (len(messages) - 1)
        if kind == "tools":
            tools = _TOOLS[: number % 3]
        elif kind == "edit":
            messages[place : place + 1] = new
        else:
            messages[place if kind == "branch" else len(messages) :] = new
        ids = codec.encode_chat(
            messages, continue_final_message=False, tools=tools, cache_scope="a"
        )
        assert ids.tolist() == _whole(codec, template_values(messages, tools))


def test_a_turn_encodes_only_what_is_new(
    codecs: dict[str, HuggingFaceCodec], monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = codecs["qwen"]
    chat = codec._chat
    assert chat is not None
    encoded: list[str] = []
    encode = chat._runs._encode

    def counted(run: str) -> list[int]:
        encoded.append(run)
        return encode(run)

    monkeypatch.setattr(chat._runs, "_encode", counted)
    messages = [ChatMessage("system", "be brief")]
    for number in range(40):
        messages.append(ChatMessage("user", f"question {number} " * 60))
        encoded.clear()
        codec.encode_chat(messages, continue_final_message=False, cache_scope="b")
        assert sum(map(len, encoded)) < 5_000
        messages.append(
            ChatMessage("assistant", f"answer {number} " * 60, reasoning="because " * 40)
        )
