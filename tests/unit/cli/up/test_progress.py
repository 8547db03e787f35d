"""The progress of a start is readable for any log."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from headrace_cli.up.deployment import StartProgress
from headrace_cli.up.supervisor import Child
from headrace_cli.up.topology import ProcessSpec


@pytest.fixture
def child(tmp_path: Path) -> Child:
    log = tmp_path / "prefill-0.log"
    log.write_text("[bold] " + "x" * 500 + "\n")
    spec = ProcessSpec("prefill-0", "prefill", (), tmp_path / "port", log, {})
    return Child(spec, cast("Any", None))


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_long_log_line_does_not_shrink_other_columns(child: Child, width: int) -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=width, force_terminal=True, color_system=None)
    with StartProgress(console, [child]):
        pass
    shown = screen.getvalue()
    assert "prefill-0" in shown
    assert "starting" in shown
    assert "[bold] x" in shown


def test_without_a_terminal_each_process_is_printed_once(child: Child) -> None:
    screen = io.StringIO()
    with StartProgress(Console(file=screen), [child]) as progress:
        progress.print_ready()
        assert not screen.getvalue()
        child.mark_ready("127.0.0.1:1")
        progress.print_ready()
        progress.print_ready()
    assert screen.getvalue().count("prefill-0") == 1
    assert "127.0.0.1:1" in screen.getvalue()
