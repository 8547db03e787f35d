"""Serves the Endpoint Picker Protocol on its listener: one stream for each HTTP request of a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, Final

import grpc
import grpc.aio

from headrace.gateway.v1 import external_processing_pb2 as ext_pb2
from headrace_common.access.authorizer import Authorizer
from headrace_common.access.credentials import TlsFiles
from headrace_common.access.table import PICKER_METHOD, Listener
from headrace_common.errors import HeadraceError, ProtocolViolation
from headrace_common.http.bounds import BODY_WAIT_S
from headrace_common.http.exchange import HttpError, too_large
from headrace_common.rpc.access import InternalAccess
from headrace_common.rpc.listener import Address, RpcListener, internal_options
from headrace_common.rpc.status import ErrorInterceptor
from headrace_common.tasks import end_task, run_forever
from headrace_frontend.openai.errors import error_bytes, headers_of, status_of
from headrace_router.config import RouterConfig
from headrace_router.picker.picker import EndpointPicker, has_prompt

DESTINATION: Final = "x-gateway-destination-endpoint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
_DESTINATION_SPACE: Final = "envoy.lb"
_SUBSET_SPACE: Final = "envoy.lb.subset_hint"
_OVERWRITE: Final = 2
# Envoy's buffers are small, and a gRPC message of a body part needs some bytes more.
_PART_BYTES: Final = 60_000


def subset_of(metadata: ext_pb2.Metadata) -> frozenset[str] | None:
    """The endpoints that the gateway permits. None: all."""
    hint = metadata.filter_metadata.get(_SUBSET_SPACE)
    if hint is None or SUBSET not in hint.fields:
        return None
    value = hint.fields[SUBSET]
    if value.WhichOneof("kind") == "list_value":
        texts: Iterable[str] = (item.string_value for item in value.list_value.values)
    else:
        texts = value.string_value.split(",")
    return frozenset(filter(None, map(str.strip, texts)))


def destination_headers(endpoint: str) -> ext_pb2.HeaderMutation:
    """Sets the destination, and overwrites what a client has set."""
    return _headers({DESTINATION: endpoint})


def with_destination(
    response: ext_pb2.ProcessingResponse, endpoint: str
) -> ext_pb2.ProcessingResponse:
    """Adds the destination as dynamic metadata."""
    response.dynamic_metadata.get_or_create_struct(_DESTINATION_SPACE)[DESTINATION] = endpoint
    return response


def streamed_parts(body: bytes, *, ends: bool) -> Iterator[ext_pb2.ProcessingResponse]:
    """The unchanged body for the mode full duplex. `ends`: whether no trailers follow."""
    starts = range(0, max(1, len(body)), _PART_BYTES)
    for start in starts:
        part = ext_pb2.StreamedBodyResponse(
            body=body[start : start + _PART_BYTES],
            end_of_stream=ends and start == starts[-1],
        )
        change = ext_pb2.CommonResponse(body_mutation=ext_pb2.BodyMutation(streamed_response=part))
        yield ext_pb2.ProcessingResponse(request_body=ext_pb2.BodyResponse(response=change))


def error_response(error: HeadraceError | HttpError) -> ext_pb2.ProcessingResponse:
    """The response to the client, in OpenAI's form."""
    reason = error.code if isinstance(error, HttpError) else error.reason
    return ext_pb2.ProcessingResponse(
        immediate_response=ext_pb2.ImmediateResponse(
            status=ext_pb2.HttpStatus(code=status_of(error)),
            headers=_headers({"content-type": "application/json", **headers_of(error)}),
            body=error_bytes(error),
            details=reason.lower(),
        )
    )


def _headers(values: Mapping[str, str]) -> ext_pb2.HeaderMutation:
    return ext_pb2.HeaderMutation(
        set_headers=[
            ext_pb2.HeaderValueOption(
                header=ext_pb2.HeaderValue(key=name, raw_value=value.encode("latin-1")),
                append_action=_OVERWRITE,
            )
            for name, value in values.items()
        ]
    )


_WHOLE: Final = 2
_FULL_DUPLEX: Final = 4
_HEALTH_NAMES: Final = ("liveness", "readiness", PICKER_METHOD.strip("/").partition("/")[0])
_READY_CHECK_S: Final = 1.0

Requests = AsyncIterator[ext_pb2.ProcessingRequest]


