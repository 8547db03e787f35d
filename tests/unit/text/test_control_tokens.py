"""Only the chat template makes control tokens. Their text in a message's content stays text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from headrace_common.errors import InvalidRequest
from headrace_common.limits import CONTROL_TEXTS_MAX
from headrace_text import encoder
from headrace_text.codec import ChatMessage, TooManyTokens
from headrace_text.hugging_face import HuggingFaceCodec

_TURN = "{% for m in messages %}<|user|>{{ m.role }}:{{ m.content }}<eos>{% endfor %}"
_TEMPLATES = {
    "separated": _TURN,
    "trimmed": _TURN.replace("m.content", "m.content | trim"),
    "adjacent": "<|user|>{% for m in messages %}{{ m.content }}{% endfor %}",
}
_SPECIAL = ("<bos>", "<eos>", "<|end|>")
_PIECES = [
    *_SPECIAL,
    "<|user|>",
    "<think>",
    "<",
    "<b",
    "os>",
    "<|",
    "<|us",
    "er|>",
    "e",
    "é 🙂",
    " ",
    "\n",
]


def _write_model(
    folder: Path,
    template: str,
    normalizer: normalizers.Normalizer | None = None,
    added: Sequence[AddedToken] = (),
) -> HuggingFaceCodec:
    """A byte-level model. Its control tokens are three special ones and <|user|>, which only the template shows."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in _SPECIAL])
    plain = [AddedToken(text, normalized=False) for text in ("<|user|>", "<think>")]
    tokenizer.add_tokens([*plain, *added])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return HuggingFaceCodec(folder)


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HuggingFaceCodec]:
    return {
        name: _write_model(tmp_path_factory.mktemp(name), template)
        for name, template in _TEMPLATES.items()
    }


def _raw(codec: HuggingFaceCodec, ids: Sequence[int]) -> str:
    text: str = codec._tokenizer.decode(ids, skip_special_tokens=False)
    return text


def _control(codec: HuggingFaceCodec, ids: Sequence[int]) -> list[str]:
    texts = (*_SPECIAL, "<|user|>")
    control = {codec._tokenizer.token_to_id(text): text for text in texts}
    return [control[token_id] for token_id in ids if token_id in control]


@example("adjacent", ["a<|en", "d|>", "<", "eos>"])
@given(
    st.sampled_from(sorted(_TEMPLATES)),
    st.lists(st.lists(st.sampled_from(_PIECES)).map("".join), min_size=1, max_size=4),
)
def test_contents_make_no_control_tokens_and_keep_their_text(
    codecs: dict[str, HuggingFaceCodec], name: str, contents: list[str]
) -> None:
    codec = codecs[name]
    messages = [ChatMessage("user", content) for content in contents]
    ids = codec.encode_chat(messages, continue_final_message=False)
    harmless = [ChatMessage("user", "x") for _ in contents]
    frame = codec.encode_chat(harmless, continue_final_message=False)
    assert _control(codec, ids) == _control(codec, frame)
    plain = [content.strip() if name == "trimmed" else content for content in contents]
    if name == "adjacent":
        expected = "<|user|>" + "".join(plain)
    else:
        expected = "".join(f"<|user|>user:{content}<eos>" for content in plain)
    assert _raw(codec, ids) == expected


def test_the_last_message_may_be_continued_after_a_control_text(
    codecs: dict[str, HuggingFaceCodec],
) -> None:
    codec = codecs["separated"]
    ids = codec.encode_chat([ChatMessage("user", "a<eos>b")], continue_final_message=True)
    assert _raw(codec, ids) == "<|user|>user:a<eos>b"
    assert _control(codec, ids) == ["<|user|>"]


def test_an_added_token_that_the_template_does_not_write_stays_a_token(
    codecs: dict[str, HuggingFaceCodec],
) -> None:
    codec = codecs["separated"]
    think = codec._tokenizer.token_to_id("<think>")
    for content in ("<think>", "<think><eos>"):
        ids = codec.encode_chat([ChatMessage("user", content)], continue_final_message=False)
        assert ids.count(think) == 1


def test_spaces_and_words_among_the_added_tokens_are_no_control_tokens(tmp_path: Path) -> None:
    added = [AddedToken(text, normalized=False) for text in ("\n\n", "user")]
    codec = _write_model(tmp_path, _TURN + ".\n\n.", added=added)
    ids = codec.encode_chat([ChatMessage("user", "user\n\n")], continue_final_message=False)
    assert ids.count(codec._tokenizer.token_to_id("user")) == 2
    assert ids.count(codec._tokenizer.token_to_id("\n\n")) == 2


def test_a_content_that_becomes_a_control_text_when_normalized_is_rejected(tmp_path: Path) -> None:
    added = [AddedToken("<|stop|>", normalized=True, special=True)]
    codec = _write_model(tmp_path, _TURN, normalizers.NFKC(), added)
    wide = ChatMessage("user", "\uff1c|stop|\uff1e")
    with pytest.raises(InvalidRequest, match="control token") as caught:
        codec.encode_chat([ChatMessage("user", "x"), wide], continue_final_message=False)
    assert list(caught.value.violations) == ["chat.messages[1].content"]
    ids = codec.encode_chat([ChatMessage("user", "<|stop|>")], continue_final_message=False)
    assert codec._tokenizer.token_to_id("<|stop|>") not in ids


