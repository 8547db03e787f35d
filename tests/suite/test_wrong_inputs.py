"""The page of wrong inputs: each gets the answer that the page has."""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path

import grpc
import httpx2 as httpx
import pytest

from headrace_client import Client
from headrace_common.errors import HeadraceError
from tests.forked_command import run_forked
from tests.ports import free_port
from tests.suite.deployment import suite
from tests.unit.test_architecture import ROOT

PAGE = ROOT / "docs" / "wrong-inputs.md"
_ROW = re.compile(r"\| `(?P<asked>.+?)` \| (?P<answer>.+) \|")
_ROUTER, _HTTP = "127.0.0.1:7050", "127.0.0.1:7056"
LIMIT_S = 60.0


def rows() -> list[tuple[str, str]]:
    """Inputs and answers."""
    found = map(_ROW.fullmatch, PAGE.read_text().splitlines())
    return [(row["asked"], row["answer"].replace("`", "")) for row in found if row is not None]


async def answer_of(asked: str, router: str, http: str) -> str:
    """What a command prints on stderr, the text of an HTTP answer, or the message of the client's error."""
    kind, _, rest = asked.partition(" ")
    if kind == "headrace":
        ended = await run_forked("headrace_cli", *shlex.split(rest), timeout_s=LIMIT_S)
        assert ended.status
        return ended.err
    if kind == "curl":
        process = await asyncio.create_subprocess_exec(
            *shlex.split(asked), stderr=asyncio.subprocess.PIPE
        )
        return (await asyncio.wait_for(process.communicate(), LIMIT_S))[1].decode()
    if kind in ("GET", "POST"):
        url, _, body = rest.partition(" ")
        async with httpx.AsyncClient(timeout=LIMIT_S) as client:
            headers = {"content-type": "application/json"}
            answer = await client.request(kind, f"http://{url}", content=body, headers=headers)
        assert answer.status_code >= 400
        return answer.text.replace('\\"', '"')
    async with grpc.aio.insecure_channel(router) as channel:
        fields = eval(f"dict{asked.removeprefix('generate')}")
        with pytest.raises(HeadraceError) as raised:
            await anext(Client(channel).generate(**fields))
    return str(raised.value)


@pytest.mark.timeout(300)
async def test_each_wrong_input_gets_the_answer_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    listen = f"127.0.0.1:{free_port()}"
    found = rows()
    assert len(found) >= 35
    async with suite(tmp_path, settings=(("router", "http_listen", listen),)) as it:
        router = it.deployment.router
        monkeypatch.setenv("HEADRACE_ENDPOINT", router)
        monkeypatch.setenv("HEADRACE_REGISTRY", it.deployment.registry)
        wrong = []
        for asked, answer in found:
            real = await answer_of(
                asked.replace(_ROUTER, router).replace(_HTTP, listen), router, listen
            )
            words = " ".join(
                real.replace(router, _ROUTER).replace(listen, _HTTP).replace("`", "").split()
            )
            if answer not in words:
                wrong.append(f"{asked}\n  page: {answer}\n  real: {words}")
        assert not wrong, "\n".join(wrong)
