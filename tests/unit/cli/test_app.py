"""The command as a whole: its version and its completion."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import typer
from typer.testing import CliRunner

from headrace_cli.app import app
from headrace_common.version import version

COMMAND = (sys.executable, "-m", "headrace_cli")
GROUPS = {(), *((group.name,) for group in app.registered_groups)}


def run(*arguments: str, **environment: str) -> str:
    finished = subprocess.run(
        [*COMMAND, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not finished.stderr
    return finished.stdout


def test_version_is_printed() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert shown.exit_code == 0
    assert shown.stdout == f"headrace {version()}\n"


def test_version_is_printed_without_the_extra_for_commands() -> None:
    script = "import sys; sys.modules['typer'] = None; from headrace_cli.main import main; main()"
    shown = subprocess.run(
        [sys.executable, "-c", script, "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert shown.stdout == f"headrace {version()}\n"


def _command_words(group: typer.Typer, *words: str) -> Iterator[tuple[str, ...]]:
    yield words
    for info in group.registered_commands:
        assert info.callback is not None
        yield (*words, info.name or info.callback.__name__)
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from _command_words(inner.typer_instance, *words, str(inner.name))


@pytest.mark.parametrize("words", sorted(_command_words(app)), ids=" ".join)
def test_help_cuts_nothing_and_has_each_example_on_a_line_of_its_own(
    words: tuple[str, ...],
) -> None:
    """At 80 columns, the width of a small terminal."""
    shown = CliRunner().invoke(app, [*words, "--help"], prog_name="headrace", env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    assert "…" not in shown.stdout
    if not words:
        assert "─ Requests ─" in shown.stdout
    _, found, examples = shown.stdout.partition("Example")
    assert found or words in GROUPS
    for line in examples.splitlines():
        assert line.count("headrace ") <= 1, line


def test_bash_completes_the_names_of_commands() -> None:
    script = run("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "complete -o default -F _headrace_completion headrace" in script
    offered = run(_HEADRACE_COMPLETE="complete_bash", COMP_WORDS="headrace dr", COMP_CWORD="1")
    assert "drain" in offered
    assert "workers" not in offered


@pytest.mark.parametrize(
    ("words", "replacement"),
    [
        ("doctor --firewall --host h", "security.md"),
        ("doctor peer 10.0.0.8", "`nc`"),
        ("trace last --html page.html", "--otlp"),
        ("size model --gbit 100", "capacity.md"),
        ("doctor pair a.toml b.toml", "headrace workers"),
        ("planner replay monday.jsonl", "headrace simulate --planner"),
        ("bench --requests 5", "vllm bench serve"),
        ("context use prod", "config.toml"),
        ("workers --context=prod", "HEADRACE_CONFIG"),
        ("--context prod workers", "HEADRACE_CONFIG"),
        ("up --tensor-parallel 2", "--tensor-parallel-size"),
        ("demo --tensor-parallel=2", "--tensor-parallel-size"),
        ("up --restart", "--no-restart"),
    ],
)
def test_what_was_removed_is_refused_with_its_replacement(words: str, replacement: str) -> None:
    refused = CliRunner().invoke(app, words.split())
    assert refused.exit_code == 2
    assert "was removed" in refused.stderr
    assert replacement in refused.stderr
