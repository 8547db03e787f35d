"""Chats through containers of the images, with mutual TLS and roles: python -m tests.images [--workers KIND]

docker/build.sh builds the images before. Every wait has a limit, and a failure prints the containers' logs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterable, Sequence
from pathlib import Path
from typing import Final

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_common.rpc.channel import open_channel
from tests.images.checks import (
    check_bill,
    check_confined,
    check_contents,
    check_failed_start,
    check_image,
    check_roles,
    check_stops,
)
from tests.images.deployment import REQUIRED, SERVICES, Deployment, deployed, engine_of
from tests.images.engine import ContainerError
from tests.images.workers import WORKERS
from tests.suite.deployment import greedy, prompt_of
from tests.unit.test_architecture import ROOT

PROMPT_TOKENS: Final = 100
TOKENS: Final = 8
# About three seconds: the router gets SIGTERM in the middle.
STREAM_TOKENS: Final = 60
CHAT_TIMEOUT_S: Final = 60.0
JOIN_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.2


async def joined(stub: inference_pb2_grpc.InferenceServiceAsyncStub) -> None:
    """Returns when the router has a worker of each role. Raises ContainerError after JOIN_TIMEOUT_S."""
    give_up = time.monotonic() + JOIN_TIMEOUT_S
    while time.monotonic() < give_up:
        request = inference_pb2.ListModelsRequest()
        models = (await stub.ListModels(request, timeout=CHAT_TIMEOUT_S)).models
        if any(model.prefill_worker_count and model.decode_worker_count for model in models):
            return
        await asyncio.sleep(POLL_S)
    raise ContainerError(f"the workers did not join within {JOIN_TIMEOUT_S:g} s")


async def chat(deployment: Deployment) -> None:
    """One prompt that prefill computes. Then one that streams while the router gets SIGTERM."""
    async with open_channel(deployment.endpoint, deployment.client) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await joined(stub)
        remote = inference_pb2.PREFILL_PLACEMENT_REMOTE
        request = greedy(prompt_of(PROMPT_TOKENS, 1), TOKENS, remote)
        count, last = await answered(stub.Generate(request, timeout=CHAT_TIMEOUT_S))
        assert count == TOKENS, last
        assert last.usage.transferred_tokens > 0, last.usage
        print(f"{count} tokens, {last.usage.transferred_tokens} prompt tokens from prefill")
        if not deployment.workers.streams_slowly:
            return

        stream = stub.Generate(
            greedy(prompt_of(PROMPT_TOKENS, 2), STREAM_TOKENS), timeout=CHAT_TIMEOUT_S
        )
        first = await anext(aiter(stream))
        stopped = asyncio.create_task(asyncio.to_thread(check_stops, deployment, "router"))
        count, last = await answered(stream)
        count += token_count(first)
        await stopped
        assert count == STREAM_TOKENS, last
        print(f"{count} tokens of a stream during which the router got SIGTERM")


def token_count(response: inference_pb2.GenerateResponse) -> int:
    """The number of tokens in one message."""
    return len(response.token_ids)


async def answered(
    stream: AsyncIterable[inference_pb2.GenerateResponse],
) -> tuple[int, inference_pb2.GenerateResponse]:
    """The number of tokens in the rest of a stream, and its last message."""
    count, last = 0, inference_pb2.GenerateResponse()
    async for response in stream:
        count += token_count(response)
        last = response
    return count, last


def check(kind: str, services: Sequence[str]) -> None:
    """Raises AssertionError or ContainerError when a check does not hold."""
    engine = engine_of(ROOT)
    workers = WORKERS[kind]
    sizes = {service: check_image(engine, service, workers) for service in services}
    check_failed_start(engine, workers)
    with (
        tempfile.TemporaryDirectory(prefix="headrace-images-") as folder,
        deployed(engine, Path(folder), workers, services) as deployment,
    ):
        for service in services:
            check_confined(deployment, service)
            check_contents(deployment, service)
            components = check_bill(deployment, service)
            print(f"{service}: {sizes[service] / 1e6:.0f} MB, {components} components")
        check_roles(deployment)
        asyncio.run(chat(deployment))
        for service in reversed(services):
            check_stops(deployment, service)


def main() -> int:
    """Returns 0 when all checks hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.images")
    parser.add_argument("--workers", choices=WORKERS, default="sim", help="the engine of workers")
    parser.add_argument(
        "--required-only",
        action="store_true",
        help="without the worker of both roles and the planner",
    )
    arguments = parser.parse_args()
    started = time.monotonic()
    try:
        check(arguments.workers, REQUIRED if arguments.required_only else SERVICES)
    except (AssertionError, ContainerError) as error:
        print(f"test-images: {error}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - started
    print(
        f"all containers answer over mutual TLS, are confined, and end by SIGTERM ({seconds:.0f} s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
