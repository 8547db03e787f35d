"""What the router asks of a model's text side."""

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
    """One model's tokenizer and chat template. Its methods may be called from any thread."""

    vocabulary_size: int
    """Token ids are below this."""
    max_model_len: int
    """Most tokens of prompt and answer together, by the model's own files; 0 when they do not say."""
    stop_token_ids: frozenset[int]
    """Tokens with which the model ends its answer."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Tokens of plain text, with the special tokens that the tokenizer puts around it."""

    @abstractmethod
    def encode_chat(
        self, messages: Sequence[ChatMessage], *, continue_final_message: bool
    ) -> list[int]:
        """Tokens of a conversation in the model's own template.

        Raises InvalidRequest with the template's words.
        """

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens without special ones; U+FFFD stands for bytes that are no whole character."""
