"""Divides the text of one answer into reasoning, content and tool calls."""

from __future__ import annotations

from headrace_text.parsing.buffered import CallArguments, Content, Piece, Reasoning, TextParser


class AnswerParser:
    """Finds reasoning first, and tool calls in what follows it. Either parser may be None.

    Spaces before and between tool calls are dropped.
    """

    def __init__(self, reasoning: TextParser | None, calls: TextParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._spaces = ""
        """Spaces that are content only if a text follows."""
        self._has_text = False

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain after more text."""
        pieces: list[Piece] = [Content(text)]
        if self._reasoning is not None:
            pieces = self._reasoning.feed(text)
        return self._merged(self._with_calls(pieces))

    def finish(self) -> list[Piece]:
        """The remaining pieces, at the end of the text."""
        pieces = [] if self._reasoning is None else self._reasoning.finish()
        pieces = self._with_calls(pieces)
        if self._calls is not None:
            pieces += self._calls.finish()
        return self._merged(pieces)

    def _with_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._calls is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            found += self._calls.feed(piece.text) if isinstance(piece, Content) else [piece]
        return found

    def _merged(self, pieces: list[Piece]) -> list[Piece]:
        """Joins pieces of one kind, and holds back spaces before the first text and after calls."""
        merged: list[Piece] = []
        for piece in map(self._held_back, pieces):
            last = merged[-1] if merged else None
            joined = None if last is None else _join(last, piece)
            if joined is not None:
                merged[-1] = joined
            elif not isinstance(piece, Content) or piece.text:
                merged.append(piece)
        return merged

    def _held_back(self, piece: Piece) -> Piece:
        if self._calls is None or isinstance(piece, Reasoning):
            return piece
        if not isinstance(piece, Content):
            self._spaces, self._has_text = "", False
            return piece
        text = self._spaces + piece.text
        if not self._has_text and not text.strip():
            self._spaces = text
            return Content("")
        self._spaces, self._has_text = "", True
        return Content(text)


def _join(first: Piece, second: Piece) -> Piece | None:
    """Both pieces as one, if they are of one kind."""
    if isinstance(first, Content) and isinstance(second, Content):
        return Content(first.text + second.text)
    if isinstance(first, Reasoning) and isinstance(second, Reasoning):
        return Reasoning(first.text + second.text)
    if isinstance(first, CallArguments) and isinstance(second, CallArguments):
        return CallArguments(first.text + second.text)
    return None
