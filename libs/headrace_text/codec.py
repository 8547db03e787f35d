"""The interface of a model's tokenizer and chat template."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str


class TooManyTokens(Exception):
    """A text has more tokens than the caller accepts. `count` is their number, or 0 where it was not counted."""

    def __init__(self, count: int = 0) -> None:
        super().__init__(f"{count or 'too many'} tokens")
        self.count = count


class TextCodec(ABC):
    """One model's tokenizer and chat template. Thread-safe."""

    vocabulary_size: int
    """Every token id is below this."""
    longest_token_bytes: int
    """A text of more bytes than n times this has more than n tokens. 0: the tokenizer has no such bound."""
    max_model_len: int
    """Tokens of prompt and completion together, at most, by the model's files. 0 means unknown."""
    stop_token_ids: frozenset[int]
    """Tokens with which the model ends a completion."""

    @abstractmethod
    def encode(self, text: str, tokens_max: int | None = None) -> list[int]:
        """Tokens of plain text, including the special tokens that the tokenizer adds around it.

        The text of a control token becomes that token. Raises TooManyTokens above `tokens_max`. Long texts are encoded
        without the global interpreter lock, so that other threads continue.
        """

    @abstractmethod
    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        continue_final_message: bool,
        tokens_max: int | None = None,
    ) -> list[int]:
        """Tokens of a conversation, formatted by the model's chat template.

        Only the template makes control tokens: their text in a message's content stays text. Raises InvalidRequest with
        the template's own error message, and TooManyTokens above `tokens_max`.
        """

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens without special tokens. U+FFFD replaces bytes of incomplete characters."""
