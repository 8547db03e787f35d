"""Chat templates with tools, calls and variables: what they see, and that clients' texts make no control tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace_common.errors import InvalidRequest
from headrace_text.chat_template import ChatTemplate, template_values
from headrace_text.codec import ChatMessage, ToolCall
from headrace_text.hugging_face import HuggingFaceCodec

_SPECIAL = ("<eos>", "<|user|>")
# Only conversations with calls have it.
_CALL = "<call>"
_TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}<eos>{% endif %}"
    "{% for m in messages %}<|user|>{{ m.name or '' }}{{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}{{ c.id }}"
    "{% endfor %}{{ m.tool_call_id or '' }}<eos>{% endfor %}{{ hint or '' }}"
)
_PIECES = [
    *_SPECIAL,
    _CALL,
    "<",
    "<e",
    "os>",
    "<|us",
    "er|>",
    "call>",
    "a",
    " ",
    '"',
    "\\",
    "é",
    "\n",
]
_texts = st.lists(st.sampled_from(_PIECES), max_size=4).map("".join)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceCodec:
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in _SPECIAL])
    tokenizer.add_tokens([AddedToken(_CALL, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    return HuggingFaceCodec(folder)


def _control(codec: HuggingFaceCodec, ids: Sequence[int]) -> list[str]:
    names = {codec._tokenizer.token_to_id(text): text for text in (*_SPECIAL, _CALL)}
    return [names[token_id] for token_id in ids if token_id in names]


def _conversation(text: str) -> dict[str, Any]:
    call = ToolCall(text, text, {text: [text, {"n": 1}]})
    return {
        "messages": [
            ChatMessage("user", text, name=text),
            ChatMessage("assistant", text, tool_calls=(call,), reasoning=text),
            ChatMessage("tool", text, tool_call_id=text),
        ],
        "tools": [{"type": "function", "function": {"name": text, "parameters": {text: text}}}],
        "template_kwargs": {"hint": text, text: text},
    }


@given(_texts)
def test_no_text_of_a_client_makes_a_control_token(codec: HuggingFaceCodec, text: str) -> None:
    chat = _conversation(text)
    ids = codec.encode_chat(**chat, continue_final_message=False)
    frame = codec.encode_chat(**_conversation("x"), continue_final_message=False)
    assert _control(codec, ids) == _control(codec, frame)
    values = template_values(chat["messages"], chat["tools"], chat["template_kwargs"])
    rendered = ChatTemplate(_TEMPLATE, {}).render(values, continue_final_message=False)
    assert codec._tokenizer.decode(ids, skip_special_tokens=False) == rendered


def test_a_template_that_escapes_a_control_text_is_rejected(
    tmp_path: Path, codec: HuggingFaceCodec
) -> None:
    for file in codec._folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    template = "{% for m in messages %}{{ m.content | tojson(ensure_ascii=true) }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(InvalidRequest, match="splits the text of a control token"):
        HuggingFaceCodec(tmp_path).encode_chat(
            [ChatMessage("user", "<eos>")], continue_final_message=False
        )


def test_a_variable_of_a_client_replaces_none_of_the_template() -> None:
    source = "{{ bos_token }}{{ add_generation_prompt }}{{ messages | length }}"
    values = template_values(
        [ChatMessage("user", "x")],
        template_kwargs={"bos_token": "no", "add_generation_prompt": "no", "messages": "no"},
    )
    template = ChatTemplate(source, {"bos_token": "<bos>"})
    assert template.render(values, continue_final_message=False) == "<bos>True1"
