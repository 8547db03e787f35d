"""Codecs of model folders and of the simulated model, and the errors of broken folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from headrace_common.errors import ConfigError, InvalidRequest
from headrace_text.chat_template import ChatTemplate, template_values
from headrace_text.codec import ChatMessage, TextCodec
from headrace_text.detokenizer import IncrementalDetokenizer
from headrace_text.hugging_face import HuggingFaceCodec
from headrace_text.load import load_codecs

_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system messages here') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "<eos>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
_USER = ChatMessage("user", "hé")


def _write_model(folder: Path, **tokenizer_config: object) -> Path:
    """A byte-level model of 256 bytes, <bos> and <eos>. Its tokenizer adds <bos> to text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<bos>"), AddedToken("<eos>"), AddedToken("<end>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 256)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": 300, "max_position_embeddings": 64, "eos_token_id": 299}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258]}))
    settings = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, **tokenizer_config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _chat(codec: TextCodec, *, continued: bool = False) -> str:
    return codec.decode(codec.encode_chat([_USER], continue_final_message=continued))


def test_vocabulary_context_and_stop_tokens_come_from_the_folder(tmp_path: Path) -> None:
    codec = HuggingFaceCodec(_write_model(tmp_path, chat_template=_TEMPLATE))
    assert codec.vocabulary_size == 300
    assert codec.max_model_len == 64
    assert codec.stop_token_ids == {257, 258}


def test_the_final_message_can_be_continued(tmp_path: Path) -> None:
    codec = HuggingFaceCodec(_write_model(tmp_path, chat_template=_TEMPLATE))
    messages = [_USER, ChatMessage("assistant", "well ")]
    tokens = codec.encode_chat(messages, continue_final_message=True)
    assert codec.decode(tokens) == "[user]hé[assistant]well "
    assert tokens.count(257) == 1


@pytest.mark.parametrize("refuses", [True, False])
def test_late_system_messages_become_the_users_where_the_template_refuses_them(
    tmp_path: Path, refuses: bool
) -> None:
    guard = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('begin with it') }}{% endif %}"
    template = f"{{% for m in messages %}}{guard if refuses else ''}[{{{{ m.role }}}}]{{{{ m.content }}}}{{% endfor %}}"
    codec = HuggingFaceCodec(_write_model(tmp_path, chat_template=template))
    roles = ("system", "system", "user", "system", "assistant", "developer", "user", "user")
    messages = [ChatMessage(role, str(index)) for index, role in enumerate(roles)]
    tokens = codec.encode_chat(messages, continue_final_message=False)
    merged = "[system]0\n\n1[user]2\n\n3[assistant]4[user]5\n\n6[user]7"
    plain = "".join(f"[{role}]{index}" for index, role in enumerate(roles))
    assert codec.decode(tokens) == (merged if refuses else plain)


def test_a_chat_may_end_with_its_last_message(tmp_path: Path) -> None:
    codec = HuggingFaceCodec(_write_model(tmp_path, chat_template=_TEMPLATE))
    tokens = codec.encode_chat([_USER], continue_final_message=False, add_generation_prompt=False)
    assert codec.decode(tokens, skip_special_tokens=False) == "<bos>[user]hé<eos>"


def test_tokens_have_the_tokenizers_own_texts(tmp_path: Path) -> None:
    codec = HuggingFaceCodec(_write_model(tmp_path))
    assert codec.token_texts(codec.encode("é a")) == ["<bos>", "Ã", "©", "Ġ", "a"]
    assert codec.token_texts([299]) == [""]
    simulated = load_codecs({"sim": "sim"})["sim"]
    assert simulated.token_texts([97, 0xE4]) == ["a", "\ufffd"]


def test_a_template_that_trims_is_continued_without_trailing_space() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content | trim }}|{% endfor %}", {})
    messages = [_USER, ChatMessage("assistant", " well ")]
    assert template.render(template_values(messages), continue_final_message=True) == "hé|well"


def test_a_template_that_drops_the_final_message_cannot_be_continued() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        template.render(
            template_values([_USER, ChatMessage("assistant", "x")]), continue_final_message=True
        )


def test_templates_may_use_generation_blocks_json_and_loop_controls() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
    )
    text = ChatTemplate(source, {}).render(
        template_values([_USER, _USER]), continue_final_message=False
    )
    assert text == '{"role": "user", "content": "hé"}'


def test_the_template_is_read_from_its_own_file_or_by_name(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}]
    folder = _write_model(tmp_path, chat_template=named)
    assert _chat(HuggingFaceCodec(folder)) == "named"
    (folder / "chat_template.jinja").write_text("from its file")
    assert _chat(HuggingFaceCodec(folder)) == "from its file"


def test_a_model_without_template_rejects_chat(tmp_path: Path) -> None:
    codec = HuggingFaceCodec(_write_model(tmp_path))
    with pytest.raises(InvalidRequest, match="no chat template; send text"):
        codec.encode_chat([_USER], continue_final_message=False)


@pytest.mark.parametrize(
    "damage,message",
    [
        ("missing", "does not exist"),
        ("no tokenizer.json", "has no tokenizer.json"),
        ("no config.json", "has no config.json"),
        ("broken tokenizer.json", "tokenizer.json that cannot be read"),
        ("broken config.json", "config.json that cannot be read"),
        ("broken template", "chat template cannot be compiled"),
    ],
)
def test_a_broken_folder_is_rejected_in_one_line(tmp_path: Path, damage: str, message: str) -> None:
    template = "{% if %}" if damage == "broken template" else _TEMPLATE
    folder = _write_model(tmp_path, chat_template=template)
    kind, _, name = damage.partition(" ")
    if kind == "no":
        (folder / name).unlink()
    elif kind == "missing":
        folder = tmp_path / "absent"
    elif name.endswith(".json"):
        (folder / name).write_text("{")
    with pytest.raises(ConfigError, match=message) as caught:
        load_codecs({"m": str(folder)})
    assert "\n" not in caught.value.detail


def test_special_tokens_have_no_text_when_streamed(tmp_path: Path) -> None:
    codec = HuggingFaceCodec(_write_model(tmp_path))
    tokens = [*codec.encode("a€")[1:], 257, *codec.encode("b")[1:]]
    detokenizer = IncrementalDetokenizer(codec, codec.encode("prompt"))
    assert [detokenizer.append(token) for token in tokens] == ["a", "", "", "€", "", "b"]
