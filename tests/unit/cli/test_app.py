"""The command as a whole: its version and its completion."""

from __future__ import annotations

import os
import subprocess
import sys

from headrace_common.version import version

COMMAND = (sys.executable, "-m", "headrace_cli")


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


def test_bash_completes_the_names_of_commands() -> None:
    script = run("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "complete -o default -F _headrace_completion headrace" in script
    offered = run(_HEADRACE_COMPLETE="complete_bash", COMP_WORDS="headrace dr", COMP_CWORD="1")
    assert "drain" in offered
    assert "workers" not in offered
