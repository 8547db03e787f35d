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


class TextCodec(ABC):
    """One model's tokenizer and chat template. Thread-safe."""

    vocabulary_size: int
    """Every token id is below this."""
    max_model_len: int
    """Tokens of prompt and completion together, at most, by the model's files. 0 means unknown."""
    stop_token_ids: frozenset[int]
    """Tokens with which the model ends a completion."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Tokens of plain text, including the special tokens that the tokenizer adds around it."""

    @abstractmethod
    def encode_chat(
        self, messages: Sequence[ChatMessage], *, continue_final_message: bool
    ) -> list[int]:
        """Tokens of a conversation, formatted by the model's chat template.

        Raises InvalidRequest with the template's own error message.
        """

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens without special tokens. U+FFFD replaces bytes of incomplete characters."""
