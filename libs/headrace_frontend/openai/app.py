"""The OpenAI HTTP API: serves each request by its route, within the bounds of its caller."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

from opentelemetry import context as otel_context

from headrace.inference.v1 import inference_pb2
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import InvalidRequest, Unauthenticated
from headrace_common.http.exchange import HttpError, HttpExchange
from headrace_common.ports import is_loopback
from headrace_common.rpc.access import caller_name
from headrace_common.rpc.trace_context import SERVED, ServedCall, context_of_carrier
from headrace_common.telemetry.metrics.prometheus import content_type
from headrace_common.version import version
from headrace_frontend.openai.block_apis.anthropic import MESSAGES_ERRORS
from headrace_frontend.openai.block_apis.responses_answers import RESPONSES_ERRORS
from headrace_frontend.openai.errors import OPENAI_ERRORS, serve, unknown_path
from headrace_frontend.openai.intake import ClientParts, Intake
from headrace_frontend.openai.requests import KeepBody
from headrace_frontend.openai.routes import GenerateRoutes, TokenizeRoutes
from headrace_frontend.promises import kept_object
from headrace_frontend.tenants import Tenants, tenant_or_none


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
}
_MODEL_PATH: Final = "/v1/models/"
_MODEL_ROUTE: Final = "/v1/models/{model}"
_Handler: TypeAlias = Callable[[HttpExchange], Awaitable[None]]


class OpenAiApp:
    """The application of `http_listen`."""

    def __init__(self, parts: ClientParts, metrics: MetricsPage) -> None:
        self._parts = parts
        self._started_s = int(time.time())
        self._intake = Intake(parts)
        generate = GenerateRoutes(parts, self._intake)
        tokenize = TokenizeRoutes(parts, self._intake)
        self._routes: Mapping[str, tuple[str, _Handler]] = {
            "/v1/chat/completions": ("POST", generate.chat),
            "/v1/completions": ("POST", generate.complete),
            "/v1/messages": ("POST", generate.messages),
            "/v1/messages/count_tokens": ("POST", tokenize.count_tokens),
            "/v1/responses": ("POST", generate.respond),
            "/v1/headrace/keep": ("POST", self._keep),
            "/v1/models": ("GET", self._list_models),
            _MODEL_ROUTE: ("GET", self._describe_model),
            "/tokenize": ("POST", tokenize.tokenize),
            "/detokenize": ("POST", tokenize.detokenize),
            "/health": ("GET", self._report_health),
            "/ready": ("GET", self._report_ready),
            "/ping": ("GET", self._report_health),
            "/version": ("GET", self._report_version),
            "/load": ("GET", self._report_load),
            "/metrics": ("GET", metrics.respond),
        }

    async def __call__(self, exchange: HttpExchange) -> None:
        """Serves one HTTP request."""
        exchange.end_with_client()
        errors = _ERRORS.get(exchange.path.rstrip("/"), OPENAI_ERRORS)
        exchange.add_header("x-request-id", exchange.request_id)
        if errors is MESSAGES_ERRORS:
            exchange.add_header("request-id", exchange.request_id)
        await serve(exchange, self._serve_in_bounds(exchange), errors)

    async def _serve_in_bounds(self, exchange: HttpExchange) -> None:
        callers = self._parts.callers
        tenant_now = partial(tenant_or_none, self._parts.tenants, exchange.headers.items())
        tenant = tenant_now()
        caller = caller_name(tenant, exchange.host)
        with callers.call(caller), callers.rechecked(tenant_now, tenant):
            await self._serve(exchange)

    async def _serve(self, exchange: HttpExchange) -> None:
        path = exchange.path.rstrip("/")
        if path.startswith(_MODEL_PATH):
            path = _MODEL_ROUTE
        method, handler = self._routes.get(path, ("", None))
        if handler is None:
            raise unknown_path(path, self._routes)
        # A server sends no body for HEAD.
        methods = ("GET", "HEAD") if method == "GET" else (method,)
        if exchange.method not in methods:
            allowed = ", ".join(methods)
            raise HttpError(405, "method", f"use {allowed} for {path}", {"allow": allowed})
        SERVED.set(ServedCall(path, method))
        headers = exchange.headers
        otel_context.attach(
            context_of_carrier(headers.get("traceparent", ""), headers.get("tracestate", ""))
        )
        await handler(exchange)

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
