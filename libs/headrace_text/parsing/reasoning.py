"""Divides text into reasoning and content."""

from __future__ import annotations

from headrace_text.parsing.buffered import BufferedParser, Reasoning


class TaggedReasoning(BufferedParser):
    """Reasoning at the beginning, up to the tag that ends it.

    With `inside`, the text begins within the reasoning, and the opening tag may be absent: the prompt can have it.
    Without, reasoning is only what follows an opening tag at the beginning of the text.
    """

    def __init__(self, opening: str, closing: str, *, inside: bool) -> None:
        super().__init__()
        self._opening = opening
        self._closing = closing
        self._inside = inside

    def _start(self) -> bool:
        text = self._text.lstrip()
        if text.startswith(self._opening):
            self._text = text.removeprefix(self._opening)
            self._state = self._read_reasoning
        elif self._opening.startswith(text) and not self._ended:
            return False
        else:
            self._state = self._read_reasoning if self._inside else self._pass_on
        return True

    def _read_reasoning(self) -> bool:
        text, tag = self._take_before([self._closing])
        if text:
            self._pieces.append(Reasoning(text))
        if tag:
            self._state = self._pass_on
        return bool(tag)

    def _pass_on(self) -> bool:
        self._add_content(self._take(len(self._text)))
        return False
