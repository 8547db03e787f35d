"""Check that prose is plain: short sentences, literal verbs, no words for people where processes are meant.

    python scripts/check_prose.py [PATH ...]

Reads Markdown, docstrings, comments (of Python and protos), messages and function names in Python code. Without
paths it reads every file that git tracks. CONTRIBUTING.md has the rules, this module their limits.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
SENTENCE_WORDS_MAX: Final = 25
MESSAGE_WORDS_MIN: Final = 3

BANNED_WORDS: Final = (
    *("who", "whom", "whose", "whoever", "nobody", "somebody", "someone", "anybody", "anyone"),
    *("everybody", "everyone", "hear", "hears", "heard", "speak", "speaks", "spoken", "spoke"),
    *("tell", "tells", "told", "hope", "hopes", "hoped", "blame", "blames", "blamed"),
)
_BANNED: Final = re.compile(rf"(?<![\w`-])({'|'.join(BANNED_WORDS)})(?![\w`-])", re.IGNORECASE)

# What a sentence is not: code, links, quoted names, placeholders.
_CODE_SPAN: Final = re.compile(r"`[^`]*`|\"[^\"\n]*\"|\{[^{}]*\}|<[^<>\n]*>")
_LINK: Final = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_SENTENCE_END: Final = re.compile(
    r"(?<=[.!?:])[\"')\]]*\s+|\n\s*\n|\n\s*[-*+|]\s+|\n\s*\d+[.)]\s+|\s\|\s"
)
_ABBREVIATION: Final = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|resp|no|fig)\.", re.IGNORECASE)
_WORD: Final = re.compile(r"[A-Za-z0-9][\w'/.:%+-]*")


@dataclass(frozen=True, slots=True)
class Passage:
    """Text from a file, starting at a line counted from 1. `is_message`: a string that a program prints."""

    line: int
    text: str
    is_message: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong, and where."""

    line: int
    problem: str


def find_problems(passage: Passage) -> Iterator[Finding]:
    """Yields the banned words and, outside messages, the sentences that are too long."""
    prose = _ABBREVIATION.sub(r"\1", _LINK.sub(r"\1", passage.text))
    prose = _CODE_SPAN.sub(lambda match: "code" + "\n" * match.group().count("\n"), prose)
    for match in _BANNED.finditer(prose):
        line = passage.line + prose.count("\n", 0, match.start())
        yield Finding(line, f"avoid {match.group()!r}: name the process and a literal verb")
    if passage.is_message:
        return
    start = 0
    for end in (*(match.end() for match in _SENTENCE_END.finditer(prose)), len(prose)):
        sentence = prose[start:end]
        count = len(_WORD.findall(sentence))
        if count > SENTENCE_WORDS_MAX:
            leading = len(sentence) - len(sentence.lstrip())
            line = passage.line + prose.count("\n", 0, start + leading)
            yield Finding(line, f"sentence of {count} words: {SENTENCE_WORDS_MAX} at most")
        start = end


def python_passages(source: str) -> Iterator[Passage]:
    """Yields docstrings, blocks of comments, strings of several words, and names of functions and classes."""
    tree = ast.parse(source)
    # A string that stands alone is a docstring, also behind a constant.
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docstrings:
                yield Passage(node.lineno, node.value)
            elif len(node.value.split()) >= MESSAGE_WORDS_MIN:
                yield Passage(node.lineno, node.value, is_message=True)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield Passage(node.lineno, node.name.replace("_", " "), is_message=True)
    block: list[str] = []
    start = previous = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"#\s*(noqa|type:|!)", token.string):
            continue
        line = token.start[0]
        if block and line != previous + 1:
            yield Passage(start, "\n".join(block))
            block = []
        if not block:
            start = line
        block.append(token.string.lstrip("#:! "))
        previous = line
    if block:
        yield Passage(start, "\n".join(block))


def proto_passages(source: str) -> Iterator[Passage]:
    """Yields blocks of comments."""
    block: list[str] = []
    start = 0
    for number, line in enumerate((*source.splitlines(), ""), 1):
        text = line.strip()
        if text.startswith("//"):
            if not block:
                start = number
            block.append(text.lstrip("/ "))
        elif block:
            yield Passage(start, "\n".join(block))
            block = []


def markdown_passages(source: str) -> Iterator[Passage]:
    """Yields the whole text with blocks of code blanked and one line per table cell boundary kept."""
    lines: list[str] = []
    fenced = False
    for line in source.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
            lines.append("")
        elif fenced or line.startswith("    ") or re.match(r"\s*\|[\s:|-]+\|\s*$", line):
            lines.append("")
        elif line.startswith("#"):
            lines.append(f"{line.lstrip('# ')}.")
        elif line.lstrip().startswith("|"):
            lines.append(f"| {line} .")
        else:
            lines.append(line)
    yield Passage(1, "\n".join(lines))


PASSAGES: Final = {".py": python_passages, ".proto": proto_passages, ".md": markdown_passages}


def tracked_files() -> list[Path]:
    """The files of the repository that hold prose."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    paths = (ROOT / name for name in listed.stdout.splitlines())
    return [path for path in paths if path.suffix in PASSAGES and path.is_file()]


def check_file(path: Path) -> list[Finding]:
    """The problems of one file, by line."""
    source = path.read_text(encoding="utf-8")
    found = {
        finding for passage in PASSAGES[path.suffix](source) for finding in find_problems(passage)
    }
    return sorted(found, key=lambda finding: (finding.line, finding.problem))


def main() -> int:
    given = [Path(argument).resolve() for argument in sys.argv[1:]]
    paths = [
        path
        for path in tracked_files()
        if not given or any(path == base or base in path.parents for base in given)
    ]
    count = 0
    for path in paths:
        for finding in check_file(path):
            count += 1
            print(f"{path.relative_to(ROOT)}:{finding.line}: {finding.problem}")
    if count:
        print(f"{count} findings; CONTRIBUTING.md has the rules of writing", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
