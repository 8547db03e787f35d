"""Keeps the text of control tokens in clients' texts apart from the control tokens that a chat template makes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, takewhile
from typing import Any, Final

from tokenizers import Tokenizer

from headrace_common.errors import InvalidRequest
from headrace_common.limits import CONTROL_TEXTS_MAX

# A search holds the global interpreter lock for so many characters, about 0.1 ms.
_SLICE_CHARACTERS: Final = 65_536


class LiteralFinder:
    """Finds non-empty texts. Thread-safe. It takes linear time, and releases the interpreter lock now and then."""

    def __init__(self, texts: Collection[str]) -> None:
        self._search = re.compile(_any_of(sorted(texts))).search if texts else None
        self._longest = max(map(len, texts), default=0)

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Start and end of each occurrence, from the left. Of several at one place, the longest; none overlap."""
        position = 0
        while self._search is not None and position < len(text):
            end = position + _SLICE_CHARACTERS
            found = self._search(text, position, end + self._longest - 1)
            # One that begins behind the slice may be longer than is visible.
            if found is None or found.start() >= end:
                position = end
            else:
                position = found.end()
                yield found.span()


def _any_of(texts: list[str]) -> str:
    """The regular expression of the longest of sorted texts: a tree of their characters, so it never goes back far."""
    pairs = zip(texts[0], texts[-1], strict=False)
    shared = texts[0][: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))]
    rests = [text[len(shared) :] for text in texts if text != shared]
    branches = "|".join(_any_of(list(group)) for _, group in groupby(rests, lambda rest: rest[0]))
    optional = "?" if len(rests) < len(texts) else ""
    return re.escape(shared) + (f"(?:{branches}){optional}" if rests else "")


_KWARGS = "chat.template_kwargs"
# Keys of a message with a value that no client chooses freely.
_FIXED_KEYS = frozenset({"role"})
# Keys of a message that differ from the field in the request.
_FIELDS = {"reasoning_content": "reasoning"}
_PRIVATE_CHARACTERS = frozenset(map(chr, range(0xE000, 0xF900)))


@dataclass(frozen=True, slots=True)
class EscapedChat:
    """Values of a chat template in which placeholders replace the texts of control tokens.

    A placeholder is the number of its original between two characters that no text has.
    """

    values: Mapping[str, Any]
    signs: tuple[str, ...]
    """Empty where nothing is replaced."""
    originals: tuple[str, ...]
    """The replaced texts."""

    def is_in(self, text: str) -> bool:
        """Whether `text` has a placeholder, or a part of one."""
        return any(form in text for form in self._sign_forms)

    def originals_in(self, text: str) -> tuple[str, ...]:
        """The replaced texts, by the placeholders in `text`, in order."""
        if not self.originals:
            return ()
        return tuple(self.originals[int(found[1])] for found in self._placeholders.finditer(text))

    def placeholder_characters(self, text: str) -> int:
        """The length of all placeholders in `text` together."""
        return sum(len(found[0]) for found in self._placeholders.finditer(text))

    @property
    def _sign_forms(self) -> list[str]:
        """The signs, and how JSON of ASCII has them."""
        return [form for sign in self.signs for form in (sign, f"\\u{ord(sign):04x}")]

    @property
    def _placeholders(self) -> re.Pattern[str]:
        opening, closing = self.signs
        return re.compile(f"{opening}([0-9]+){closing}")

    def restore(self, text: str) -> str:
        """The text with the originals. Raises InvalidRequest when the template has cut a placeholder."""
        restored = self._placeholders.sub(lambda match: self.originals[int(match[1])], text)
        if any(form in restored for form in self._sign_forms):
            raise InvalidRequest(
                {
                    "chat.messages": "the chat template splits the text of a control token in the chat; remove it"
                }
            )
        return restored


NOTHING_ESCAPED: Final = EscapedChat({}, (), ())


