"""The schema has all telemetry names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from headrace_common.telemetry import schema as telemetry_schema

ROOT = Path(__file__).parents[4]
SCHEMA = ROOT / "libs/headrace_common/telemetry/schema.py"
GENERATED = ROOT / "libs/headrace"
# gRPC packages have names with the same prefix.
PREFIX = "headrace."
# Those of OpenTelemetry's conventions that no other text has.
PREFIXES = (PREFIX, "gen_ai.", "rpc.", "http.", "server.", "error.", "network.")
CONVENTIONS = re.compile(
    r"(gen_ai|rpc|http\.(request\.method|route)|server\.(address|port))(\.[a-z_0-9]+)*"
)
AREAS = ("decode", "engine", "inference", "kv", "planner", "prefill", "registry", "worker")
# The JSON of the router's status page states its schema, headrace.status.v1.
JSON_SCHEMA = re.compile(r"headrace\.[a-z-]+\.v[0-9]+")
PACKAGES = tuple(f"headrace.{area}." for area in AREAS)


def is_telemetry_name(text: str) -> bool:
    """Whether a literal is a telemetry name. The prefix alone is not: programs remove it for display."""
    if JSON_SCHEMA.fullmatch(text) or is_package_name(text):
        return False
    if "." in text and CONVENTIONS.fullmatch(text):
        return True
    return len(text) > len(PREFIX) and text.startswith(PREFIX)


def is_package_name(text: str) -> bool:
    return any(text.startswith(f"{package}v{n}") for package in PACKAGES for n in range(1, 10))


def telemetry_literals(source: str) -> Iterator[str]:
    """The string literals of a module that look like telemetry names, without docstrings."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in prose:
            continue
        text = node.value
        if isinstance(text, str) and is_telemetry_name(text):
            yield text


def modules() -> list[Path]:
    folders = (ROOT / "libs", ROOT / "services")
    found = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return [path for path in found if path != SCHEMA and GENERATED not in path.parents]


def test_no_other_module_contains_a_name() -> None:
    assert modules()
    spelled = {
        str(path.relative_to(ROOT)): names
        for path in modules()
        if (names := list(telemetry_literals(path.read_text(encoding="utf-8"))))
    }
    assert spelled == {}


def test_names_are_distinct_and_well_formed() -> None:
    names = [value for name, value in vars(telemetry_schema).items() if name.isupper()]
    assert len(names) == len(set(names))
    assert all(isinstance(name, str) and name.startswith(PREFIXES) for name in names)