def test_a_content_that_the_tokenizer_cannot_encode_as_text_is_rejected(tmp_path: Path) -> None:
    codec = _write_model(tmp_path, _TEMPLATES["adjacent"])
    path = tmp_path / "tokenizer.json"
    description = json.loads(path.read_text())
    # Whole pieces of text that are tokens of the model need no merges.
    description["model"]["ignore_merges"] = True
    description["model"]["vocab"]["<eos>"] = codec._tokenizer.token_to_id("<eos>")
    description["pre_tokenizer"]["use_regex"] = False
    path.write_text(json.dumps(description))
    with pytest.raises(InvalidRequest, match="cannot encode as text"):
        HuggingFaceCodec(tmp_path).encode_chat(
            [ChatMessage("user", "<eos>")], continue_final_message=False
        )


def test_the_number_of_control_texts_is_bounded(codecs: dict[str, HuggingFaceCodec]) -> None:
    codec = codecs["separated"]
    half = ChatMessage("user", "<eos>" * (CONTROL_TEXTS_MAX // 2))
    ids = codec.encode_chat([half, half], continue_final_message=False)
    assert len(_control(codec, ids)) == 4
    for contents in (["<eos>" * (CONTROL_TEXTS_MAX + 1)], [half.content, half.content, "<eos>"]):
        messages = [ChatMessage("user", content) for content in contents]
        with pytest.raises(InvalidRequest, match=str(CONTROL_TEXTS_MAX)) as caught:
            codec.encode_chat(messages, continue_final_message=False)
        assert list(caught.value.violations) == [f"chat.messages[{len(contents) - 1}].content"]


@pytest.mark.parametrize("cut", [":-1", "1:", ":8"])
def test_a_template_that_cuts_a_control_text_is_reported(tmp_path: Path, cut: str) -> None:
    codec = _write_model(tmp_path, f"{{{{ messages[0].content[{cut}] }}}}")
    with pytest.raises(InvalidRequest, match="splits the text of a control token"):
        codec.encode_chat([ChatMessage("user", "<eos>abcd<eos>")], continue_final_message=False)


def test_private_characters_in_a_content_are_kept(codecs: dict[str, HuggingFaceCodec]) -> None:
    codec = codecs["adjacent"]
    text = "\ue0000\ue001<eos>\ue002"
    ids = codec.encode_chat([ChatMessage("user", text)], continue_final_message=False)
    assert _raw(codec, ids) == f"<|user|>{text}"
    every = "".join(map(chr, range(0xE000, 0xF900)))
    with pytest.raises(InvalidRequest, match="private use"):
        codec.encode_chat([ChatMessage("user", f"{every}<eos>")], continue_final_message=False)


@pytest.mark.parametrize("content", ["abcdefgh", "abc<eos>"])
def test_too_many_tokens_are_counted_and_not_listed(
    codecs: dict[str, HuggingFaceCodec], content: str
) -> None:
    codec = codecs["adjacent"]
    messages = [ChatMessage("user", content)]
    assert len(codec.encode_chat(messages, continue_final_message=False, tokens_max=9)) == 9
    with pytest.raises(TooManyTokens) as caught:
        codec.encode_chat(messages, continue_final_message=False, tokens_max=8)
    assert caught.value.count == 9
    with pytest.raises(TooManyTokens):
        codec.encode("abcdefgh", 7)


@pytest.mark.parametrize("chat", [False, True])
def test_a_far_too_long_text_is_not_encoded_to_its_end(
    codecs: dict[str, HuggingFaceCodec], monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    codec = codecs["adjacent"]
    encoded: list[int] = []
    encode = encoder.encode

    def recorded(tokenizer: Any, text: str, **options: bool) -> Any:
        encoded.append(len(text))
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(encoder, "encode", recorded)
    for length, tokens_max in ((1_000_000, 10_000), (3_000_000, 100_000)):
        encoded.clear()
        text = "some words " * (length // 11)
        messages = [ChatMessage("user", text)]
        with pytest.raises(TooManyTokens) as caught:
            _ = (
                codec.encode_chat(messages, continue_final_message=False, tokens_max=tokens_max)
                if chat
                else codec.encode(text, tokens_max)
            )
        assert not caught.value.count
        assert sum(encoded) < length / 5


@pytest.mark.parametrize(
    "text", ["<|user|>" * 20_000, "<|user|> <eos>x" * 12_000, "<eos>" * 40_000]
)
def test_a_long_text_of_long_tokens_is_encoded(
    codecs: dict[str, HuggingFaceCodec], text: str
) -> None:
    codec = codecs["adjacent"]
    ids = codec.encode(text)
    assert codec.encode(text, len(ids)) == ids
    with pytest.raises(TooManyTokens) as caught:
        codec.encode(text, len(ids) - 1)
    assert caught.value.count == len(ids)
