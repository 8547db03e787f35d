"""Keeps the text of control tokens in message contents apart from the control tokens that a chat template makes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tokenizers import AddedToken, Tokenizer, models

from headrace_common.errors import InvalidRequest
from headrace_common.limits import CONTROL_TEXTS_MAX
from headrace_text.codec import ChatMessage

_UNKNOWN = "?"
_PRIVATE_CHARACTERS = frozenset(map(chr, range(0xE000, 0xF900)))


@dataclass(frozen=True, slots=True)
class EscapedChat:
    """A conversation in which placeholders replace the texts of control tokens.

    A placeholder is the number of its original between two characters that no content has.
    """

    messages: Sequence[ChatMessage]
    signs: tuple[str, str]
    originals: tuple[str, ...]
    """The replaced texts."""

    @property
    def placeholder_characters(self) -> int:
        """The length of all placeholders together, if the template keeps each once."""
        return sum(len(str(number)) + 2 for number in range(len(self.originals)))

    def restore(self, text: str) -> str:
        """The text with the originals. Raises InvalidRequest when the template has cut a placeholder."""
        opening, closing = self.signs
        restored = re.sub(
            f"{opening}([0-9]+){closing}", lambda match: self.originals[int(match[1])], text
        )
        if opening in restored or closing in restored:
            raise InvalidRequest(
                {
                    "chat.messages": "the chat template splits the text of a control token in them; remove it"
                }
            )
        return restored


class ControlTokens:
    """Finds the texts of a model's control tokens."""

    def __init__(self, texts: Collection[str]) -> None:
        # This tokenizer only finds texts. It does so without the global interpreter lock, in linear time.
        self._finder = Tokenizer(models.WordLevel({_UNKNOWN: 0}, unk_token=_UNKNOWN))
        self._finder.add_tokens([AddedToken(text, normalized=False) for text in sorted(texts)])
        self._beginnings = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._longest = max(map(len, self._beginnings), default=0)

    def escape(self, messages: Sequence[ChatMessage]) -> EscapedChat:
        """Replaces control texts in the contents. So is the beginning of one at the end of a content, which the next
        text could complete.

        Raises InvalidRequest when there are more than CONTROL_TEXTS_MAX.
        """
        contents = [message.content for message in messages]
        found = list(self._find(contents))
        if not any(found):
            return EscapedChat(messages, ("", ""), ())
        _check_count(found)
        signs = _unused_characters(contents)
        originals: list[str] = []
        escaped: list[ChatMessage] = []
        for message, spans in zip(messages, found, strict=True):
            pieces: list[str] = []
            position = 0
            for start, end in spans:
                pieces += (
                    message.content[position:start],
                    str(len(originals)).join(signs),
                )
                originals.append(message.content[start:end])
                position = end
            pieces.append(message.content[position:])
            escaped.append(replace(message, content="".join(pieces)))
        return EscapedChat(escaped, signs, tuple(originals))

    def _find(self, contents: list[str]) -> Iterator[list[tuple[int, int]]]:
        encodings = self._finder.encode_batch(contents, add_special_tokens=False)
        for content, encoding in zip(contents, encodings, strict=True):
            # Each control text is one token, and so is the text between two of them.
            if len(encoding) > 2 * CONTROL_TEXTS_MAX + 1:
                yield [(0, 0)] * (CONTROL_TEXTS_MAX + 1)
                continue
            spans = [
                span
                for token_id, span in zip(encoding.ids, encoding.offsets, strict=True)
                if token_id
            ]
            yield spans + self._beginning_at_end(content, spans[-1][1] if spans else 0)

    def _beginning_at_end(self, content: str, start: int) -> list[tuple[int, int]]:
        end = len(content.rstrip())
        for size in range(min(self._longest, end - start), 0, -1):
            if content[end - size : end] in self._beginnings:
                return [(end - size, end)]
        return []


def control_texts(
    added_tokens: Iterable[tuple[str, bool]], tokenizer: Tokenizer, frames: Iterable[str]
) -> frozenset[str]:
    """The control tokens among added tokens, which are pairs of text and whether the tokenizer calls it special.

    These are the special ones, and signs in `frames`: conversations without a control text in any content, as the chat
    template renders them.
    """
    added = dict(added_tokens)
    special = {text for text, is_special in added.items() if is_special}
    written = {
        token
        for frame in frames
        for token in tokenizer.encode(frame, add_special_tokens=False).tokens
    }
    return frozenset(special | set(filter(_is_sign, written.intersection(added))))


def _is_sign(text: str) -> bool:
    """False for spaces and words, which some tokenizers have as added tokens."""
    visible = text.strip().strip("\u2581")
    return bool(visible) and not visible[0].isalnum()


def _check_count(found: Sequence[Sequence[tuple[int, int]]]) -> None:
    count = 0
    for index, spans in enumerate(found):
        count += len(spans)
        if count > CONTROL_TEXTS_MAX:
            raise InvalidRequest(
                {
                    f"chat.messages[{index}].content": f"the chat has more than {CONTROL_TEXTS_MAX} texts of control "
                    "tokens; remove some"
                }
            )


def _unused_characters(contents: Sequence[str]) -> tuple[str, str]:
    """Two characters for private use that no content has."""
    unused = _PRIVATE_CHARACTERS.difference(*contents)
    if len(unused) < 2:
        raise InvalidRequest(
            {
                "chat.messages": "have nearly all characters for private use and texts of control tokens; remove either"
            }
        )
    opening, closing = sorted(unused)[:2]
    return opening, closing
