"""A model folder with a small tokenizer, for the router of a simulated deployment."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.suite.deployment import VOCABULARY

CONTEXT_TOKENS = 131_072
_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_text_model(folder: Path) -> Path:
    """Writes a byte-level model with a few merges and two control tokens."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("o", "r")]
    tokens = [*alphabet, *("".join(pair) for pair in pairs), "-" * 64]
    tokenizer = Tokenizer(
        models.BPE(vocab={text: index for index, text in enumerate(tokens)}, merges=pairs)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False) for text in ("<|start|>", "<|end|>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    # The simulated model has more tokens than this tokenizer.
    config = {"max_position_embeddings": CONTEXT_TOKENS, "vocab_size": VOCABULARY}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    return folder
