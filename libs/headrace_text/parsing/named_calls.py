"""Tool calls that have the name before the arguments, with signs between them."""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass

from headrace_text.parsing.buffered import BufferedParser, CallArguments, CallStart, State
from headrace_text.parsing.json_calls import ListedCalls
from headrace_text.parsing.json_values import ValueScanner

_KIMI_ID = re.compile(r"(?:functions\.)?([^:\s]+)(?::\d+)?")


@dataclass(frozen=True, slots=True)
class CallSigns:
    """The signs around calls. `section` stands before the first call and may be empty, as may `section_end`."""

    section: str
    section_end: str
    call: str
    separator: str
    call_end: str
    has_kind: bool = False
    """Whether a kind and a separator stand before the name, and a fence of backquotes around the arguments."""
    name_is_id: bool = False
    """Whether the model writes an id that contains the name, functions.NAME:NUMBER."""


def _deepseek_sign(words: str) -> str:
    # DeepSeek's bar is a wide one, and its space is a low block.
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


def _deepseek_signs(*, has_kind: bool) -> CallSigns:
    return CallSigns(
        section=_deepseek_sign("tool calls begin"),
        section_end=_deepseek_sign("tool calls end"),
        call=_deepseek_sign("tool call begin"),
        separator=_deepseek_sign("tool sep"),
        call_end=_deepseek_sign("tool call end"),
        has_kind=has_kind,
    )


DEEPSEEK_V3 = _deepseek_signs(has_kind=True)
DEEPSEEK_V31 = _deepseek_signs(has_kind=False)
KIMI_K2 = CallSigns(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    name_is_id=True,
)


class _ArgumentsParser(BufferedParser):
    """Reads the arguments of a call as they arrive. `_after_arguments` follows."""

    def __init__(self) -> None:
        super().__init__()
        self._scanner = ValueScanner()

    def _begin_arguments(self, name: str, call_id: str, state: State) -> None:
        self._pieces.append(CallStart(name, call_id))
        self._scanner = ValueScanner()
        self._state = state

    def _read_arguments(self) -> bool:
        size = self._scanner.scan(self._text)
        if size:
            self._pieces.append(CallArguments(self._take(size)))
        if self._scanner.done:
            self._state = self._after_arguments
        return self._scanner.done

    @abstractmethod
    def _after_arguments(self) -> bool: ...


class NamedCalls(_ArgumentsParser):
    """Calls with these signs."""

    def __init__(self, signs: CallSigns) -> None:
        super().__init__()
        self._signs = signs

    def _start(self) -> bool:
        signs = self._signs
        content, tag = self._take_before([signs.section, signs.section_end, signs.call])
        self._add_content(content)
        if tag == signs.call:
            self._state = self._read_header
        return bool(tag)

    def _read_header(self) -> bool:
        """The text up to the arguments, which has the name."""
        size = self._header_size()
        if size is None:
            if self._ended:
                self._add_content(self._signs.call + self._take(len(self._text)))
            return False
        header = self._take(size)
        kind, separator, name = header.partition(self._signs.separator)
        if not self._signs.has_kind:
            name = kind
        name, call_id = name.strip(), ""
        match = _KIMI_ID.fullmatch(name) if self._signs.name_is_id else None
        if match is not None:
            name, call_id = match[1], name
        if not separator or not name:
            self._add_content(self._signs.call + header)
            self._state = self._start
            return True
        self._begin_arguments(name, call_id, self._open_arguments)
        return True

    def _header_size(self) -> int | None:
        """The number of characters before the arguments. None while it is unknown."""
        separator = self._text.find(self._signs.separator)
        if separator < 0:
            return None
        end = separator + len(self._signs.separator)
        if self._signs.has_kind:
            fence = self._text.find("\n```json\n", end)
            return None if fence < 0 else fence
        return end

    def _open_arguments(self) -> bool:
        text = self._text.removeprefix("\n```json\n").lstrip()
        if text:
            self._text = text
            self._state = self._read_arguments
        return bool(text)

    def _after_arguments(self) -> bool:
        """Drops all up to the end of the call."""
        _, tag = self._take_before([self._signs.call_end])
        if tag:
            self._state = self._start_again
        return bool(tag)


class MistralCalls(ListedCalls, _ArgumentsParser):
    """A JSON array of calls after the tag [TOOL_CALLS], or NAME{...} after each tag, as newer models write."""

    _TAG = "[TOOL_CALLS]"
    _SIGNS = ("[CALL_ID]", "[ARGS]", "{")

    def __init__(self) -> None:
        super().__init__(self._TAG)
        self._name = ""
        self._call_id = ""
        self._sign = ""

    def _open_other(self) -> bool:
        self._name = self._call_id = self._sign = ""
        self._state = self._read_name
        return True

    def _read_name(self) -> bool:
        before, sign = self._take_before(self._SIGNS)
        if self._sign == "[CALL_ID]":
            self._call_id += before
        else:
            self._name += before
        if not sign:
            if self._ended:
                self._add_content(self._TAG + self._name)
            return False
        self._sign = sign
        if sign == "[CALL_ID]":
            return True
        if sign == "{":
            self._text = sign + self._text
        if not self._name.strip():
            self._add_content(self._TAG)
            self._state = self._pass_on
            return True
        self._begin_arguments(self._name.strip(), self._call_id.strip(), self._read_arguments)
        return True

    def _after_arguments(self) -> bool:
        self._skip_space()
        if not self._text:
            return False
        self._state = self._start
        return True
