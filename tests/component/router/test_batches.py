"""Files and batches with OpenAI's client: the whole flow, restarts, bounds, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import priority_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import ConfigError
from tests.kit.router import Rig
from tests.kit.workers import Event, FakeDecode, Script, finished, reserved, tokens
from tests.ports import free_port
from tests.waiting import until

KEYS = {"key-a": "a", "key-b": "b"}
CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def gated(gate: asyncio.Event, free: int) -> Script:
    """Answers so many requests at once, and the others once the gate is open."""
    asked = 0

    async def script(
        worker: FakeDecode, request: decode_pb2.GenerateRequest
    ) -> AsyncIterator[Event]:
        nonlocal asked
        asked += 1
        is_free = asked <= free
        yield reserved(request)
        yield tokens("o")
        if not is_free:
            await gate.wait()
        yield tokens("k")
        yield finished(request)

    return script


def line(number: int, url: str = CHAT, **body: Any) -> dict[str, Any]:
    given = {"model": "sim", "max_tokens": 4, **body}
    if url == CHAT:
        given.setdefault("messages", [{"role": "user", "content": f"hi {number}"}])
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": given}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


class Routers:
    """Routers with a worker each and a folder each, which a restart keeps."""

    def __init__(self, folder: Path, count: int = 1, **settings: Any) -> None:
        self.folder = folder
        self.gate = asyncio.Event()
        self.gate.set()
        self.free = 0
        self._settings = [
            {
                "tenants": KEYS,
                "http_listen": f"127.0.0.1:{free_port()}",
                "batch_folder": str(folder / str(number)),
                **settings,
            }
            for number in range(count)
        ]
        self.rigs: list[Rig] = []

    def client(self, router: int = 0, key: str = "key-a") -> Any:
        url = f"http://{self._settings[router]['http_listen']}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=30)

    def prompts(self) -> list[str]:
        """Those that workers have got."""
        return [
            str(request.request_id)
            for rig in self.rigs
            for worker in rig.decodes
            for request in worker.requests
        ]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Routers]:
        self.rigs = [await Rig(**given).start() for given in self._settings]
        members = []
        for number, rig in enumerate(self.rigs):
            decode = await rig.add_decode(gated(self.gate, self.free))
            router = registry_pb2.Member(
                worker_id=f"router-{number}",
                incarnation=f"{number}" * 16,
                role=registry_pb2.Member.ROLE_ROUTER,
                endpoint=rig.internal_endpoint,
            )
            members += [decode.member, router]
        for rig in self.rigs:
            own = [one.member for one in rig.decodes]
            rig.router.update([*own, *(one for one in members if one.worker_id[0] == "r")])
        servers = [rig.http_server() for rig in self.rigs]
        for server in servers:
            server.start()
        try:
            yield self
        finally:
            for server in servers:
                await server.stop()
            for rig in self.rigs:
                await rig.close()


@pytest.fixture
async def routers(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Routers]:
    async with Routers(tmp_path, **getattr(request, "param", {})).running() as running:
        yield running


async def upload(client: Any, *lines: Any, name: str = "in.jsonl") -> Any:
    return await client.files.create(file=(name, jsonl(*lines)), purpose="batch")


async def batch_of(client: Any, *lines: Any, endpoint: str = CHAT, **given: Any) -> Any:
    file = await upload(client, *lines)
    fields = {"completion_window": "24h", "endpoint": endpoint, **given}
    return await client.batches.create(input_file_id=file.id, **fields)


async def ended(client: Any, batch: Any) -> Any:
    found = batch

    async def has_ended() -> bool:
        nonlocal found
        found = await client.batches.retrieve(batch.id)
        return found.status in ENDED

    await until(has_ended, interval_s=0.02)
    return found


async def results(client: Any, file_id: str | None) -> dict[str, Any]:
    """The lines of an output by custom id, each of which is there once."""
    if file_id is None:
        return {}
    content = await client.files.content(file_id)
    lines = [json.loads(one) for one in content.text.splitlines()]
    found = {one["custom_id"]: one for one in lines}
    assert len(found) == len(lines)
    return found


@pytest.mark.parametrize("routers", [{"count": 2}], indirect=True)
@pytest.mark.parametrize("router", [0, 1])
async def test_the_whole_flow_with_openais_client_on_every_router(
    routers: Routers, router: int
) -> None:
    async with routers.client() as client, routers.client(router) as other:
        file = await upload(client, *map(line, range(20)))
        assert (file.purpose, file.filename, file.status) == ("batch", "in.jsonl", "processed")
        assert await other.files.retrieve(file.id) == file
        made = await other.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
        )
        assert (made.status, made.metadata) == ("validating", {"a": "b"})
        batch = await ended(other, made)
        assert batch.status == "completed"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (20, 20, 0)
        assert batch.error_file_id is None
        found = await results(other, batch.output_file_id)
        assert sorted(found) == sorted(f"line-{number}" for number in range(20))
        for one in found.values():
            assert one["error"] is None
            assert one["response"]["status_code"] == 200
            assert one["response"]["body"]["choices"][0]["message"]["content"] == "ok"
        assert [one.id for one in (await client.batches.list()).data] == [batch.id]
        listed = await client.files.list(order="asc", limit=1)
        assert [one.id async for one in listed] == [file.id, batch.output_file_id]
        (only,) = (await client.files.list(purpose="batch_output")).data
        assert only.id == batch.output_file_id
        assert (await other.files.content(file.id)).content == jsonl(*map(line, range(20)))
        assert (await other.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError, match="was deleted"):
            await client.files.retrieve(file.id)


@pytest.mark.parametrize(
    ("endpoint", "body", "answer"),
    [
        ("/v1/completions", {"prompt": "hi"}, ("choices", 0, "text")),
        (
            "/v1/responses",
            {"input": "hi", "max_tokens": None},
            ("output", 0, "content", 0, "text"),
        ),
    ],
)
async def test_other_endpoints_answer_lines(
    routers: Routers, endpoint: str, body: dict[str, Any], answer: tuple[Any, ...]
) -> None:
    async with routers.client() as client:
        made = await batch_of(client, line(0, endpoint, **body), endpoint=endpoint)
        batch = await ended(client, made)
        found = (await results(client, batch.output_file_id))["line-0"]["response"]["body"]
        for step in answer:
            found = found[step]
        assert found == "ok"


async def test_lines_are_of_the_lowest_class(routers: Routers) -> None:
    async with routers.client() as client:
        await ended(client, await batch_of(client, line(0, priority=-1)))
        record = routers.rigs[0].router.metrics
        assert record
        (request,) = routers.rigs[0].decodes[0].requests
        assert request


async def test_a_killed_router_answers_every_line_once(tmp_path: Path) -> None:
    routers = Routers(tmp_path)
    routers.gate.clear()
    routers.free = 5
    lines = [line(number) for number in range(30)]
    async with routers.running(), routers.client() as client:
        made = await batch_of(client, *lines)

        async def some() -> bool:
            counts = (await client.batches.retrieve(made.id)).request_counts
            return bool(counts.completed == 5)

        await until(some, interval_s=0.02)
    (output,) = [
        path
        for path in (tmp_path / "0").glob("file-*.jsonl")
        if b'"response"' in path.read_bytes()
    ]
    assert len(output.read_bytes().splitlines()) == 5
    with output.open("ab") as file:
        # As by a crash of the machine.
        file.write(b'{"id": "batch_req_torn", "custom_id": "line-29", "resp')
    before = {json.loads(one)["custom_id"] for one in output.read_bytes().splitlines()[:5]}
    routers.gate.set()
    async with routers.running(), routers.client() as client:
        batch = await ended(client, made)
        assert batch.status == "completed"
        assert batch.request_counts.completed == 30
        found = await results(client, batch.output_file_id)
        assert sorted(found) == sorted(one["custom_id"] for one in lines)
        assert len(routers.prompts()) == 30 - len(before)
