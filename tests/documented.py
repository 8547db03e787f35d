"""The commands of the documents' console blocks, and the marks that say how a test runs them.

A mark is a comment on the line before a block:

    run: sim                  in order, on a simulated deployment; its addresses replace those of the examples
    run: up                   in order, in a network of its own; the page's first such command starts the deployment
    run: sim, status 0 or 1   the same; the command may report what it found by its exit status
    run: shell                in order, in an empty folder without a deployment
    run: NAME                 by a test of its own, which asks for NAME
    not run: REASON           by no test; the reason says why
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```console\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL
)
_RUN = re.compile(r"run: (?P<name>[\w, -]+?)(?P<either>, status 0 or 1)?")
_PATH = re.compile(r"\b[\w./-]+\.(?:py|sh)\b")
_SEPARATORS = frozenset({"|", "&&", "||", ";", "&"})


@dataclass(frozen=True, slots=True)
class Block:
    """A console block. `runs` is the name of its mark; empty when it is not run or has no mark."""

    page: Path
    line: int
    mark: str
    commands: tuple[str, ...]

    @property
    def runs(self) -> str:
        """How a test runs it."""
        found = _RUN.fullmatch(self.mark)
        return found["name"] if found else ""

    @property
    def statuses(self) -> tuple[int, ...]:
        """Exit statuses that are expected."""
        found = _RUN.fullmatch(self.mark)
        return (0, 1) if found and found["either"] else (0,)

    @property
    def named_files(self) -> list[str]:
        """Files of the checkout that the reason names, such as a test that does the same."""
        return [] if self.runs else _PATH.findall(self.mark)


def blocks_of(page: Path) -> Iterator[Block]:
    """The console blocks of a page."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("body")) + 1
        yield Block(page, line, found["mark"] or "", tuple(commands_of(found["body"])))


def commands_of(body: str) -> Iterator[str]:
    """The commands after "$ ", each with its continued lines, without comments. Lines of output are left out."""
    lines: list[str] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            yield from _joined(lines)
            lines = [line[2:]]
        elif lines and (line.startswith("> ") or lines[-1].endswith("\\") or _is_open(lines)):
            lines.append(line.removeprefix("> "))
        else:
            yield from _joined(lines)
            lines = []
    yield from _joined(lines)


def _is_open(lines: list[str]) -> bool:
    """Whether a quotation goes on after the last line."""
    try:
        shlex.split("\n".join(lines), comments=True)
    except ValueError:
        return "<<" not in lines[0]
    return False


def _joined(lines: list[str]) -> Iterator[str]:
    if lines:
        yield re.sub(r"\s{2,}# .*$", "", "\n".join(lines), flags=re.MULTILINE)


def words_of(command: str) -> Iterator[list[str]]:
    """The words of each program that a command line starts, without variables before it, and without redirections."""
    lexer = shlex.shlex(
        command.replace("\\\n", " ").replace("\n", " ; "), posix=True, punctuation_chars=True
    )
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    skips = False
    for word in lexer:
        if word in _SEPARATORS:
            yield from _program(words)
            words = []
        elif set(word) <= set("<>&") or skips:
            skips = not skips and set(word) <= set("<>&")
        else:
            words.append(word)
    yield from _program(words)


def _program(words: list[str]) -> Iterator[list[str]]:
    while words and (re.fullmatch(r"\w+=.*", words[0]) or words[0] in ("do", "sudo", "then")):
        words = words[1:]
    if words:
        yield words
