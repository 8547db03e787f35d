"""The `headrace` command as an operator uses it."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.forked_command import Finished, run_forked
from tests.ports import free_port

COMMAND = (sys.executable, "-m", "headrace_cli")


async def headrace(*arguments: str, stdin: str = "") -> Finished:
    return await run_forked("headrace_cli", *arguments, stdin=stdin, timeout_s=120.0)


def processes_in(folder: Path, what: str = "") -> list[int]:
    """Processes that run in a folder and execute `what`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_text() if entry.name.isdecimal() else ""
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if str(folder) in command and what in command:
            found.append(int(entry.name))
    return found


@asynccontextmanager
async def up(folder: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A running `headrace up` that is ready. The caller ends it."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *("up", "--engine", "sim", "--logs", str(folder), "--http-port", "0", *arguments),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(90):
            while b"Ctrl-C" not in (line := await process.stderr.readline()):
                assert line, "it ended before it was ready"
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await asyncio.wait_for(process.wait(), 40)
        await process.stderr.read()


@pytest.mark.core
async def test_the_demo_answers_prints_a_waterfall_and_leaves_no_process(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    shown = await headrace(
        "demo", "--engine", "sim", "--logs", str(folder), "--max-tokens", "6",
        "--set", "prefill.model=sim:layers=5", "--set", "decode.model=sim:layers=5",
    )  # fmt: skip
    assert shown.status == 0, shown.err
    answer, _, waterfall = shown.out.partition("trace ")
    assert answer.strip()
    for step in ("queue", "reserve", "kv wait", "compute", "time to first token"):
        assert step in waterfall
    assert "5 layers in 5 writes on 1 link" in waterfall
    assert "its layers 0-4" in waterfall
    assert "\x1b" not in shown.out + shown.err
    for name in ("registry", "router", "prefill-0", "decode-0"):
        assert name in shown.err
    assert processes_in(folder) == []


async def test_chat_workers_and_trace_find_the_deployment_of_up(tmp_path: Path) -> None:
    port = free_port()
    router = f"127.0.0.1:{port}"
    async with up(tmp_path / "logs", "--port", str(port), "--decode", "2") as process:
        once = await headrace("chat", "Hello", "--router", router, "--max-tokens", "5")
        assert once.status == 0, once.err
        assert once.out.strip()
        piped = await headrace(
            *("chat", "--router", router, "--max-tokens", "5", "--json"), stdin="one\n\ntwo\n"
        )
        assert piped.status == 0, piped.err
        whole = await headrace(
            *("chat", "one\n\ntwo", "--router", router, "--max-tokens", "5", "--json")
        )
        varied = ("cached_tokens", "decode_cached_tokens", "transferred_tokens", "receipt")
        other = dict.fromkeys(varied, 0)
        first, second = (json.loads(one.out)["usage"] for one in (piped, whole))
        assert first | other == second | other
        long = await headrace("chat", "--router", router, stdin="a" * 4_500_000)
        assert long.status == 1
        assert "shorten the text" in long.err
        assert len(long.err.splitlines()) == 1
        listed = await headrace("workers", "--router", router)
        assert listed.status == 0, listed.err
        for name in ("router-0", "prefill-0", "decode-0", "decode-1"):
            assert name in listed.out
        assert listed.out.count("serving") == 3
        # All workers hash prefixes with one key and report its fingerprint.
        lines = [line for line in listed.out.splitlines() if "-0 " in line or "-1 " in line]
        keys = {
            match.group(1) for line in lines if (match := re.search(r"\b([0-9a-f]{8})\b", line))
        }
        assert len(keys) == 1
        assert "no credit" not in listed.out
        refused = await headrace("reset-cache", "decode-0", "router-0", "--router", router)
        assert refused.status == 1
        assert "no worker router-0" in refused.err
        newest = await headrace("trace", "--router", router)
        assert newest.status == 0, newest.err
        assert "time to first token" in newest.out
        assert max(map(len, newest.out.splitlines())) <= 80
        trace_id = newest.out.split()[1]
        failed = await headrace("trace", "failed", "--router", router)
        assert failed.status == 1
        assert "none of the stored requests failed" in failed.err
        await every_answer_is_a_document(router, trace_id)
        unknown = await headrace("trace", "nobody", "--router", router, "--spans-wait", "0")
        assert unknown.status == 1
        assert len(unknown.err.splitlines()) == 1
        await down_ends_a_deployment(router, process)
    assert processes_in(tmp_path / "logs") == []


async def down_ends_a_deployment(router: str, process: asyncio.subprocess.Process) -> None:
    ended = await headrace("down", "--router", router)
    assert ended.status == 0, ended.err
    assert await asyncio.wait_for(process.wait(), 10) == 0


async def every_answer_is_a_document(router: str, trace_id: str) -> None:
    asked = {
        ("chat", "Hello", "--max-tokens", "2"): "finish_reason",
        ("route", "Hello"): "candidates",
        ("workers",): "members",
        ("reset-cache", "decode-0"): "workers",
        ("trace", trace_id): "spans",
        ("trace", "--list", "3"): "traces",
        ("policy", "get"): "policy",
    }
    for arguments, field in asked.items():
        told = await headrace(*arguments, "--router", router, "--json")
        assert told.status == 0, told.err
        assert field in json.loads(told.out)
        assert not told.err
        if arguments == ("trace", trace_id):
            assert json.loads(told.out)["trace_id"] == trace_id


async def test_up_warns_and_its_router_is_enough_to_find_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, page = free_port(), f"127.0.0.1:{free_port()}"
    heads = ("--set", "prefill.model=sim:heads=3", "--set", "decode.model=sim:heads=6")
    async with up(
        *(tmp_path / "logs", "--port", str(port), "--set", f"router.status_listen={page}", *heads)
    ) as process:
        assert process.stderr is not None
        warning = (await asyncio.wait_for(process.stderr.readline(), 20)).decode()
        assert "prefill-0 cannot hand KV over to decode-0" in warning
        assert "head_count (3 != 6)" in warning
        for arguments in (("--port", str(port)), ("--port", "0", "--logs", f"{tmp_path}/logs")):
            second = await headrace("up", "--engine", "sim", *arguments)
            assert second.status == 2
            assert f"process {process.pid}, router 127.0.0.1:{port}" in second.err
        # Without the state of `headrace up`, as on another host.
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
        router = ("--router", f"127.0.0.1:{port}")
        listed = await headrace("workers", *router)
        assert listed.status == 0, listed.err
        assert "decode-0" in listed.out
        for words in (("policy", "get"), ("route", "x")):
            shown = await headrace(*words, *router)
            assert shown.status == 0, shown.err
        status = await headrace("status", *router)
        assert status.out.startswith(f"http://{page}/")


@pytest.mark.parametrize(
    "arguments,remedy",
    [
        (("up", "--engine", "magic"), "choose vllm or sim"),
        (("up", "--engine", "sim", "--port", "0", "--set", "decode.model=sim:layers=0"), "layers"),
        (("up", "--model", "/nowhere"), "make model"),
    ],
)
async def test_a_failed_start_prints_one_line_and_exits_with_2(
    tmp_path: Path, arguments: tuple[str, ...], remedy: str
) -> None:
    ended = await headrace(*arguments, "--logs", str(tmp_path / "logs"))
    assert ended.status == 2, ended.err
    last = ended.err.splitlines()[-1]
    assert remedy in last
    assert "Traceback" not in ended.err
    assert processes_in(tmp_path / "logs") == []
