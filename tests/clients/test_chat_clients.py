"""One chat client in each language: TLS with a key, errors by name, retries and cancellation."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from build_clients import LANGUAGES, ROOT, SOURCES, build, is_built, missing_packages
from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_client import Client
from headrace_common.access.credentials import TlsFiles
from headrace_common.rpc.channel import open_channel
from tests.clients.commands import run
from tests.clients.router import KEY, full_at_first, secured_listen
from tests.documented import blocks_of
from tests.kit.router import Rig
from tests.kit.workers import FakeDecode, finished, reserved, tokens
from tests.suite.certificates import Authority
from tests.suite.secured import deployed, joined
from tests.waiting import until

PAGE = ROOT / "docs/clients.md"
SERVICE_CONFIG = ROOT / "protos/headrace/inference/v1/inference_grpc_service_config.json"
# They compile for a minute or more, so the tests do not.
SLOW_BUILDS = {"rust"}
# Debian's grpc-go retries only with it. Later releases need no variable.
GO_RETRIES = {"GRPC_GO_RETRY": "on"}
PROMPT = "What is the capital of France?"
ANSWER_TOKENS = 12


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.node] if name == "node" else []) for name in LANGUAGES
    ]
)
def language(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if missing := missing_packages(name):
        packages = " ".join(missing)
        pytest.skip(f"{name} needs Debian's {packages}: make test-clients installs them")
    if name == "node" and not (SOURCES / "node/node_modules").is_dir():
        pytest.skip("the packages of the Node client are not installed: make setup")
    if name in SLOW_BUILDS and not is_built(name):
        pytest.skip(f"the {name} client is not built: make test-clients")
    return name


def commands_of(language: str) -> list[str]:
    """The commands of the page for a language."""
    (block,) = (block for block in blocks_of(PAGE) if block.runs == f"{language} client")
    return list(block.commands)


async def answer_of(endpoint: str, tls: TlsFiles) -> tuple[str, inference_pb2.Usage]:
    """Text and usage of the same chat by the client library."""
    text, last = "", inference_pb2.GenerateResponse()
    async with Client(endpoint, api_key=KEY, tls=tls) as client:
        async for piece in client.generate(
            messages=[("user", PROMPT)], max_tokens=ANSWER_TOKENS, temperature=0.0
        ):
            text, last = text + piece.text, piece
    return text, last.usage


@pytest.mark.timeout(450)
async def test_the_commands_of_the_page_chat_over_tls_with_a_key(
    language: str, tmp_path: Path
) -> None:
    internal, public = Authority(tmp_path / "internal"), Authority(tmp_path / "public")
    build(language)
    make, chat = commands_of(language)
    assert make == f".venv/bin/python scripts/build_clients.py {language}"
    tls = TlsFiles(tls_authority_file=str(public.file))
    listen = secured_listen(tmp_path, public)
    more = tuple(("router", field, value) for field, value in listen.items())
    names = {
        "HEADRACE_TLS_AUTHORITY_FILE": str(public.file),
        "HEADRACE_API_KEY_FILE": str(tmp_path / "key"),
        "HEADRACE_SERVICE_CONFIG_FILE": str(SERVICE_CONFIG),
        **GO_RETRIES,
    }
    async with deployed(tmp_path, internal, more) as children:
        endpoint = children["router"].client_endpoint
        async with open_channel(endpoint, tls) as channel:
            await joined(channel, KEY)

        async def ask(command: str, **more: str) -> tuple[int, str, str]:
            shell = f"cd {ROOT} && {command.replace('127.0.0.1:7050', endpoint)}"
            return await run("bash", "-c", shell, **{**names, **more})

        status, out, err = await ask(chat)
        assert status == 0, err
        text, usage = await answer_of(endpoint, tls)
        assert out.strip("\n") == text.strip("\n")
        counts = re.search(
            r"^(\w+) prompt=(\d+) completion=(\d+) transferred=(\d+)$", err, re.MULTILINE
        )
        assert counts, err
        assert counts[1] == "FINISH_REASON_LENGTH"
        assert int(counts[2]) == usage.prompt_tokens
        assert int(counts[3]) == usage.completion_tokens == ANSWER_TOKENS
        assert int(counts[4]) == usage.prompt_tokens
        status, out, err = await ask(re.sub(r" \d+$", " 0", chat))
        assert (status, out) == (1, "")
        assert re.search(
            r"^INVALID_ARGUMENT INVALID_FIELD: sampling\.max_tokens: ", err, re.MULTILINE
        ), err
        assert re.search(r"^  sampling\.max_tokens: ", err, re.MULTILINE), err
        status, _, err = await ask(chat, HEADRACE_API_KEY_FILE=str(tmp_path / "wrong"))
        assert status == 1
        assert "UNAUTHENTICATED UNAUTHENTICATED: " in err
        # Without TLS, the key does not leave the client.
        status, _, err = await ask(chat, HEADRACE_TLS_AUTHORITY_FILE="")
        assert status not in (0, 1)
        assert "an API key is not sent in clear" in err


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = await Rig().start()
    rig.policy.retry_budget = 0
    yield rig
    await rig.close()


async def endless(worker: FakeDecode, request: decode_pb2.GenerateRequest) -> AsyncIterator[Any]:
    """Sends one token, and ends when it is cancelled."""
    yield reserved(request)
    yield tokens("o")
    await asyncio.sleep(60)
    yield finished(request)


def patient_config() -> str:
    """The service config that we ship. Only its own pauses are other ones, which no test could wait for."""
    config = json.loads(SERVICE_CONFIG.read_text())
    (method,) = config["methodConfig"]
    method["retryPolicy"] |= {"initialBackoff": "1000s", "maxBackoff": "1000s"}
    return json.dumps(config)


@pytest.mark.timeout(450)
async def test_a_client_retries_when_the_router_says_and_cancels(
    language: str, rig: Rig, tmp_path: Path
) -> None:
    program = str(build(language))
    decode = await rig.add_decode(full_at_first)
    status, out, err = await run(program, rig.endpoint, "Hello", "8")
    assert (status, out) == (1, "")
    assert "RESOURCE_EXHAUSTED QUEUE_FULL: " in err
    assert "  resource: blocks" in err.splitlines()
    decode.requests.clear()
    config = tmp_path / "service_config.json"
    config.write_text(patient_config())
    status, out, err = await run(
        program, rig.endpoint, "Hello", "8", HEADRACE_SERVICE_CONFIG_FILE=str(config), **GO_RETRIES
    )
    assert (status, out.strip("\n")) == (0, "ok"), err
    assert len(decode.requests) == 2
    decode.script = endless
    status, out, err = await run(program, rig.endpoint, "Hello", "8", "1")
    assert (status, out.strip("\n")) == (0, "o"), err
    assert "CANCELLED after 1 messages" in err
    await until(lambda: decode.requests[-1].transfer_id in decode.cancelled)


async def test_grpc_for_python_retries_with_the_service_config(rig: Rig) -> None:
    decode = await rig.add_decode(full_at_first)
    options = (("grpc.service_config", patient_config()),)
    async with grpc.aio.insecure_channel(rig.endpoint, options=options) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(text="a"), timeout=20)
        assert "".join([response.text async for response in call]) == "ok"
    assert len(decode.requests) == 2


def test_the_service_config_names_calls_that_may_be_repeated() -> None:
    (method,) = json.loads(SERVICE_CONFIG.read_text())["methodConfig"]
    service = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
    assert {name["service"] for name in method["name"]} == {service.full_name}
    named = {name["method"] for name in method["name"]}
    # Only operators call Route. Keep sets a time, so a second call changes nothing.
    assert named == set(service.methods_by_name) - {"Route"}
    codes = {grpc.StatusCode[name] for name in method["retryPolicy"]["retryableStatusCodes"]}
    assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}


def test_the_page_has_a_section_for_every_client() -> None:
    for name in LANGUAGES:
        assert len(commands_of(name)) == 2
