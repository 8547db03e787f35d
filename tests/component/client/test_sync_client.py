"""The client for programs without asyncio, against a scripted router."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import grpc.aio
import pytest

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc, keep_pb2, sampling_pb2
from headrace_client import InvalidRequest, QueueFull, SyncClient, WorkerGone
from headrace_common.errors import HeadraceError
from headrace_common.rpc.status import ErrorInterceptor
from tests.waiting import forever, until

Result = TypeVar("Result")


class Router(inference_pb2_grpc.InferenceServiceServicer):
    """Answers a prompt with its characters. It rejects "busy" once, "full" always, and never ends "endless"."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.cancelled = 0

    async def Generate(
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        if request.text == "full" or (request.text == "busy" and len(self.requests) == 1):
            wait_s = 0.01 if request.text == "busy" else None
            raise QueueFull("no room", retry_after_s=wait_s)
        try:
            for character in request.text:
                yield inference_pb2.GenerateResponse(text=character, token_ids=[ord(character)])
            if request.text == "endless":
                await forever()
        except (asyncio.CancelledError, GeneratorExit):
            # The latter while a message is being sent.
            self.cancelled += 1
            raise
        yield inference_pb2.GenerateResponse(finish_reason=sampling_pb2.FINISH_REASON_STOP)

    async def Route(self, request: object, context: object) -> inference_pb2.RouteResponse:
        raise NotImplementedError

    async def Keep(
        self,
        request: inference_pb2.KeepRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> inference_pb2.KeepResponse:
        return inference_pb2.KeepResponse(
            kept=keep_pb2.Kept(id=request.id, tokens=7, duration=request.duration)
        )

    async def ListModels(
        self,
        request: inference_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(name="m")])


@pytest.fixture
async def served() -> AsyncIterator[tuple[Router, str]]:
    # Clients move no answers.
    router, server = Router(), grpc.aio.server(interceptors=[ErrorInterceptor()])  # type: ignore[abstract]
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield router, f"127.0.0.1:{port}"
    await server.stop(0)


async def in_thread(endpoint: str, use: Callable[[SyncClient], Result], retries: int = 2) -> Result:
    """What a program does with a client, in a thread without an event loop."""

    def program() -> Result:
        with SyncClient(endpoint, retries_max=retries) as client:
            return use(client)

    async with asyncio.timeout(20):
        return await asyncio.to_thread(program)


def text_of(client: SyncClient, prompt: str) -> str:
    return "".join(piece.text for piece in client.generate(prompt, top_p=0.5, timeout_s=10))


async def test_answers_models_and_retries(served: tuple[Router, str]) -> None:
    router, endpoint = served

    def use(client: SyncClient) -> tuple[str, str, list[str]]:
        kept = client.keep("p1", 30.0)
        assert (kept.id, kept.tokens, kept.duration.seconds) == ("p1", 7, 30)
        names = [model.name for model in client.models()]
        return text_of(client, "busy"), text_of(client, "hello"), names

    assert await in_thread(endpoint, use) == ("busy", "hello", ["m"])
    assert [request.text for request in router.requests] == ["busy", "busy", "hello"]
    assert router.requests[2].sampling.top_p == 0.5
    assert not any(thread.name == "headrace-client" for thread in threading.enumerate())


async def test_errors_have_their_class(served: tuple[Router, str]) -> None:
    _, endpoint = served

    def use(client: SyncClient) -> list[type[HeadraceError]]:
        found = []
        for prompt in ("full", ""):
            try:
                text_of(client, prompt)
            except HeadraceError as error:
                found.append(type(error))
        return found

    assert await in_thread(endpoint, use) == [QueueFull, InvalidRequest]
    with pytest.raises(WorkerGone, match="does not answer"):
        await in_thread("127.0.0.1:1", lambda client: text_of(client, "x"))


async def test_leaving_an_answer_cancels_it(served: tuple[Router, str]) -> None:
    router, endpoint = served

    def use(client: SyncClient) -> str:
        answer = client.generate("endless", timeout_s=20)
        first = next(answer).text
        answer.close()  # type: ignore[attr-defined]
        return first

    assert await in_thread(endpoint, use) == "e"
    await until(lambda: router.cancelled == 1)
