"""The interface of a model's tokenizer and chat template."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace_text.images import ImageRule

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Variables of chat templates with the text of a control token."""
RESERVED_NAMES = frozenset(
    (
        *SPECIAL_TOKEN_NAMES,
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("raise_exception", "strftime_now", "chat_template", "tokenize"),
    )
)
"""Variables of chat templates that a caller cannot set."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function, made by the model. `arguments` is a JSON object."""

    id: str
    name: str
    arguments: Mapping[str, Any]


class ChatMessage(NamedTuple):
    """One message of a conversation. Empty fields other than `content` are not passed to the chat template.

    It is no frozen dataclass, since that takes longer to make.
    """

    role: str
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""
    parts: tuple[str | None, ...] = ()
    """Texts and images in their order, in place of `content`. None is an image."""


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
    images: ImageRule | None = None
    """How the model takes images. None for a model that takes none here."""
    encodes_fast = False
    """Whether it takes some 50 ns for each character of a text, while it has no `encoder_differences`."""
    tool_call_parser = ""
    """The parser of the calls that the model writes, by its chat template. Empty: none is known."""
    reasoning_parser = ""
    """That of its reasoning."""
    images_refusal: str = ""
    """Why not, for a model that takes them elsewhere."""

    @property
    def encoder_differences(self) -> int:
        """Texts to which a fast encoder has given other tokens, since the start."""
        return 0

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
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        cache_scope: str = "",
        add_generation_prompt: bool = True,
    ) -> array[int]:
        """Tokens of a conversation, formatted by the model's chat template.

        `tools` are OpenAI's objects. `template_kwargs` are further variables of the template, by names that are not in
        RESERVED_NAMES. Later system messages become the user's where the template refuses them. Only the template
        makes control tokens: their text in the arguments stays text. Raises InvalidRequest with the template's own
        error message, and TooManyTokens above `tokens_max`. Only calls with an equal `cache_scope` share cached tokens.
        Without `add_generation_prompt`, the text ends with the last message. Each image becomes one placeholder of
        `images`.
        """

    def encode_part(self, text: str) -> list[int]:
        """Tokens of plain text without special tokens around it."""
        return self.encode(text)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The tokenizer's own text of each token. Empty for a token that it does not have."""
        return [self.decode([token_id], skip_special_tokens=False) for token_id in token_ids]

    @abstractmethod
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the tokens. U+FFFD replaces bytes of incomplete characters."""

    def decode_step(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> Callable[[int | list[int]], str | None] | None:
        """A function that takes the tokens after `token_ids`, one or several at once, if the tokenizer has one.

        None also when `token_ids` end within a character.
        It returns the text that they complete, or None while a character is incomplete. It may raise any error for
        tokens that it cannot decode by themselves.
        """
        return None
