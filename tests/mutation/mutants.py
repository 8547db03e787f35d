"""Small mutations of Python code: where they are possible, and the code with one of them made. Pure."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

COMPARISONS: Final[Mapping[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: Final[Mapping[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
CALLS: Final[Mapping[str, str]] = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Site:
    """One possible mutation: the `index`-th node of `ast.walk`, in a function of a module."""

    module: str
    function: str
    line: int
    index: int
    before: str
    after: str

    @property
    def key(self) -> str:
        """Names the mutation also when lines above it change."""
        return f"{self.module} {self.function}: {self.before} -> {self.after}"

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.function}: {self.before} -> {self.after}"


def find_sites(module: str, source: str) -> list[Site]:
    """The possible mutations of a module's functions, in the order of its source."""
    tree = ast.parse(source)
    owners = dict(_owners(tree))
    sites = []
    for index, node in enumerate(ast.walk(tree)):
        function = owners.get(node)
        mutated = _mutate(copy.deepcopy(node)) if function is not None else None
        if function is not None and mutated is not None:
            line = getattr(node, "lineno", 0)
            before, after = ast.unparse(node), ast.unparse(mutated) or "pass"
            sites.append(Site(module, function, line, index, before, after))
    return sorted(sites, key=lambda site: (site.line, site.index))


def apply(source: str, site: Site) -> str:
    """The module with one mutation made. Comments are lost."""
    tree = ast.parse(source)
    target = list(ast.walk(tree))[site.index]
    mutated = _mutate(copy.deepcopy(target))
    assert mutated is not None, f"{site} does not fit the source"
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is target:
                setattr(parent, name, mutated)
            elif isinstance(value, list) and any(item is target for item in value):
                setattr(parent, name, [mutated if item is target else item for item in value])
    return ast.unparse(ast.fix_missing_locations(tree))


def sample(sites: Mapping[str, list[Site]], count: int, seed: int) -> list[Site]:
    """Draws `count` sites, the modules in turn, each module's sites in a seeded order."""
    generator = random.Random(seed)
    shuffled = {
        module: generator.sample(found, len(found)) for module, found in sorted(sites.items())
    }
    drawn: list[Site] = []
    while len(drawn) < count and any(shuffled.values()):
        for found in shuffled.values():
            if found and len(drawn) < count:
                drawn.append(found.pop())
    return drawn


def _owners(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Every node in the body of a function, with the function's qualified name."""

    def visit(node: ast.AST, scope: tuple[str, ...], inside: bool) -> Iterator[tuple[ast.AST, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from visit(child, (*scope, child.name), False)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                for statement in child.body:
                    yield statement, ".".join((*scope, child.name))
                    yield from visit(statement, (*scope, child.name), True)
            else:
                if inside:
                    yield child, ".".join(scope)
                yield from visit(child, scope, inside)

    return visit(tree, (), False)


def _mutate(node: ast.AST) -> ast.AST | None:
    """A mutated form of the node, or None where there is none."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            node.ops = [COMPARISONS[type(operator)]()]
        case ast.BinOp(op=operator) if type(operator) in ARITHMETIC:
            node.op = ARITHMETIC[type(operator)]()
        case ast.BoolOp(op=ast.And()):
            node.op = ast.Or()
        case ast.BoolOp(op=ast.Or()):
            node.op = ast.And()
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Call(func=ast.Name(id=name) as function) if name in CALLS:
            function.id = CALLS[name]
        case ast.Constant(value=bool(value)):
            node.value = not value
        case ast.AugAssign(op=operator) if type(operator) in ARITHMETIC:
            node.op = ARITHMETIC[type(operator)]()
        case ast.Expr(value=ast.Call(func=function)) if not _is_log(function):
            return ast.Pass()
        case _:
            return None
    return node


def _is_log(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and ast.unparse(function.value) in ("_log", "_LOG")
