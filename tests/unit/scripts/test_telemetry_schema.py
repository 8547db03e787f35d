"""What is generated from the schema of telemetry."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from telemetry_schema import (
    PAGE,
    SCHEMA,
    load,
    outputs,
    render_names,
    render_page,
    render_tables,
)

SMALL = {
    "spans": {"STEP": {"name": "headrace.step", "kind": "client", "by": ["router"], "meaning": "A."}},
    "events": {"DONE": {"name": "headrace.done", "of": ["SPAN_STEP"], "meaning": "B."}},
    "attributes": {
        "SIZE": {
            "name": "headrace.size",
            "type": "int",
            "unit": "By",
            "of": ["SPAN_STEP", "METRIC_WAIT"],
            "meaning": 'C "d".',
        }
    },
    "metrics": {
        "WAIT": {
            "name": "headrace.wait",
            "instrument": "histogram",
            "unit": "s",
            "by": ["decode"],
            "buckets": "FEW",
            "meaning": "E.",
        }
    },
    "buckets": {"FEW": [0.5, 2]},
}  # fmt: skip


def small(**changes: dict[str, Any]) -> str:
    """The small schema as a file, with changes of entries by "section.KEY"."""
    schema: dict[str, Any] = yaml.safe_load(yaml.safe_dump(SMALL))
    for place, change in changes.items():
        section, key = place.split("__")
        schema[section].setdefault(key, {}).update(change)
    return str(yaml.safe_dump(schema))


def test_the_generated_files_are_up_to_date() -> None:
    stale = [
        path.name for path, text in outputs().items() if path.read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run scripts/telemetry_schema.py"


def test_every_entry_becomes_a_constant_with_its_meaning() -> None:
    module = render_names(load(small()))
    assert '# A.\nSPAN_STEP: Final = "headrace.step"\n' in module
    assert '# C "d".\nATTRIBUTE_SIZE: Final = "headrace.size"\n' in module
    names: dict[str, Any] = {}
    exec(module, names)
    assert names["METRIC_WAIT"] == "headrace.wait"
    assert names["EVENT_DONE"] == "headrace.done"


def test_kinds_units_and_buckets_are_in_the_tables() -> None:
    tables = render_tables(load(small()))
    assert "schema.SPAN_STEP: SpanKind.CLIENT," in tables
    assert (
        'schema.METRIC_WAIT: MetricFacts("histogram", "s", "E.", labels=(schema.ATTRIBUTE_SIZE,), buckets=(0.5, 2)),'
        in tables
    )


def test_the_page_has_a_row_for_each_entry_and_keeps_its_text() -> None:
    page = render_page(PAGE.read_text(encoding="utf-8"), load(small()))
    assert "| `headrace.step` | client | router | A. |" in page
    assert '| `headrace.size` | int, By | `headrace.step` | C "d". |' in page
    assert "| `headrace.wait` | histogram | s | decode | `headrace.size` | E. |" in page
    assert "| `headrace.request` |" not in page
    assert "## Names" in page


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="marks"):
        render_page("# Telemetry\n", load(small()))


@pytest.mark.parametrize(
    "place, change, problem",
    [
        ("spans__STEP", {"kind": "sideways"}, "spans.STEP: kind must be one of server"),
        ("spans__STEP", {"by": ["kitchen"]}, "spans.STEP: by must be of router"),
        ("spans__STEP", {"name": "Step"}, "no dotted name"),
        ("spans__small", {"name": "headrace.x", "kind": "client"}, "in capitals"),
        ("spans__STEP", {"colour": "red"}, "spans.STEP: remove colour"),
        ("attributes__SIZE", {"of": ["SPAN_STOP"]}, "of names SPAN_STOP"),
        ("attributes__SIZE", {"name": "headrace.step"}, "has the name headrace.step already"),
        ("attributes__NEW", {"name": "headrace.new", "type": "int"}, "NEW: add meaning, of"),
        ("metrics__WAIT", {"buckets": "MANY"}, "buckets must be one of FEW"),
        ("metrics__WAIT", {"instrument": "counter"}, "a histogram has buckets"),
    ],
)
def test_a_wrong_entry_is_named(place: str, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        load(small(**{place: change}))


def test_the_schema_ships_beside_the_code_that_is_made_from_it() -> None:
    assert SCHEMA.parent.joinpath("schema.py").is_file()
