"""A fast encoder has the ids of the model's tokenizer, or is not used."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from headrace_text import encoder
from headrace_text.encoder import CHECK_INTERVAL, FastEncoder, TextEncoder, text_encoder

_MODELS = ("SmolLM2-135M-Instruct", "tiny-llama")
_PARTS = [
    *"aZ09 \n\t\r'\"_{é日한ا😀\u0301\u200d\u3000\xa0",
    "  ",
    "'s",
    "'ll",
    "ing",
    "<|im_end|>",
    " the",
]


def _load(name: str) -> tuple[Any, dict[str, Any]]:
    folder = Path("models", name)
    description = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return encoder.make_tokenizer(folder, description), description


@pytest.fixture(scope="module", params=_MODELS)
def loaded(request: pytest.FixtureRequest) -> tuple[TextEncoder, TextEncoder]:
    """By kitoken, and by the tokenizer."""
    tokenizer, description = _load(request.param)
    return text_encoder(tokenizer, description), TextEncoder(tokenizer)


def test_ids_are_equal(loaded: tuple[TextEncoder, TextEncoder]) -> None:
    fast, reference = loaded
    assert isinstance(fast, FastEncoder)
    draw = random.Random(1)
    for _ in range(2_000):
        text = "".join(draw.choices(_PARTS, k=draw.randint(0, 12)))
        assert fast.encode(text) == reference.encode(text), ascii(text)


def test_runs_of_one_character_end_no_process(loaded: tuple[TextEncoder, TextEncoder]) -> None:
    """kitoken ends it for a million spaces before a letter."""
    fast, reference = loaded
    for text in (" " * 1_100_000 + "a", "\t" * encoder.FAST_CHARACTERS_MAX):
        assert fast.encode(text) == reference.encode(text)


def test_a_tokenizer_with_other_ids_or_a_hard_expression_keeps_its_own_encoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, description = _load("SmolLM2-135M-Instruct")
    pattern = {"Regex": "(?<=a)b|c"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    hard = {**description, "pre_tokenizer": split}
    assert type(text_encoder(tokenizer, hard)) is TextEncoder
    assert type(text_encoder(tokenizer, {})) is TextEncoder
    # kitoken's own words of ByteLevel differ after a line feed.
    monkeypatch.setattr(encoder, "_with_words", lambda pre_tokenizer: pre_tokenizer)
    assert type(text_encoder(tokenizer, description)) is TextEncoder


def test_a_difference_ends_the_fast_way_for_good(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer, _ = _load("tiny-llama")
    calls: list[str] = []

    def wrong(text: str, specials: bool) -> list[int]:
        calls.append(text)
        return [1]

    fast, right = FastEncoder(tokenizer, wrong), TextEncoder(tokenizer).encode("a text")
    for _ in range(CHECK_INTERVAL - 1):
        assert fast.encode("a text") == [1]
    assert fast.encode("a text") == right
    for _ in range(CHECK_INTERVAL):
        assert fast.encode("a text") == right
    assert (fast.differences, len(calls)) == (1, CHECK_INTERVAL)
    assert "not used again" in caplog.text
