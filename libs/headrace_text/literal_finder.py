"""Finds any of many fixed texts in a text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import groupby, takewhile
from typing import Final

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
