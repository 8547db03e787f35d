"""Tool calls that are JSON objects with a name and arguments."""

from __future__ import annotations

from abc import abstractmethod

from headrace_text.parsing.buffered import BufferedParser, CallArguments, CallStart, Piece
from headrace_text.parsing.json_values import CallObject


class _CallObjects(BufferedParser):
    """A parser that reads call objects. `_after_call` follows each of them."""

    def __init__(self) -> None:
        super().__init__()
        self._call = CallObject()
        self._opening = ""

    def _begin_call(self, opening: str) -> None:
        """Reads a call. `opening` is the text before it, for the case that it is none."""
        self._opening = opening
        self._call = CallObject()
        self._state = self._read_call

    def _read_call(self) -> bool:
        size, pieces = self._call.feed(self._text)
        self._take(size)
        self._pieces += pieces
        if self._call.failed or (self._ended and not self._call.done and not self._call.started):
            if not self._call.started:
                self._add_content(self._opening + self._call.raw)
            self._call = CallObject()
            self._state = self._after_failure
            return True
        if self._call.done:
            self._state = self._after_call
            return True
        return False

    @abstractmethod
    def _after_call(self) -> bool: ...

    def _after_failure(self) -> bool:
        return self._pass_on()


class TaggedCalls(_CallObjects):
    """Calls between two tags each, with content between them."""

    def __init__(self, opening: str, closing: str) -> None:
        super().__init__()
        self._opening_tag = opening
        self._closing_tag = closing

    def _start(self) -> bool:
        content, tag = self._take_before([self._opening_tag])
        self._add_content(content)
        if not tag:
            return False
        self._begin_call(tag)
        return True

    def _after_call(self) -> bool:
        return self._pass_tag(self._closing_tag, self._start)

    def _after_failure(self) -> bool:
        self._state = self._start
        return True


class LeadingCalls(_CallObjects):
    """A text that begins with a call, after a tag or without, and has more after semicolons."""

    def __init__(self, tag: str) -> None:
        super().__init__()
        self._tag = tag

    def _start(self) -> bool:
        text = self._text.lstrip()
        if not text:
            return self._pass_on() if self._ended else False
        if text.startswith(self._tag):
            opening = len(self._text) - len(text) + len(self._tag)
        elif not self._ended and self._tag.startswith(text):
            return False
        elif text.startswith("{"):
            opening = 0
        else:
            self._state = self._pass_on
            return True
        self._begin_call(self._take(opening))
        return True

    def _after_call(self) -> bool:
        self._text = self._text.lstrip("; \t\r\n")
        if not self._text:
            return False
        if self._text.startswith("{"):
            self._begin_call("")
        else:
            self._state = self._pass_on
        return True


class ListedCalls(_CallObjects):
    """A JSON array of calls after a tag, or without one if the tag is empty."""

    def __init__(self, opening: str, closing: str = "") -> None:
        super().__init__()
        self._opening_tag = opening
        self._closing_tag = closing
        self._list_opening = ""
        """The text before the first call, for the case that it is none."""
        self._single = False

    def _start(self) -> bool:
        if self._opening_tag:
            content, tag = self._take_before([self._opening_tag])
            self._add_content(content)
            if not tag:
                return False
        self._state = self._open_list
        return True

    def _open_list(self) -> bool:
        text = self._text.lstrip()
        if not text and not self._ended:
            return False
        self._list_opening = self._opening_tag
        if text.startswith("["):
            self._take(len(self._text) - len(text) + 1)
            self._list_opening += "["
            self._state = self._next_call
        elif text.startswith("{") and self._opening_tag:
            # One call without a list.
            self._begin_call(self._opening_tag)
            self._single = True
        else:
            self._state = self._open_other
        return True

    def _open_other(self) -> bool:
        """What follows the tag is no list."""
        self._add_content(self._opening_tag)
        self._state = self._pass_on
        return True

    def _next_call(self) -> bool:
        text = self._text.lstrip(", \t\r\n")
        if not text:
            return False
        if text.startswith("]"):
            self._text = text[1:]
            self._state = self._close_list
        else:
            self._text = text
            self._begin_call(self._list_opening)
        return True

    def _after_call(self) -> bool:
        self._list_opening = ""
        self._state = self._close_list if self._single else self._next_call
        self._single = False
        return True

    def _close_list(self) -> bool:
        return self._pass_tag(
            self._closing_tag, self._start if self._opening_tag else self._pass_on
        )


class NamedCall(BufferedParser):
    """The text is the arguments of one call, of which the request gives the name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _start(self) -> bool:
        self._pieces.append(CallStart(self._name))
        self._state = self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        if self._text:
            self._pieces.append(CallArguments(self._take(len(self._text))))
        return False

    def feed(self, text: str) -> list[Piece]:
        return super().feed(text) if text else []