class ControlTokens:
    """Finds the texts of a model's control tokens."""

    def __init__(self, texts: Collection[str]) -> None:
        self._finder = LiteralFinder(texts)
        self._beginnings = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._longest = max(map(len, self._beginnings), default=0)

    def escape(self, values: Mapping[str, Any]) -> EscapedChat:
        """Replaces control texts in the texts of a template's values, which `template_values` has made. So is the
        beginning of one at the end of a text, which the next text could complete.

        Raises InvalidRequest when there are more than CONTROL_TEXTS_MAX.
        """
        paths, texts = zip(*texts_in(values), strict=True)
        found = list(map(self._find, texts))
        if not any(found):
            return EscapedChat(values, (), ())
        _check_count(paths, found)
        signs = _unused_characters(texts)
        originals: list[str] = []
        escaped: list[str] = []
        for text, spans in zip(texts, found, strict=True):
            pieces: list[str] = []
            position = 0
            for start, end in spans:
                pieces += (text[position:start], str(len(originals)).join(signs))
                originals.append(text[start:end])
                position = end
            pieces.append(text[position:])
            escaped.append("".join(pieces))
        return EscapedChat(_with_texts(values, iter(escaped)), signs, tuple(originals))

    def _find(self, text: str) -> list[tuple[int, int]]:
        spans = list(islice(self._finder.spans(text), CONTROL_TEXTS_MAX + 1))
        return spans + self._beginning_at_end(text, spans[-1][1] if spans else 0)

    def _beginning_at_end(self, text: str, start: int) -> list[tuple[int, int]]:
        end = len(text.rstrip())
        for size in range(min(self._longest, end - start), 0, -1):
            if text[end - size : end] in self._beginnings:
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


def texts_in(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """All texts of a client in a template's values, with the path of the field that each is from. Keys count."""
    for name, value in values.items():
        if name not in ("messages", "tools"):
            yield _KWARGS, name
            yield from ((_KWARGS, text) for text in _texts(value))
    for index, message in enumerate(values["messages"]):
        for name, value in message.items():
            if name not in _FIXED_KEYS:
                path = f"chat.messages[{index}].{_FIELDS.get(name, name)}"
                yield from ((path, text) for text in _texts(value))
    for index, tool in enumerate(values["tools"] or ()):
        yield from ((f"chat.tools[{index}]", text) for text in _texts(tool))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield key
            yield from _texts(child)
    elif isinstance(value, list | tuple):
        for child in value:
            yield from _texts(child)


def _with_texts(values: Mapping[str, Any], texts: Iterator[str]) -> dict[str, Any]:
    """The values with other texts, in the order of `texts_in`."""
    replaced: dict[str, Any] = {}
    for name, value in values.items():
        if name not in ("messages", "tools"):
            key = next(texts)
            replaced[key] = _replaced(value, texts)
    replaced["messages"] = [
        {
            name: value if name in _FIXED_KEYS else _replaced(value, texts)
            for name, value in message.items()
        }
        for message in values["messages"]
    ]
    replaced["tools"] = [_replaced(tool, texts) for tool in values["tools"] or ()] or None
    return replaced


def _replaced(value: Any, texts: Iterator[str]) -> Any:
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, Mapping):
        # The key comes before the value, as in `_texts`.
        return {next(texts): _replaced(child, texts) for child in value.values()}
    if isinstance(value, list | tuple):
        return [_replaced(child, texts) for child in value]
    return value


def _check_count(paths: Sequence[str], found: Sequence[Sequence[tuple[int, int]]]) -> None:
    count = 0
    for path, spans in zip(paths, found, strict=True):
        count += len(spans)
        if count > CONTROL_TEXTS_MAX:
            raise InvalidRequest(
                {
                    path: f"the chat has more than {CONTROL_TEXTS_MAX} texts of control tokens; remove some"
                }
            )


def _unused_characters(texts: Sequence[str]) -> tuple[str, str]:
    """Two characters for private use that no text has."""
    unused = _PRIVATE_CHARACTERS.difference(*(text for text in texts if not text.isascii()))
    if len(unused) < 2:
        raise InvalidRequest(
            {
                "chat.messages": "have nearly all characters for private use and texts of control tokens; remove either"
            }
        )
    opening, closing = sorted(unused)[:2]
    return opening, closing
