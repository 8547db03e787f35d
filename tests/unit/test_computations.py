"""The table of computations in docs/security.md has every function that computes on what callers send."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from headrace_frontend.request import computations
from headrace_frontend.request.computations import Computation
from tests.unit.test_architecture import ROOT

# What callers send is in these.
PARTS = (
    *("libs/headrace_common/http", "libs/headrace_common/rpc/wire_fields.py"),
    *("libs/headrace_frontend", "libs/headrace_text", "services/decode/headrace_decode/http"),
    *("services/router/headrace_router/picker", "services/router/headrace_router/rpc_services.py"),
    *("libs/headrace_kv/prefix", "libs/headrace_engine/vllm/service/constraint_compiler.py"),
)
# Calls that take longer for longer data.
CALLS = frozenset(
    {
        *("loads", "dumps", "model_validate", "model_validate_json", "FromString"),
        *("ParseFromString", "b64decode", "a2b_base64", "decompress", "open", "translate"),
        *("sub", "subn", "search", "match", "fullmatch", "finditer", "findall", "feed_data"),
        *("sha256", "blake2b", "xxh3_64_intdigest", "xxh3_128_digest", "render", "from_string"),
        *("encode_chat", "encode_batch", "encode_part", "token_texts", "decode_step"),
        *("grammar_from", "grammar_from_json_schema", "LLMatcher"),
    }
)
# They compute on files and settings of the own host, or texts of constant length.
OWN_DATA = frozenset(
    {
        "libs/headrace_frontend/config.py:_check_origins",
        "libs/headrace_frontend/openai/intake.py:system_fingerprint",
        "libs/headrace_frontend/openai/app.py:MetricsPage",
        "services/decode/headrace_decode/http/door.py:gateway_gauges",
    }
)
_REFERENCE = re.compile(r"`([a-z_/]+(?:\.py|/))`")
_BOUND = re.compile(r"`([A-Z_]+)`: ([0-9,]+)")


def rows() -> list[list[str]]:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    section = page.partition("\n## Computations on callers' data\n")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    assert len(table) > 10
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1:]]


def computing(path: Path) -> Iterator[str]:
    """The outermost definitions of a file that have such calls."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        calls = (one.func for one in ast.walk(node) if isinstance(one, ast.Call))
        names = {getattr(one, "attr", getattr(one, "id", "")) for one in calls}
        if names & CALLS:
            yield f"{path.relative_to(ROOT)}:{getattr(node, 'name', '')}"


def test_every_function_that_computes_on_what_callers_send_has_a_row() -> None:
    listed = {one for row in rows() for one in _REFERENCE.findall(row[1])}
    files = [
        path for part in PARTS for path in sorted((ROOT / part).rglob("*.py")) or [ROOT / part]
    ]
    found = {one for path in files for one in computing(path)} - OWN_DATA
    assert len(found) > 50
    assert not [one for one in sorted(found) if not one.startswith(tuple(listed))]
    assert not [one for one in sorted(listed) if not (ROOT / one).exists()]


def test_every_computation_of_the_threads_has_its_bound_in_the_table() -> None:
    kinds = vars(computations).items()
    bounds = {name: kind.loop_max for name, kind in kinds if isinstance(kind, Computation)}
    assert dict(_BOUND.findall(" ".join(row[2] for row in rows()))) == {
        name: f"{bound:,}" for name, bound in bounds.items()
    }


def test_only_the_registry_makes_kinds_of_computations() -> None:
    files = (path for part in ("libs", "services") for path in (ROOT / part).rglob("*.py"))
    makers = [one for one in files if re.search(r"\bComputation\(", one.read_text("utf-8"))]
    assert [one.name for one in makers] == ["computations.py"]
