"""Counts what tests/budget.toml bounds: python scripts/budget.py [--lower]

Prints each number beside its budget. `--lower` writes the numbers that have fallen into the file. A number that has
risen is written by hand, in a commit of its own that says why.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from settings_reference import SERVICES

ROOT: Final = Path(__file__).resolve().parent.parent
BUDGET: Final = ROOT / "tests" / "budget.toml"
MEASURED_BY_TEST: Final = "paths"
"""tests/suite/test_paths.py measures the numbers of this table on running services."""
_NO_CODE: Final = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)
_WITH_DOCSTRING: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

Numbers = dict[str, dict[str, int]]


def code_lines(source: str) -> int:
    """Lines of a module that state behaviour.

    Blank lines, comments, imports, and docstrings of modules, classes and functions do not.
    """
    excluded: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            excluded.update(_lines_of(node))
        elif isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            excluded.update(_lines_of(node.body[0]))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - excluded)


def _lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def packages() -> dict[str, list[Path]]:
    """The modules of each package of the product, without generated ones."""
    folders = [*ROOT.glob("libs/headrace_*"), *ROOT.glob("services/*/headrace_*")]
    return {folder.name: sorted(folder.rglob("*.py")) for folder in sorted(folders)}


def method_counts(source: str) -> Iterator[tuple[str, int]]:
    """Each class that does not implement an interface of vLLM, with the number of its methods."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and "KVConnectorBase_V1" not in map(
            ast.unparse, node.bases
        ):
            methods = [
                one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            yield node.name, len(methods)


def measure() -> Numbers:
    """Every number but those of running services, by the tables and names of the budget."""
    sources = {
        name: {path: path.read_text("utf-8") for path in paths}
        for name, paths in packages().items()
    }
    modules = {
        path: text
        for texts in sources.values()
        for path, text in texts.items()
        if path.name != "__init__.py"
    }
    lines = {
        name: sum(code_lines(text) for text in texts.values()) for name, texts in sources.items()
    }
    methods = [count for text in modules.values() for _, count in method_counts(text)]
    tests = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")]
    protos = [path.read_text("utf-8") for path in (ROOT / "protos").rglob("*.proto")]
    return {
        "code_lines": lines,
        "whole": {
            "code_lines": sum(lines.values()),
            "modules": len(modules),
            "longest_module_lines": max(text.count("\n") for text in modules.values()),
            "methods_of_a_class": max(methods),
            "test_lines": sum(text.count("\n") for text in tests),
            "rpcs": sum(len(re.findall(r"^\s*rpc ", text, re.MULTILINE)) for text in protos),
        },
        "settings": {
            service.program.removeprefix("headrace-"): len(service.settings.model_fields)
            for service in SERVICES
        },
    }


def read_budget() -> Numbers:
    """The numbers of tests/budget.toml."""
    found: Numbers = tomllib.loads(BUDGET.read_text("utf-8"))
    return found


def lowered(text: str, measured: Numbers) -> str:
    """The text of the budget with the numbers that have fallen."""
    table, lines = "", []
    for line in text.splitlines():
        if line.startswith("["):
            table = line.strip("[]")
        name, equals, rest = line.partition(" = ")
        number = measured.get(table, {}).get(name) if equals else None
        if number is not None and number < int(rest.split("#")[0]):
            line = line.replace(rest.split("#")[0].strip(), str(number), 1)  # noqa: PLW2901
        lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> int:
    """Returns the exit status: 1 when a number is above its budget."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--lower", action="store_true", help="write the numbers that have fallen")
    options = parser.parse_args()
    budget, measured = read_budget(), measure()
    above = False
    for table, numbers in measured.items():
        for name, number in numbers.items():
            limit = budget.get(table, {}).get(name, 0)
            above = above or number > limit
            print(
                f"{table:12} {name:28} {number:7} of {limit:7}{'  ABOVE' if number > limit else ''}"
            )
    if options.lower:
        BUDGET.write_text(lowered(BUDGET.read_text("utf-8"), measured), "utf-8")
    return int(above)


if __name__ == "__main__":
    sys.exit(main())
