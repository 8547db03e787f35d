"""The status page of a live deployment in a real browser."""

from __future__ import annotations

import re
from pathlib import Path

from headrace_cli.commands.workers import page_url
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from tests.browser import browse
from tests.ports import free_port
from tests.suite.deployment import prompt_of, suite

TILES = (
    *("requests a second", "tokens a second", "time to first token, p50"),
    *("gap between tokens, p50", "errors", "p90 "),
)


async def test_a_browser_shows_workers_links_and_requests(tmp_path: Path) -> None:
    port = free_port()
    settings = (("router", "status_listen", f"127.0.0.1:{port}"),)
    async with suite(tmp_path, settings=settings) as it:
        outcome = await it.generate(prompt_of(50, 1), 6, request_id="<b>not-markup</b>")
        assert (await it.trace(outcome.trace_id)).complete
        url = page_url(f"127.0.0.1:{port}", Credentials(role=Role.OPERATOR))
        shown = await browse(f"{url}&trace={outcome.trace_id}", tmp_path / "profile")
        assert 'data-drawn="' in shown
        for text in ("prefill-0", "decode-0", "prefill-0/r0 -&gt; decode-0/r0", "prefill queue"):
            assert text in shown, text
        # A client chose the id of its request.
        assert "&lt;b&gt;not-markup&lt;/b&gt;" in shown
        assert "<b>not-markup" not in shown
        assert re.search(r'title="prefill: [0-9.]+ ms"', shown)
        assert f'href="#trace={outcome.trace_id}"' in shown
        assert f"headrace trace {outcome.trace_id}" in shown
        for title in TILES:
            assert title in shown, title
