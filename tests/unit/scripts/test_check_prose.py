"""The prose check finds what the rules of writing forbid, and nothing else."""

from __future__ import annotations

import pytest

from check_prose import SENTENCE_WORDS_MAX, markdown_passages, proto_passages, python_passages
from check_prose import find_problems as problems_of

LONG = " ".join(["word"] * (SENTENCE_WORDS_MAX + 1))


def found(passages: object) -> list[int]:
    assert hasattr(passages, "__iter__")
    return [finding.line for passage in passages for finding in problems_of(passage)]


@pytest.mark.parametrize(
    "source, lines",
    [
        ('"""The router tells the worker."""', [1]),
        ('"""The router sends `who` to the worker."""', []),
        (f'"""Short.\n\n{LONG}.\n"""', [3]),
        ('"""' + ". ".join(["Ten words or so stand in this one here"] * 5) + '."""', []),
        ("x = 1\n# " + "No" + "body waits.\n", [2]),
        ('raise ValueError("nobody takes the task")', [1]),
        (f'raise ValueError("{LONG}")', []),
        ('x = "who"', []),
        ("def test_nobody_waits() -> None: ...", [1]),
        ("def whole() -> None: ...", []),
    ],
)
def test_python(source: str, lines: list[int]) -> None:
    assert found(python_passages(source)) == lines


@pytest.mark.parametrize(
    "source, lines",
    [
        ("Text.\n\n```\nwho\n```\n", []),
        ("# Title\n\nWh" + "oever reads.\n", [3]),
        (f"| cell | {LONG} |\n", [1]),
        ("- one\n- " + "word " * 20 + "\n- " + "word " * 20, []),
        ("See [who](https://example.org).", [1]),
    ],
)
def test_markdown(source: str, lines: list[int]) -> None:
    assert found(markdown_passages(source)) == lines


def test_proto() -> None:
    assert found(proto_passages("message A {\n  // Set by somebody.\n  int32 a = 1;\n}\n")) == [2]
