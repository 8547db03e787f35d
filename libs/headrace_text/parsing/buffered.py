"""The base of parsers of text that arrives in parts, and the pieces that they divide it into."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. `call_id` is the id that the model wrote, or empty."""

    name: str
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the latest tool call, which are one JSON object."""

    text: str


Piece: TypeAlias = Content | Reasoning | CallStart | CallArguments


State: TypeAlias = Callable[[], bool]
"""Takes text from the buffer. False when it needs more text."""


class BufferedParser(ABC):
    """Divides text into pieces. The pieces, joined, do not depend on the parts in which the text arrives.

    It has a buffer of text, a state, and the pieces to return.
    """

    def __init__(self) -> None:
        self._text = ""
        self._ended = False
        self._pieces: list[Piece] = []
        self._state: State = self._start

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain after more text."""
        self._text += text
        return self._run()

    def finish(self) -> list[Piece]:
        """The remaining pieces, at the end of the text."""
        self._ended = True
        return self._run()

    @abstractmethod
    def _start(self) -> bool:
        """The first state."""

    def _run(self) -> list[Piece]:
        while self._state():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def _take(self, size: int) -> str:
        taken, self._text = self._text[:size], self._text[size:]
        return taken

    def _add_content(self, text: str) -> None:
        if text:
            self._pieces.append(Content(text))

    def _pass_on(self) -> bool:
        """The rest is content."""
        self._add_content(self._take(len(self._text)))
        return False

    def _take_before(self, tags: Sequence[str]) -> tuple[str, str]:
        """Text up to the first of the tags, and that tag, which is taken too.

        Without a tag, the text that cannot be a part of one, and an empty tag.
        """
        found = [(at, -len(tag), tag) for tag in tags if (at := self._text.find(tag)) >= 0]
        if found:
            at, _, tag = min(found)
            if self._ended or not self._may_be_longer(at, tag, tags):
                before = self._take(at)
                self._take(len(tag))
                return before, tag
            return self._take(at), ""
        held = 0 if self._ended else longest_beginning(self._text, tags)
        return self._take(len(self._text) - held), ""

    def _may_be_longer(self, at: int, tag: str, tags: Sequence[str]) -> bool:
        rest = self._text[at:]
        return any(len(other) > len(tag) and other.startswith(rest) for other in tags)

    def _skip_space(self) -> None:
        self._text = self._text.lstrip()

    def _pass_tag(self, tag: str, state: State) -> bool:
        """Goes on with a state after space, and after the tag if it follows. False while this is open."""
        self._skip_space()
        if self._starts_with(tag) is None:
            return False
        self._text = self._text.removeprefix(tag)
        self._state = state
        return True

    def _start_again(self) -> bool:
        """Goes on with the first state after space. False while no more text has come."""
        self._skip_space()
        if not self._text:
            return False
        self._state = self._start
        return True

    def _starts_with(self, tag: str) -> bool | None:
        """Whether the buffer starts with the tag. None while this is open."""
        if self._text.startswith(tag):
            return True
        if not self._ended and tag.startswith(self._text):
            return None
        return False


def longest_beginning(text: str, tags: Sequence[str]) -> int:
    """The length of the longest end of `text` with which a tag begins."""
    return max(
        next(
            (
                size
                for size in range(min(len(tag) - 1, len(text)), 0, -1)
                if text.endswith(tag[:size])
            ),
            0,
        )
        for tag in tags
    )
