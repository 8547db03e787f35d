"""Calls name their arguments: no call packs positional ones into a tuple to stay within the limit of arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(
    path
    for folder in ("libs", "services")
    for path in (ROOT / folder).rglob("*.py")
    if not path.is_relative_to(ROOT / "libs" / "headrace")
)


def packing_calls(tree: ast.AST) -> Iterator[ast.Call]:
    """The calls with an argument such as `*(a, b)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(
            isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple | ast.List)
            for argument in node.args
        ):
            yield node


def test_no_call_packs_positional_arguments() -> None:
    assert MODULES
    packing = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in MODULES
        for call in packing_calls(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not packing, "name the arguments, or give them one by one"
