"""Errors that a server raises reach its client as the same errors."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncIterator
from typing import Any, NoReturn
from unittest import mock

import grpc
import grpc.aio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from headrace_common.client_config import ClientFacingConfig
from headrace_common.errors import (
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    InternalError,
    InvalidRequest,
    WorkerGone,
)
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.server import ClientServices, GrpcServer
from headrace_common.rpc.status import error_from_rpc, reported_error
from tests.rpc_errors import Kind, error_of

PULL = "/headrace.prefill.v1.PrefillQueueService/Pull"
KINDS = [kind for kind in HeadraceError.__subclasses__() if kind is not InvalidRequest]


class Failing(
    inference_pb2_grpc.InferenceServiceServicer, prefill_pb2_grpc.PrefillQueueServiceServicer
):
    """Raises `error` from every RPC."""

    error: Exception = InternalError("unset")

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse(text="first")
        raise self.error

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: object
    ) -> inference_pb2.ListModelsResponse:
        raise self.error

    async def Pull(
        self, request_iterator: AsyncIterator[prefill_pb2.PullRequest], context: object
    ) -> AsyncIterator[prefill_pb2.PullResponse]:
        async for _ in request_iterator:
            yield prefill_pb2.PullResponse()
        raise self.error


@pytest.fixture
async def server() -> AsyncIterator[tuple[Failing, GrpcServer]]:
    failing = Failing()  # type: ignore[abstract]
    clients = ClientServices(["headrace.inference.v1.InferenceService"])
    server = GrpcServer(ClientFacingConfig(insecure=True), (), clients)
    assert server.client_server is not None
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(failing, server.client_server)
    prefill_pb2_grpc.add_PrefillQueueServiceServicer_to_server(failing, server.server)
    yield failing, server
    await server.stop(None)


@pytest.fixture
async def served(
    server: tuple[Failing, GrpcServer],
) -> AsyncIterator[tuple[Failing, grpc.aio.Channel]]:
    """With a channel for clients."""
    await server[1].start()
    async with open_channel(server[1].client_endpoint) as channel:
        yield server[0], channel


@pytest.fixture
async def served_internally(
    server: tuple[Failing, GrpcServer],
) -> AsyncIterator[tuple[Failing, grpc.aio.Channel]]:
    async with open_channel(await server[1].start()) as channel:
        yield server[0], channel


async def unary_error(channel: grpc.aio.Channel, kind: type[Kind]) -> Kind:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    return await error_of(kind, stub.ListModels(inference_pb2.ListModelsRequest()))


METADATA = st.dictionaries(st.text(max_size=10), st.text(max_size=20), max_size=5)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    kind=st.sampled_from(KINDS),
    detail=st.text(max_size=100),
    metadata=METADATA,
    retry_after_s=st.none() | st.integers(0, 10_000).map(lambda ms: ms / 1e3),
)
async def test_every_error_class_round_trips(
    served: tuple[Failing, grpc.aio.Channel],
    kind: type[HeadraceError],
    detail: str,
    metadata: dict[str, str],
    retry_after_s: float | None,
) -> None:
    failing, channel = served
    failing.error = raised = kind(detail, metadata=metadata, retry_after_s=retry_after_s)
    error = await unary_error(channel, kind)
    assert type(error) is kind
    assert error.detail == detail
    assert error.metadata == metadata
    assert error.retry_after_s == raised.retry_after_s


async def test_what_a_failed_call_refers_to_is_freed_without_a_garbage_collection(
    served: tuple[Failing, grpc.aio.Channel],
) -> None:
    class Parsed:
        """What the frames of the error refer to."""

    made: list[weakref.ref[Parsed]] = []

    def fail(servicer: Failing) -> NoReturn:
        parsed = Parsed()
        made.append(weakref.ref(parsed))
        try:
            raise ValueError("the cause")
        except ValueError as error:
            raise InvalidRequest({"text": "is too long"}) from error

    gc.disable()
    try:
        with mock.patch.object(Failing, "error", property(fail)):
            await unary_error(served[1], InvalidRequest)
        async with asyncio.timeout(10):
            while made[0]() is not None:
                await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def test_a_bug_becomes_internal_and_its_id_is_logged(
    served: tuple[Failing, grpc.aio.Channel], caplog: pytest.LogCaptureFixture
) -> None:
    failing, channel = served
    failing.error = KeyError("a private detail")
    with caplog.at_level(logging.ERROR):
        error = await unary_error(channel, InternalError)
    assert "private detail" not in error.detail
    assert any(error.metadata["error_id"] in record.getMessage() for record in caplog.records)
    assert any(record.exc_info for record in caplog.records)


async def test_malformed_messages_of_a_stream_name_the_field(
    served_internally: tuple[Failing, grpc.aio.Channel],
) -> None:
    _, channel = served_internally
    hello = prefill_pb2.PullRequest(hello=prefill_pb2.Hello(worker_id="a")).SerializeToString()
    pull: Any = channel.stream_stream(PULL)
    call = pull()
    await call.write(hello)
    assert await call.read() == b""
    await call.write(hello.replace(b"a", b"\xff"))
    error = await error_of(InvalidRequest, call.read())
    assert list(error.violations) == ["hello.worker_id"]


@pytest.mark.parametrize(
    "code, kind",
    [
        (grpc.StatusCode.UNAVAILABLE, WorkerGone),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, Cancelled),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.UNKNOWN, InternalError),
    ],
)
def test_statuses_without_details_map_to_the_nearest_error(
    code: grpc.StatusCode, kind: type[HeadraceError]
) -> None:
    foreign = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "lost")
    error = error_from_rpc(foreign)
    assert type(error) is kind
    assert "lost" in error.detail


async def test_an_error_that_two_calls_share_ends_both() -> None:
    shared: asyncio.Future[HeadraceError] = asyncio.get_running_loop().create_future()

    async def call() -> HeadraceError:
        try:
            return await shared
        except InvalidRequest as error:
            await asyncio.sleep(0)
            return reported_error(error, "m")

    calls = asyncio.gather(call(), call())
    await asyncio.sleep(0)
    shared.set_exception(InvalidRequest({"a": "b"}))
    assert len(await asyncio.wait_for(calls, 5.0)) == 2
