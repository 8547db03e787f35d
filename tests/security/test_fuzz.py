"""Random requests at both doors of a deployment end in no bug, and the answers of another tenant go on."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class Found:
    """What random requests ended with."""

    seeds: Iterator[int]
    end_s: float
    ends: Counter[str] = field(default_factory=Counter)
    bugs: list[Any] = field(default_factory=list)

    def next_seed(self) -> int | None:
        """None at the end."""
        return next(self.seeds) if time.monotonic() < self.end_s else None

    async def post(self, http: aiohttp.ClientSession, listen: str) -> None:
        """Posts random bodies."""
        while (seed := self.next_seed()) is not None:
            path = random.Random(seed).choice(tuple(BODIES))
            body = Fuzzer(seed).body(path)
            try:
                async with http.post(f"http://{listen}{path}", data=body) as response:
                    text = await response.text()
            except TimeoutError:
                self.ends["HTTP deadline"] += 1
                continue
            self.ends[f"HTTP {response.status}"] += 1
            if response.status >= 500 or "a bug in Headrace" in text:
                self.bugs.append((seed, path, body, text))

    async def call(self, stub: Any) -> None:
        """Sends random messages."""
        while (seed := self.next_seed()) is not None:
            request = Fuzzer(seed).request()
            metadata = (("x-api-key", STRANGER_KEY),)
            call = stub.Generate(request, metadata=metadata, timeout=DEADLINE_S)
            try:
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError as error:
                if error.code() in BUGS:
                    self.bugs.append((seed, request, error.details()))
            self.ends[(await call.code()).name] += 1


async def test_no_request_ends_in_a_bug_at_any_door(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = random.SystemRandom().randrange(10**9)
    listen = f"127.0.0.1:{free_port()}"
    headers = {"authorization": f"Bearer {STRANGER_KEY}", "content-type": "application/json"}
    async with (
        attacked(tmp_path, ("router", "http_listen", listen)) as it,
        bystander(it, KEY) as client,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE_S), headers=headers) as http,
    ):
        found = Found(itertools.count(first), time.monotonic() + SECONDS)
        stub: Any = inference_pb2_grpc.InferenceServiceStub(it.channel)
        async with asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(found.post(http, listen))
                group.create_task(found.call(stub))
        answered = client.answers
    ends = found.ends
    with capsys.disabled():
        print(
            f"\n{ends.total()} requests from seed {first}: {dict(ends)}, beside {answered} answers"
        )
    assert not found.bugs
    assert ends["HTTP 200"]
    assert ends["OK"]
