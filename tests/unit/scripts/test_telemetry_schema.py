"""The files that are generated from the schema of telemetry."""

from __future__ import annotations

from telemetry_schema import outputs


def test_the_generated_files_are_up_to_date() -> None:
    stale = [
        path.name for path, text in outputs().items() if path.read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run scripts/telemetry_schema.py"
