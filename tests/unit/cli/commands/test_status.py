"""The address of the status page."""

from __future__ import annotations

from pathlib import Path

from headrace_cli.commands.workers import page_url
from headrace_common.access.credentials import Credentials


def test_the_token_is_in_the_part_that_browsers_do_not_send(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("abc.def.ghi\n")
    assert page_url("host:7057", Credentials(token_file=str(token))) == (
        "http://host:7057/#token=abc.def.ghi"
    )