class PickerService:
    """Answers the request phase, then ends the stream, so that no byte of the response comes here."""

    def __init__(self, picker: EndpointPicker) -> None:
        self._picker = picker

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serves Envoy's name of the RPC. The messages are ours, with the same bytes."""
        service, _, method = PICKER_METHOD.strip("/").partition("/")
        handler = grpc.stream_stream_rpc_method_handler(
            self.process,
            request_deserializer=ext_pb2.ProcessingRequest.FromString,
            response_serializer=ext_pb2.ProcessingResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )

    async def process(
        self, requests: Requests, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[ext_pb2.ProcessingResponse]:
        """The responses to the parts of one HTTP request."""
        try:
            async for response in self._answer(requests):
                yield response
        except (HeadraceError, HttpError) as error:
            yield error_response(error)

    async def _answer(self, requests: Requests) -> AsyncIterator[ext_pb2.ProcessingResponse]:
        first = await _next(requests)
        if first.WhichOneof("request") != "request_headers":
            raise ProtocolViolation("the first message must have request_headers")
        headers = {
            header.key.lower(): header.raw_value.decode("latin-1") or header.value
            for header in first.request_headers.headers.headers
        }
        subset = subset_of(first.metadata_context)
        mode = first.protocol_config.request_body_mode
        bodied = not first.request_headers.end_of_stream and mode in (_WHOLE, _FULL_DUPLEX)
        if not bodied:
            yield await self._headers_response(headers, None, subset)
        elif mode == _FULL_DUPLEX:
            body, trailers = await self._read(requests)
            yield await self._headers_response(headers, body, subset)
            for part in streamed_parts(body, ends=not trailers):
                yield part
            if trailers:
                yield ext_pb2.ProcessingResponse(request_trailers=ext_pb2.TrailersResponse())
        elif not has_prompt(headers):
            yield await self._headers_response(headers, None, subset)
        else:
            yield ext_pb2.ProcessingResponse(request_headers=ext_pb2.HeadersResponse())
            body, _ = await self._read(requests)
            endpoint = await self._picker.pick(headers, body, subset)
            change = ext_pb2.CommonResponse(header_mutation=destination_headers(endpoint))
            yield with_destination(
                ext_pb2.ProcessingResponse(request_body=ext_pb2.BodyResponse(response=change)),
                endpoint,
            )

    async def _headers_response(
        self, headers: dict[str, str], body: bytes | None, subset: frozenset[str] | None
    ) -> ext_pb2.ProcessingResponse:
        endpoint = await self._picker.pick(headers, body, subset)
        change = ext_pb2.CommonResponse(header_mutation=destination_headers(endpoint))
        return with_destination(
            ext_pb2.ProcessingResponse(request_headers=ext_pb2.HeadersResponse(response=change)),
            endpoint,
        )

    async def _read(self, requests: Requests) -> tuple[bytes, bool]:
        """The whole body, and whether trailers ended it. Raises HttpError beyond the bounds."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_WAIT_S):
                while True:
                    request = await _next(requests)
                    kind = request.WhichOneof("request")
                    if kind == "request_trailers":
                        return b"".join(parts), True
                    if kind != "request_body":
                        raise ProtocolViolation("request_body or request_trailers is expected")
                    parts.append(request.request_body.body)
                    size += len(parts[-1])
                    bytes_max = self._picker.parts.body_bytes_max
                    if size > bytes_max:
                        raise too_large(bytes_max)
                    if request.request_body.end_of_stream:
                        return b"".join(parts), False
        except TimeoutError:
            raise HttpError(
                408, "body_timeout", f"the body did not arrive within {BODY_WAIT_S:g} s"
            ) from None


async def _next(requests: Requests) -> ext_pb2.ProcessingRequest:
    request = await anext(requests, None)
    if request is None:
        raise ProtocolViolation("the gateway ended the stream before the request was complete")
    return request


class PickerServer:
    """Serves `endpoint_picker_listen` to callers with the role gateway."""

    def __init__(self, picker: EndpointPicker, config: RouterConfig) -> None:
        """Raises ConfigError when a file of the settings cannot be read."""
        self._picker = picker
        self._authorizer = Authorizer.from_config(config)
        self._listener = RpcListener(
            Address(Listener.PICKER, config.endpoint_picker_listen),
            (),
            [ErrorInterceptor(), InternalAccess(self._authorizer, Listener.PICKER)],
            tls=TlsFiles.from_config(config),
            options=internal_options(config.connections_max()),
            further_health=_HEALTH_NAMES,
        )
        PickerService(picker).add_to(self._listener.server)
        self.endpoint = ""
        """The "host:port" on which it listens, after `start`."""
        self._ready = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serves from now on. Raises ConfigError when it cannot listen."""
        self.endpoint = self._listener.bind()
        self._authorizer.serve_at(self.endpoint)
        await self._listener.start()
        await self._report_ready()
        self._task = run_forever(self._follow_readiness, "picker-readiness")

    async def stop(self) -> None:
        """Ends every stream."""
        if self._task is not None:
            await end_task(self._task)
        await self._listener.server.stop(None)

    async def _follow_readiness(self) -> None:
        while True:
            await asyncio.sleep(_READY_CHECK_S)
            if self._picker.ready != self._ready:
                await self._report_ready()

    async def _report_ready(self) -> None:
        self._ready = self._picker.ready
        await self._listener.set_health_of("readiness", serving=self._ready)
