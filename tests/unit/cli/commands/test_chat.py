"""The input of `headrace chat`."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from headrace_cli.app import app


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize(
    ("data", "message"),
    [(b"a\xff", "not UTF-8 at byte 1"), (b" \n", "give PROMPT, or pipe a text")],
)
def test_piped_text_that_is_no_question_is_refused(
    data: bytes, message: str, options: tuple[str, ...]
) -> None:
    refused = CliRunner().invoke(app, ["chat", *options], input=data)
    assert refused.exit_code == 2
    assert message in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
