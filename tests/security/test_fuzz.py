"""Random requests at both doors of a deployment end in no bug, and the answers of another tenant go on."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import aiohttp
import grpc
import grpc.aio
import pytest

from headrace.inference.v1 import inference_pb2_grpc
from tests.fuzzed import BODIES, Fuzzer
from tests.ports import free_port
from tests.security.bystander import KEY, STRANGER_KEY, attacked, bystander

SECONDS: Final = 40.0
CALLERS: Final = 4
# Some of them ask for an answer that lasts until the end of the context.
DEADLINE_S: Final = 4.0
# Reasons of these codes are faults of the deployment, not of a request.
BUGS: Final = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE)


async def test_no_request_ends_in_a_bug_at_any_door(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = random.SystemRandom().randrange(10**9)
    seeds = itertools.count(first)
    listen = f"127.0.0.1:{free_port()}"
    found: Counter[str] = Counter()
    bugs: list[Any] = []
    headers = {"authorization": f"Bearer {STRANGER_KEY}", "content-type": "application/json"}
    async with (
        attacked(tmp_path, ("router", "http_listen", listen)) as it,
        bystander(it, KEY) as client,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE_S), headers=headers) as http,
    ):
        end_s = time.monotonic() + SECONDS
        stub: Any = inference_pb2_grpc.InferenceServiceStub(it.channel)

        async def post() -> None:
            for seed in seeds:
                if time.monotonic() > end_s:
                    return
                path = random.Random(seed).choice(tuple(BODIES))
                body = Fuzzer(seed).body(path)
                try:
                    async with http.post(f"http://{listen}{path}", data=body) as response:
                        text = await response.text()
                except TimeoutError:
                    found["HTTP deadline"] += 1
                    continue
                found[f"HTTP {response.status}"] += 1
                if response.status >= 500 or "a bug in Headrace" in text:
                    bugs.append((seed, path, body, text))

        async def call() -> None:
            for seed in seeds:
                if time.monotonic() > end_s:
                    return
                request = Fuzzer(seed).request()
                call = stub.Generate(
                    request, metadata=(("x-api-key", STRANGER_KEY),), timeout=DEADLINE_S
                )
                try:
                    async for _ in call:
                        pass
                except grpc.aio.AioRpcError as error:
                    if error.code() in BUGS:
                        bugs.append((seed, request, error.details()))
                found[(await call.code()).name] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(post())
                group.create_task(call())
        answered = client.answers
    with capsys.disabled():
        print(
            f"\n{found.total()} requests from seed {first}: {dict(found)}, beside {answered} answers"
        )
    assert not bugs
    assert found["HTTP 200"]
    assert found["OK"]
