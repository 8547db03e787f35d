"""Files and batches with OpenAI's client: the whole flow, restarts, bounds, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import stat
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest
from typer.testing import CliRunner, Result

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import priority_pb2
from headrace.registry.v1 import registry_pb2
from headrace_cli.app import app
from headrace_common.deadlines import Deadline
from headrace_common.errors import ConfigError, HeadraceError, InternalError, QueueFull, WorkerGone
from headrace_frontend.openai.batches.folder import FILE, BatchFolder, new_id
from headrace_frontend.openai.batches.lines import LineFile, result_line
from headrace_frontend.openai.batches.upload import read_upload
from tests.kit.router import Rig
from tests.kit.workers import Event, FakeDecode, Script, finished, reply, reserved, tokens
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

    def __init__(
        self, folder: Path, count: int = 1, script: Script | None = None, **settings: Any
    ) -> None:
        self.folder = folder
        self.gate = asyncio.Event()
        self.gate.set()
        self.free = 0
        self._script = script
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

    def url(self, router: int = 0) -> str:
        return f"http://{self._settings[router]['http_listen']}/v1"

    def client(self, router: int = 0, key: str = "key-a") -> Any:
        return openai.AsyncOpenAI(base_url=self.url(router), api_key=key, max_retries=0, timeout=30)

    @property
    def asked(self) -> int:
        """The requests that workers have got since the last start."""
        return sum(len(worker.requests) for rig in self.rigs for worker in rig.decodes)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Routers]:
        self.rigs = [await Rig(**given).start() for given in self._settings]
        members = []
        for number, rig in enumerate(self.rigs):
            decode = await rig.add_decode(self._script or gated(self.gate, self.free))
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
        file = await upload(client, *map(line, range(20)), name="ä 漢.jsonl")
        assert (file.purpose, file.filename, file.status) == ("batch", "ä 漢.jsonl", "processed")
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
        with pytest.raises(openai.BadRequestError, match="must be 24h, or less"):
            await batch_of(client, line(0), completion_window="7d")
        with pytest.raises(openai.NotFoundError, match="was deleted"):
            await client.files.retrieve(file.id)


@pytest.mark.parametrize(
    ("endpoint", "body", "answer"),
    [
        ("/v1/completions", {"prompt": "hi"}, ("choices", 0, "text")),
        ("/v1/responses", {"input": "hi", "max_tokens": None}, ("output", 0, "content", 0, "text")),
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
    (request,) = routers.rigs[0].decodes[0].requests
    assert request.priority == priority_pb2.PRIORITY_LOW


async def test_a_slot_stays_free_for_others(routers: Routers) -> None:
    routers.gate.clear()
    worker = routers.rigs[0].decodes[0]
    async with routers.client() as client:
        made = await batch_of(client, *map(line, range(20)))
        slots = 8
        await until(lambda: routers.asked == slots - 1)
        chat = asyncio.create_task(client.chat.completions.create(**line(0)["body"]))
        await until(lambda: routers.asked == slots)
        assert worker.requests[-1].priority == priority_pb2.PRIORITY_UNSPECIFIED
        routers.gate.set()
        assert (await chat).choices[0].message.content == "ok"
        assert (await ended(client, made)).request_counts.completed == 20


async def test_the_batches_of_a_tenant_run_one_after_the_other(routers: Routers) -> None:
    routers.gate.clear()
    async with routers.client() as client, routers.client(key="key-b") as other:
        first, second = [await batch_of(client, line(0), line(1)) for _ in range(2)]

        async def is_checked() -> bool:
            return bool((await client.batches.retrieve(second.id)).status == "in_progress")

        await until(is_checked, interval_s=0.02)
        third = await batch_of(other, line(0))
        await until(lambda: routers.asked >= 3)
        assert routers.asked == 3
        routers.gate.set()
        ends = [await ended(client, first), await ended(client, second), await ended(other, third)]
        assert [each.request_counts.completed for each in ends] == [2, 2, 1]


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
        path for path in (tmp_path / "0").glob("file-*.jsonl") if b'"response"' in path.read_bytes()
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
        assert routers.asked == 30 - len(before)


async def test_a_restart_removes_what_is_old_or_unfinished_and_nothing_else(tmp_path: Path) -> None:
    routers = Routers(tmp_path)
    folder = tmp_path / "0"
    async with routers.running(), routers.client() as client:
        old, kept = [await upload(client, line(0)) for _ in range(2)]
    state = folder / f"{old.id}.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "kept": {"until": 0}}))
    unfinished = [f"file-{'0' * 32}.jsonl", f"{kept.id}.json.new"]
    for name in (*unfinished, "of_the_operator.txt"):
        (folder / name).write_text("x")
    async with routers.running(), routers.client() as client:
        await until(lambda: not list(folder.glob(f"{old.id}*")))
        assert [one.id for one in (await client.files.list()).data] == [kept.id]
        names = ("lock", "of_the_operator.txt", f"{kept.id}.json", f"{kept.id}.jsonl")
        assert sorted(path.name for path in folder.iterdir()) == sorted(names)


async def test_a_cancelled_batch_keeps_its_answers(tmp_path: Path) -> None:
    routers = Routers(tmp_path)
    routers.gate.clear()
    routers.free = 1
    async with routers.running(), routers.client() as client:
        made = await batch_of(client, *map(line, range(9)))

        async def has_answer() -> bool:
            return bool((await client.batches.retrieve(made.id)).request_counts.completed)

        await until(has_answer, interval_s=0.02)
        await until(lambda: routers.asked > 1)
        with pytest.raises(openai.BadRequestError, match=f"input of {made.id}"):
            await client.files.delete(made.input_file_id)
        assert (await client.batches.cancel(made.id)).status == "cancelling"
        batch = await ended(client, made)
        assert (batch.status, batch.request_counts.completed) == ("cancelled", 1)
        assert len(await results(client, batch.output_file_id)) == 1
        found = await results(client, batch.error_file_id)
        assert [one["error"]["code"] for one in found.values()] == ["batch_cancelled"] * 8
        await until(lambda: len(routers.rigs[0].decodes[0].cancelled) == routers.asked - 1)
        with pytest.raises(openai.BadRequestError, match="is cancelled"):
            await client.batches.cancel(made.id)
        routers.gate.set()
        assert (await ended(client, await batch_of(client, line(0)))).status == "completed"


async def test_lines_beyond_the_window_expire(routers: Routers) -> None:
    routers.gate.clear()
    async with routers.client() as client:
        made = await batch_of(client, line(0), line(1), completion_window="3s")
        batch = await ended(client, made)
        assert (batch.status, batch.output_file_id) == ("expired", None)
        found = await results(client, batch.error_file_id)
        assert [one["error"]["code"] for one in found.values()] == ["batch_expired"] * 2


async def test_a_line_that_fails_has_its_error_and_ends_no_other(routers: Routers) -> None:
    async with routers.client() as client:
        batch = await ended(client, await batch_of(client, line(0, prompt="x"), line(1, n=200)))
        assert batch.status == "failed"
        long = line(1, messages=[{"role": "user", "content": "x" * 2_000}])
        batch = await ended(client, await batch_of(client, line(0), long))
        assert batch.status == "completed"
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
        (found,) = (await results(client, batch.error_file_id)).values()
        assert found["response"]["status_code"] == 400
        assert found["response"]["body"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("error", "status", "asked"),
    [
        (QueueFull("no room", metadata={"resource": "blocks"}, retry_after_s=0.05), 200, 4),
        (WorkerGone("it fails"), 503, 3),
    ],
)
async def test_a_line_runs_again_after_overload_and_thrice_after_failures(
    tmp_path: Path, error: HeadraceError, status: int, asked: int
) -> None:
    async def script(
        worker: FakeDecode, request: decode_pb2.GenerateRequest
    ) -> AsyncIterator[Event]:
        if len(worker.requests) < 4:
            raise error
        async for event in reply("ok")(worker, request):
            yield event

    routers = Routers(tmp_path, script=script)
    async with routers.running(), routers.client() as client:
        routers.rigs[0].policy.retry_budget = 0
        batch = await ended(client, await batch_of(client, line(0)))
        file_id = batch.output_file_id or batch.error_file_id
        (found,) = (await results(client, file_id)).values()
        assert (found["response"]["status_code"], routers.asked) == (status, asked)


@pytest.mark.parametrize(
    ("wrong", "param", "message"),
    [
        (b"{", "body", "JSON"),
        (b"[]", "body", "object"),
        (line(0) | {"custom_id": ""}, "custom_id", "at least 1"),
        (line(1), "custom_id", "earlier line"),
        (line(0) | {"method": "GET"}, "method", "POST"),
        (line(0, "/v1/completions", prompt="x"), "url", CHAT),
        (line(0, stream=True), "body.stream", "left out"),
        (line(0, temperature=9.0) | {"body": []}, "body", "object"),
        (line(0, messages=[{"role": 1}]), "body.messages[0].role", "text"),
        (line(0, model="other"), "body.model", "not served"),
    ],
)
async def test_a_wrong_line_is_named_before_any_is_answered(
    routers: Routers, wrong: Any, param: str, message: str
) -> None:
    data = wrong if isinstance(wrong, bytes) else jsonl(wrong).strip()
    async with routers.client() as client:
        file = await client.files.create(
            file=("in.jsonl", jsonl(line(1)) + b"\n" + data), purpose="batch"
        )
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )
        batch = await ended(client, batch)
        assert batch.status == "failed"
        (error,) = batch.errors.data
        assert (error.line, error.param) == (3, param)
        assert message in error.message
    assert not routers.asked


async def test_another_tenant_finds_nothing(routers: Routers) -> None:
    async with routers.client() as client, routers.client(key="key-b") as foreign:
        batch = await ended(client, await batch_of(client, line(0)))
        attempts = [
            foreign.files.retrieve(batch.input_file_id),
            foreign.files.content(batch.output_file_id),
            foreign.files.delete(batch.output_file_id),
            foreign.batches.retrieve(batch.id),
            foreign.batches.cancel(batch.id),
            foreign.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
            ),
        ]
        for attempt in attempts:
            with pytest.raises(openai.NotFoundError):
                await attempt
        assert not (await foreign.files.list()).data
        assert not (await foreign.batches.list()).data
        assert (await client.files.retrieve(batch.output_file_id)).bytes


@pytest.mark.parametrize("routers", [{"batch_mib": 1}], indirect=True)
async def test_a_tenant_has_half_of_the_room_at_most(routers: Routers) -> None:
    async with routers.client() as client, routers.client(key="key-b") as other:
        big = ("big", b"x" * 400_000)
        first = await client.files.create(file=big, purpose="batch")
        with pytest.raises(openai.APIStatusError, match="batch_mib") as refused:
            await client.files.create(file=big, purpose="batch")
        assert refused.value.status_code == 413
        await other.files.create(file=("small", b"x" * 200_000), purpose="batch")
        await client.files.delete(first.id)
        await client.files.create(file=big, purpose="batch")
    # What was refused has left nothing.
    assert len(list((routers.folder / "0").glob("*.jsonl"))) == 2


@pytest.mark.parametrize("name", ["../../escape.jsonl", "/etc/passwd", "..\\x", "", "a\0b"])
async def test_names_of_clients_make_no_paths(routers: Routers, name: str) -> None:
    async with routers.client() as client:
        content = jsonl(line(0))
        made = await client.post(
            "/files",
            cast_to=httpx.Response,
            files={"file": (name, content)},
            body={"purpose": "batch"},
            options={"headers": {"content-type": "multipart/form-data"}},
        )
        file = made.json()
        assert "/" not in file["filename"]
        for wrong in (f"{file['id']}%2F..%2F{file['id']}", "file-..%2Flock", "file-" + "0" * 32):
            with pytest.raises(openai.NotFoundError):
                await client.get(f"/files/{wrong}/content", cast_to=httpx.Response)
    written = [path for path in routers.folder.rglob("*") if path.is_file()]
    names = sorted(path.name for path in written)
    assert names == sorted(["lock", f"{file['id']}.json", f"{file['id']}.jsonl"])
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {0o600}
    assert stat.S_IMODE((routers.folder / "0").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("headers", "body", "status", "message"),
    [
        ({"origin": "http://evil.example"}, b"", 403, "may not upload"),
        ({"content-type": "application/json"}, b"{}", 415, "multipart/form-data"),
        ({}, b"", 400, "file"),
        ({}, b"--x\r\n\r\nno end", 400, "whole"),
        (
            {},
            b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--',
            400,
            "file",
        ),
        (
            {},
            b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\n{}\r\n--x--',
            400,
            "purpose",
        ),
        ({"authorization": "none"}, b"", 401, "key"),
    ],
)
async def test_wrong_uploads_are_refused_and_leave_nothing(
    routers: Routers, headers: Mapping[str, str], body: bytes, status: int, message: str
) -> None:
    async with httpx.AsyncClient(base_url=routers.url()) as client:
        given = {
            "authorization": "Bearer key-a",
            "content-type": "multipart/form-data; boundary=x",
            **headers,
        }
        answer = await client.post("/files", content=body, headers=given)
    assert (answer.status_code, message in answer.text) == (status, True), answer.text
    assert [path.name for path in (routers.folder / "0").iterdir()] == ["lock"]


async def test_what_a_full_disk_has_of_a_line_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = BatchFolder(tmp_path, 1024**2)
    file = LineFile(folder, "a", new_id(FILE))
    await file.append(result_line("first"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(InternalError, match="No space left"):
            await file.append(result_line("second"))
    await file.append(result_line("third"))
    assert await file.recover() == {"first", "third"}
    folder.close()


def test_the_end_of_a_file_is_found_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "body"
    head = b'--x\r\ncontent-disposition: form-data; name="file"; filename="in"\r\n\r\n'
    for size in range(65_400, 65_600):
        path.write_bytes(head + b"a" * size + b"\r\n--x--\r\n")
        found = read_upload(path, b"\r\n--x")
        assert (found.start, found.size, found.name) == (len(head), size, "in")


async def test_a_client_that_leaves_during_an_upload_leaves_nothing(routers: Routers) -> None:
    sent = asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        yield b"--x" + b"x" * 100_000
        sent.set()
        await asyncio.Event().wait()

    async with httpx.AsyncClient(base_url=routers.url()) as client:
        headers = {
            "authorization": "Bearer key-a",
            "content-type": "multipart/form-data; boundary=x",
        }
        upload = asyncio.create_task(client.post("/files", content=parts(), headers=headers))
        await sent.wait()
        folder = routers.folder / "0"
        await until(lambda: any(path.stat().st_size for path in folder.glob("*.jsonl")))
        upload.cancel()
        await until(lambda: not list(folder.glob("*.jsonl")))


async def test_a_file_that_is_deleted_while_it_is_read_is_not_cut_silently(
    routers: Routers,
) -> None:
    async with routers.client() as client:
        big = ("big", b"x" * 30_000_000)
        file = await client.files.create(file=big, purpose="batch")

        async def read() -> None:
            async with client.files.with_streaming_response.content(file.id) as content:
                parts = content.iter_bytes(65_536)
                await anext(parts)
                await client.files.delete(file.id)
                async for _ in parts:
                    pass

        with pytest.raises((httpx.HTTPError, httpx2.HTTPError)):
            await read()


@pytest.mark.parametrize("routers", [{"batch_folder": ""}], indirect=True)
async def test_without_a_folder_the_remedy_is_named(routers: Routers) -> None:
    async with routers.client() as client:
        for attempt in (client.batches.list(), upload(client, line(0))):
            with pytest.raises(openai.InternalServerError, match="set batch_folder") as refused:
                await attempt
            assert refused.value.status_code == 501


async def test_a_folder_has_one_router(routers: Routers) -> None:
    with pytest.raises(ConfigError, match="another process uses"):
        BatchFolder(routers.folder / "0", 2**20)


async def test_lines_end_with_the_key_of_their_batch(routers: Routers) -> None:
    routers.gate.clear()
    routers.rigs[0].router.parts.callers._check_s = 0.1
    async with routers.client() as client, routers.client(key="key-c") as same_tenant:
        made = await batch_of(client, line(0))
        await until(lambda: routers.asked > 0)
        keys = Path(routers.rigs[0].config.api_keys_file)
        replacement = keys.with_name("new")
        replacement.write_text("key-c a\n")
        replacement.replace(keys)

        async def is_known() -> bool:
            with contextlib.suppress(openai.AuthenticationError):
                return bool(await same_tenant.files.list())
            return False

        await until(is_known, interval_s=0.05)
        batch = await ended(same_tenant, made)
        (found,) = (await results(same_tenant, batch.error_file_id)).values()
        assert found["response"]["status_code"] == 401


async def test_a_draining_router_ends_its_lines_and_starts_no_more(tmp_path: Path) -> None:
    routers = Routers(tmp_path)
    routers.gate.clear()
    lines = [line(number) for number in range(300)]
    async with routers.running(), routers.client() as client:
        response = await client.responses.create(model="sim", input="hi", background=True)
        made = await batch_of(client, *lines)
        await until(lambda: routers.asked >= 2)
        router = routers.rigs[0].router
        router.drain()
        drained = asyncio.create_task(router.openai.drain(Deadline.after(30)))
        routers.gate.set()
        await drained
        found = await client.responses.retrieve(response.id)
        assert found.status in ("completed", "incomplete")
        batch = await client.batches.retrieve(made.id)
        answered = batch.request_counts.completed
        assert (batch.status, answered) == ("in_progress", routers.asked - 1)
        assert answered < len(lines)
    async with routers.running(), routers.client() as client:
        batch = await ended(client, made)
        assert batch.request_counts.completed == len(lines)
        assert routers.asked == len(lines) - answered


@pytest.mark.parametrize("routers", [{"tenants": None}], indirect=True)
async def test_the_command_writes_answers_and_errors(routers: Routers, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    long = line(1, messages=[{"role": "user", "content": "x" * 2_000}])
    source.write_bytes(jsonl(line(0, model="replaced"), long))
    address = routers.url().removesuffix("/v1")

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["batch", str(source), "--url", address, *arguments])

    result = await asyncio.to_thread(run, "--model", "sim", "--output", str(output))
    assert (result.exit_code, "1 lines failed" in result.output) == (1, True), result.output
    (answer,) = map(json.loads, output.read_text().splitlines())
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == "ok"
    (error,) = map(json.loads, output.with_name("out.jsonl.errors").read_text().splitlines())
    assert error["custom_id"] == "line-1"
    result = await asyncio.to_thread(run)
    assert (result.exit_code, "line 1: body.model" in result.output) == (1, True), result.output
    source.write_bytes(b"[1]\n")
    result = await asyncio.to_thread(run)
    assert (result.exit_code, "line 1 of" in result.output) == (2, True), result.output
