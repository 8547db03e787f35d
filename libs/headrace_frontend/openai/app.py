"""The OpenAI HTTP API: serves each request by its route, within the bounds of its caller."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

from opentelemetry import context as otel_context

from headrace.inference.v1 import inference_pb2
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import InvalidRequest, Unauthenticated
from headrace_common.http.exchange import HttpError, HttpExchange
from headrace_common.ports import is_loopback
from headrace_common.rpc.trace_context import SERVED, ServedCall, context_of_carrier
from headrace_common.telemetry.metrics.prometheus import content_type
from headrace_common.version import version
from headrace_frontend.openai.batches.batches import BATCHES_PATH, Batches
from headrace_frontend.openai.batches.folder import BATCH, FILE
from headrace_frontend.openai.batches.routes import BatchRoutes
from headrace_frontend.openai.block_apis.anthropic import MESSAGES_ERRORS
from headrace_frontend.openai.block_apis.responses_answers import RESPONSES_ERRORS
from headrace_frontend.openai.errors import OPENAI_ERRORS, respond_error, unknown_path
from headrace_frontend.openai.intake import ClientParts, Intake
from headrace_frontend.openai.requests import KeepBody
from headrace_frontend.openai.routes import GenerateRoutes, TokenizeRoutes
from headrace_frontend.openai.stored_apis.routes import ResponsesRoutes
from headrace_frontend.promises import kept_object
from headrace_frontend.tenants import Tenants


class MetricsPage:
    """Serves /metrics to callers with a key of its own. Without such keys it is open on loopback only."""

    def __init__(self, readers: Tenants, read: Callable[[str], str], listen: str) -> None:
        """`readers` has the keys, `read` returns the metrics as text of a content type.

        `listen` is the host:port that serves the page.
        """
        self._readers = readers
        self._read = read
        self._is_open = is_loopback(listen) and not readers.keyed

    async def respond(self, exchange: HttpExchange) -> None:
        """Raises HttpError while the page is closed, and Unauthenticated without a valid key."""
        if not self._is_open:
            self._check_key(exchange)
        kind = content_type(exchange.headers.get("accept", ""))
        await exchange.respond(200, self._read(kind).encode(), {"content-type": kind})

    def _check_key(self, exchange: HttpExchange) -> None:
        if not self._readers.keyed:
            raise HttpError(
                403,
                "metrics_closed",
                "/metrics is closed, because other hosts may reach it: set metrics_keys_file",
            )
        try:
            self._readers.tenant_of(exchange.headers.items())
        except Unauthenticated as error:
            raise Unauthenticated(
                "a key of metrics_keys_file is required; send it as header 'Authorization: Bearer KEY'"
            ) from error


_ERRORS: Final = {
    "/v1/messages": MESSAGES_ERRORS,
    "/v1/messages/count_tokens": MESSAGES_ERRORS,
    "/v1/responses": RESPONSES_ERRORS,
    "/v1/responses/{id}": RESPONSES_ERRORS,
}
_MODEL_PATH: Final = "/v1/models/"
_MODEL_ROUTE: Final = "/v1/models/{model}"
_STORED_PATHS: Final = tuple(
    f"/v1/{kind}/" for kind in ("responses", "conversations", "files", "batches")
)
_NO_HEADER_NAMES: Final = re.compile(r"[^!-~ ]")
_STORED_NAMES: Final = ("{id}", "{item_id}")
_Handler: TypeAlias = Callable[[HttpExchange], Awaitable[None]]


class OpenAiApp:
    """The application of `http_listen`."""

    def __init__(
        self, parts: ClientParts, metrics: MetricsPage, batches: Batches | None = None
    ) -> None:
        self._parts = parts
        self._started_s = int(time.time())
        self._intake = Intake(parts)
        generate = GenerateRoutes(parts, self._intake)
        tokenize = TokenizeRoutes(parts, self._intake)
        self._responses = responses = ResponsesRoutes(parts, self._intake, generate)
        stored = partial(partial, responses.use)
        self._batches = batches
        batch = BatchRoutes(parts, self._intake, batches)
        self._routes: Mapping[str, Mapping[str, _Handler]] = {
            "/v1/chat/completions": {"POST": generate.chat},
            "/v1/completions": {"POST": generate.complete},
            "/v1/messages": {"POST": generate.messages},
            "/v1/messages/count_tokens": {"POST": tokenize.count_tokens},
            "/v1/responses": {"POST": responses.respond},
            "/v1/responses/input_tokens": {"POST": responses.count_tokens},
            "/v1/responses/{id}": {"GET": responses.retrieve, "DELETE": stored("delete")},
            "/v1/responses/{id}/cancel": {"POST": stored("cancel")},
            "/v1/responses/{id}/input_items": {"GET": stored("items")},
            "/v1/conversations": {"POST": responses.create_conversation},
            "/v1/conversations/{id}": {
                "GET": stored("retrieve"),
                "POST": stored("update"),
                "DELETE": stored("delete"),
            },
            "/v1/conversations/{id}/items": {"GET": stored("items"), "POST": stored("add")},
            "/v1/conversations/{id}/items/{item_id}": {
                "GET": stored("item"),
                "DELETE": stored("delete_item"),
            },
            "/v1/files": {"GET": partial(batch.list_entries, FILE), "POST": batch.create_file},
            "/v1/files/{id}": {
                "GET": partial(batch.use, "retrieve"),
                "DELETE": partial(batch.use, "delete"),
            },
            "/v1/files/{id}/content": {"GET": batch.content},
            BATCHES_PATH: {"GET": partial(batch.list_entries, BATCH), "POST": batch.create_batch},
            f"{BATCHES_PATH}/{{id}}": {"GET": partial(batch.use, "retrieve")},
            f"{BATCHES_PATH}/{{id}}/cancel": {"POST": partial(batch.use, "cancel")},
            "/v1/headrace/keep": {"POST": self._keep},
            "/v1/models": {"GET": self._list_models},
            _MODEL_ROUTE: {"GET": self._describe_model},
            "/tokenize": {"POST": tokenize.tokenize},
            "/detokenize": {"POST": tokenize.detokenize},
            "/health": {"GET": self._report_health},
            "/ready": {"GET": self._report_ready},
            "/ping": {"GET": self._report_health},
            "/version": {"GET": self._report_version},
            "/load": {"GET": self._report_load},
            "/metrics": {"GET": metrics.respond},
        }

    async def __call__(self, exchange: HttpExchange) -> None:
        """Serves one HTTP request."""
        exchange.end_with_client()
        route = self._route_of(exchange.path)
        errors = _ERRORS.get(route, OPENAI_ERRORS)
        exchange.add_header("x-request-id", exchange.request_id)
        if errors is MESSAGES_ERRORS:
            exchange.add_header("request-id", exchange.request_id)
        if self._parts.origins:
            self._permit_page(exchange)
        try:
            call, recheck = self._intake.in_bounds(exchange)
            with call, recheck:
                await self._handler(exchange, route)(exchange)
        except Exception as error:  # noqa: BLE001 - the outermost frame of a request
            await respond_error(exchange, error, errors)

    async def drain(self, deadline: Deadline) -> None:
        """Waits for what runs without a client, until the deadline. New work is rejected already."""
        await self._responses.drain(deadline)
        if self._batches is not None:
            await self._batches.drain(deadline)

    def _permit_page(self, exchange: HttpExchange) -> None:
        """Lets the browser give the response to the page that asks, if its origin is listed (CORS)."""
        origin = exchange.headers.get("origin", "")
        exchange.add_header("vary", "origin")
        if origin in self._parts.origins or (origin and "*" in self._parts.origins):
            exchange.add_header("access-control-allow-origin", origin)
            exchange.add_header("access-control-expose-headers", "*")

    def _route_of(self, path: str) -> str:
        """The path with the names of entries left out."""
        path = path.rstrip("/")
        if path.startswith(_MODEL_PATH):
            return _MODEL_ROUTE
        if path.startswith(_STORED_PATHS) and path not in self._routes:
            parts = path.split("/")
            names = len(parts[3::2])
            if names <= len(_STORED_NAMES):
                parts[3::2] = _STORED_NAMES[:names]
            path = "/".join(parts)
        return path

    def _handler(self, exchange: HttpExchange, route: str) -> _Handler:
        handlers = self._routes.get(route)
        if handlers is None:
            raise unknown_path(route, self._routes)
        # A server sends no body for HEAD.
        method = "GET" if exchange.method == "HEAD" else exchange.method
        handler = handlers.get(method)
        if handler is None:
            methods = (*handlers, "HEAD") if "GET" in handlers else handlers
            allowed = ", ".join(methods)
            if self._parts.origins and method == "OPTIONS":
                return partial(_permit_request, allowed)
            raise HttpError(405, "method", f"use {allowed} for {route}", {"allow": allowed})
        SERVED.set(ServedCall(route, method))
        if traceparent := exchange.headers.get("traceparent"):
            tracestate = exchange.headers.get("tracestate", "")
            otel_context.attach(context_of_carrier(traceparent, tracestate))
        return handler

    async def _list_models(self, exchange: HttpExchange) -> None:
        self._intake.tenant_of(exchange)
        models = self._parts.models.list_models()
        data = [_model_object(model, self._started_s) for model in models]
        await exchange.respond_object({"object": "list", "data": data})

    async def _describe_model(self, exchange: HttpExchange) -> None:
        self._intake.tenant_of(exchange)
        name = exchange.path.rstrip("/").removeprefix(_MODEL_PATH)
        for model in self._parts.models.list_models():
            if model.name == name:
                await exchange.respond_object(_model_object(model, self._started_s))
                return
        remedy = f"{name[:64]!r} is not served; /v1/models lists what is"
        raise InvalidRequest({"model": remedy}, cause="model_not_found")

    async def _keep(self, exchange: HttpExchange) -> None:
        tenant, body = await self._intake.read(exchange, KeepBody)
        request = inference_pb2.KeepRequest(
            id=body.id, duration=duration_from_seconds(body.seconds)
        )
        deadline = self._intake.deadline()
        async with self._intake.admitted(tenant, deadline):
            kept = await self._parts.keep(tenant, request, deadline)
        await exchange.respond_object(kept_object(kept))

    async def _report_health(self, exchange: HttpExchange) -> None:
        await exchange.respond_object({"status": "ok"})

    async def _report_version(self, exchange: HttpExchange) -> None:
        await exchange.respond_object({"version": version()})

    async def _report_load(self, exchange: HttpExchange) -> None:
        self._intake.tenant_of(exchange)
        await exchange.respond_object({"server_load": self._parts.runner.requests})

    async def _report_ready(self, exchange: HttpExchange) -> None:
        """200 while new requests can be served."""
        self._parts.runner.reject_when_draining()
        if not self._parts.models.list_models():
            raise HttpError(503, "no_decode_worker", "no decode worker serves a model yet")
        await exchange.respond_object({"status": "ready"})


async def _permit_request(methods: str, exchange: HttpExchange) -> None:
    """Answers a browser that asks before a page's request. Only pages of a permitted origin make use of it."""
    asked = exchange.headers.get("access-control-request-headers", "")
    headers = {
        "allow": methods,
        "access-control-allow-methods": methods,
        "access-control-allow-headers": _NO_HEADER_NAMES.sub("", asked),
        "access-control-max-age": "600",
    }
    await exchange.respond(200, b"", headers)


def _model_object(model: inference_pb2.Model, created: int) -> dict[str, Any]:
    """One model, or one adapter, which has a parent."""
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "headrace",
        "root": model.parent or model.name,
        "parent": model.parent or None,
        "max_model_len": model.max_model_len,
    }
