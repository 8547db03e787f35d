"""The tokens of answers as OpenAI has them: log probabilities, and where each token begins in the text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_text.codec import TextCodec
from headrace_text.detokenizer import IncrementalDetokenizer

# JSON has no infinity.
_LOGPROB_MIN: Final = -9999.0


class TokenNames:
    """Tokens with their log probabilities, and the most probable ones, among which the sampled one always is.

    `by_id`: tokens are named "token_id:5" in place of their text. `beside_top`: where the sampled token is none of the
    most probable ones, it comes beside them and not in place of the last one. It then is there without any other, too.
    """

    def __init__(self, codec: TextCodec, *, by_id: bool, beside_top: bool) -> None:
        self._codec = codec
        self._by_id = by_id
        self._beside_top = beside_top
        self._texts: dict[int, str] = {}

    def tokens_of(self, message: inference_pb2.GenerateResponse) -> list[dict[str, Any]]:
        """The tokens of a message. Empty when logprobs were not requested."""
        return [
            {**self._token(token_id, entry.logprob), "top_logprobs": self._top(token_id, entry)}
            for token_id, entry in zip(message.token_ids, message.logprobs, strict=False)
        ]

    def prompt_tokens_of(
        self,
        token_ids: Sequence[int],
        entries: Sequence[sampling_pb2.TokenLogprobs],
        count: int,
    ) -> list[dict[str, Any]]:
        """The tokens of a prompt, or of a part of it, with `count` alternatives. The first one of all has no entry."""
        without = len(token_ids) - len(entries)
        return [
            {"token": self._name(token_id), "logprob": None, "top_logprobs": None}
            for token_id in token_ids[:without]
        ] + [
            {
                **self._token(token_id, entry.logprob),
                "top_logprobs": self._top(token_id, entry)[:count],
            }
            for token_id, entry in zip(token_ids[without:], entries, strict=True)
        ]

    def prompt_logprobs_of(
        self, token_ids: Sequence[int], entries: Sequence[sampling_pb2.TokenLogprobs]
    ) -> list[dict[int, dict[str, Any]] | None]:
        """vLLM's `prompt_logprobs` of a whole prompt: the token of each position, and the most probable ones, by id."""
        found: list[dict[int, dict[str, Any]] | None] = [None]
        for token_id, entry in zip(token_ids[1:], entries, strict=True):
            ranked = enumerate(entry.alternatives, 1)
            found.append(
                {
                    token_id: self._ranked(token_id, entry.logprob, entry.rank),
                    **{
                        one.token_id: self._ranked(one.token_id, one.logprob, rank)
                        for rank, one in ranked
                    },
                }
            )
        return found

    def _ranked(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {
            "logprob": _finite(logprob),
            "rank": rank,
            "decoded_token": self._text(token_id),
        }

    def _text(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._codec.decode([token_id], skip_special_tokens=False)
            self._texts[token_id] = text
        return text

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._by_id else self._text(token_id)

    def _top(self, token_id: int, entry: sampling_pb2.TokenLogprobs) -> list[dict[str, Any]]:
        top = [self._token(one.token_id, one.logprob) for one in entry.alternatives]
        if any(one.token_id == token_id for one in entry.alternatives):
            return top
        if not self._beside_top and not top:
            return []
        return [*(top if self._beside_top else top[:-1]), self._token(token_id, entry.logprob)]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._text(token_id)
        return {
            "token": self._name(token_id),
            "logprob": _finite(logprob),
            # A token may be a part of a character, which has no text of its own.
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }


def _finite(logprob: float) -> float:
    return max(logprob, _LOGPROB_MIN) if math.isfinite(logprob) else _LOGPROB_MIN


class PromptOffsets:
    """Where the tokens of a prompt begin in its text, in characters. Tokens that are not in the text have no length."""

    def __init__(self, codec: TextCodec, text: str) -> None:
        self._detokenizer = IncrementalDetokenizer(codec, (), skip_special_tokens=False)
        self._text = text
        self._position = 0

    def extend(self, token_ids: Sequence[int]) -> list[int]:
        """The offsets of more tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._position)
            part = self._detokenizer.append(token_id)
            # Some tokenizers drop a space before the first token.
            at = self._text.find(part, self._position, self._position + len(part) + 1)
            if at >= 0:
                self._position = at + len(part)
        return offsets


class TextOffsets:
    """Where the tokens of one answer begin in its text, in characters. A character's tokens begin where it begins."""

    def __init__(self, codec: TextCodec, *, skip_special_tokens: bool = True) -> None:
        self._detokenizer = IncrementalDetokenizer(
            codec, (), skip_special_tokens=skip_special_tokens
        )
        self._position = 0
        self._has_text = False

    def extend(self, token_ids: Sequence[int], text: str) -> list[int]:
        """The offsets of more tokens. `text` was sent with them."""
        parts = [self._detokenizer.append(token_id) for token_id in token_ids]
        first = next((part for part in parts if part), "")
        # Some tokenizers drop the space before the first token when they do not know the prompt.
        space = 0 if self._has_text or not first or first[0] == " " or text[:1] != " " else 1
        offsets = []
        for part in parts:
            offsets.append(self._position)
            if part:
                self._has_text = True
                self._position += len(part) + space
                space = 0
        return offsets


def tokens_within(codec: TextCodec, token_ids: Sequence[int], text: str, part: range) -> int:
    """The number of tokens of an answer that begin at the characters `part` of its text."""
    if not part:
        return 0
    offsets = TextOffsets(codec, skip_special_tokens=False).extend(token_ids, text)
    return sum(offset in part for offset in offsets)
