"""Chooses the decode worker for a gateway's HTTP request, as the router would for its own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from opentelemetry import context as otel_context

from headrace.inference.v1 import inference_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import DecodeFull, HeadraceError, InvalidRequest, NoDecodeWorker
from headrace_common.rpc.trace_context import context_from_traceparent
from headrace_frontend.openai.body import parse_body
from headrace_frontend.openai.conversion import (
    chat_request,
    completion_requests,
    openai_error,
)
from headrace_frontend.openai.image_fetch import has_remote_images
from headrace_frontend.openai.intake import ClientParts, parsed_json
from headrace_frontend.openai.requests import ChatCompletionBody, CompletionBody
from headrace_frontend.request.validation import (
    REQUEST_ID_CHARACTERS_MAX,
    PreparedRequest,
)
from headrace_frontend.running.tracer import RequestTracer
from headrace_router.dispatch.dispatcher import RequestDispatcher
from headrace_router.placement import Decision
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.workers.directory import WorkerDirectory
from headrace_router.workers.table import Worker

# By then the worker's status shows the request.
_PROMISE_S: Final = 1.0

_Convert: TypeAlias = Callable[[bytes, str], inference_pb2.GenerateRequest | None]
"""None for a request with images that only the worker fetches."""


def _chat(body: bytes, request_id: str) -> inference_pb2.GenerateRequest | None:
    chat = parse_body(ChatCompletionBody, body)
    return None if has_remote_images(chat.messages) else chat_request(chat, request_id)


def _completion(body: bytes, request_id: str) -> inference_pb2.GenerateRequest:
    return completion_requests(parse_body(CompletionBody, body), request_id)[0]


_PROMPTS: Final[Mapping[str, _Convert]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
}


def has_prompt(headers: Mapping[str, str]) -> bool:
    """Whether the body of a request decides about its worker."""
    return _path(headers) in _PROMPTS and headers.get(":method", "POST") == "POST"


def _path(headers: Mapping[str, str]) -> str:
    return headers.get(":path", "").partition("?")[0]


@dataclass(slots=True)
class EndpointPicker:
    """`deadline_s` bounds a decision."""

    parts: ClientParts
    dispatcher: RequestDispatcher
    workers: WorkerDirectory
    queue: PrefillQueue
    tracer: RequestTracer
    count_pick: Callable[[str], None]
    """Gets "picked", or the reason of the error."""
    deadline_s: float

    @property
    def ready(self) -> bool:
        """Whether a decode worker can be picked."""
        return any(
            worker.http_endpoint
            for model in self.workers.max_model_len()
            for worker in self.workers.table(model).workers
        )

    async def pick(
        self, headers: Mapping[str, str], body: bytes | None, subset: frozenset[str] | None
    ) -> str:
        """The "host:port" of the HTTP API of a decode worker. `body` is None where the gateway sends none.

        Raises HeadraceError, which becomes the response to the client.
        """
        try:
            endpoint = await self._pick(headers, body, subset)
        except HeadraceError as error:
            self.count_pick(error.reason)
            if not isinstance(error, InvalidRequest):
                raise
            chat = _path(headers) == "/v1/chat/completions"
            raise openai_error(error, chat=chat) from error
        self.count_pick("picked")
        return endpoint

    async def _pick(
        self, headers: Mapping[str, str], body: bytes | None, subset: frozenset[str] | None
    ) -> str:
        tenant = self.parts.tenants.tenant_of(headers.items())
        deadline = Deadline.after(self.deadline_s)
        async with self.parts.runner.admitted(tenant, deadline):
            if body is None or not has_prompt(headers):
                return self._least_loaded(subset).http_endpoint
            request_id = _request_id(headers)
            convert = partial(_PROMPTS[_path(headers)], body, request_id)
            request = await parsed_json(self.parts, tenant, body, convert)
            if request is None:
                return self._least_loaded(subset).http_endpoint
            prepared = await self.parts.preparer.tokenize(request, tenant)
            otel_context.attach(context_from_traceparent(headers.get("traceparent", "")))
            return self._place(prepared, request_id, deadline, subset)

    def _place(
        self,
        prepared: PreparedRequest,
        request_id: str,
        deadline: Deadline,
        subset: frozenset[str] | None,
    ) -> str:
        table = self.workers.table(prepared.model)
        allowed = {worker.ref for worker in table.workers if _is_allowed(worker, subset)}
        avoided = [worker.ref.worker_id for worker in table.workers if worker.ref not in allowed]
        with self.tracer.record(request_id) as record:
            decision = self.dispatcher.route(prepared, record, deadline, avoided)
        worker = decision.worker
        if worker.ref not in allowed:
            raise _none_allowed(prepared.model)
        chosen = table.flags({worker.ref})
        if (table.requests >= table.max_num_seqs)[chosen].all():
            raise DecodeFull(
                "every decode worker has as many requests as it takes; send the request again in a moment",
                metadata={"resource": DecodeFull.SLOTS},
            )
        self._promise(decision, prepared)
        return worker.http_endpoint

    def _least_loaded(self, subset: frozenset[str] | None) -> Worker:
        """For requests without a prompt. Raises NoDecodeWorker."""
        found: list[tuple[float, Worker]] = []
        for model in self.workers.max_model_len():
            table = self.workers.table(model)
            usable = table.reachable & ~table.draining
            found += [
                (float(table.requests[row]), worker)
                for row, worker in enumerate(table.workers)
                if usable[row] and _is_allowed(worker, subset)
            ]
        if not found:
            raise _none_allowed("")
        return min(found, key=lambda one: (one[0], one[1].ref.worker_id))[1]

    def _promise(self, decision: Decision, prepared: PreparedRequest) -> None:
        """Counts the request on its worker until the worker reports it."""
        held = ExitStack()
        tokens = len(prepared.token_ids)
        reservation = self.workers.reserve_load(decision.worker.ref, tokens, routed=False)
        if reservation is not None:
            held.callback(reservation.release)
        if decision.remote:
            expected = self.queue.expect_task(
                decision.worker.layout, tokens, prepared.priority, prepared.tenant
            )
            held.callback(expected)
        asyncio.get_running_loop().call_later(_PROMISE_S, held.close)


def _is_allowed(worker: Worker, subset: frozenset[str] | None) -> bool:
    return bool(worker.http_endpoint) and (subset is None or worker.http_endpoint in subset)


def _none_allowed(model: str) -> NoDecodeWorker:
    return NoDecodeWorker(
        "no live decode worker that the gateway permits serves HTTP; set http_listen of the decode workers, and list "
        "their addresses in the gateway",
        metadata={"model": model} if model else {},
    )


def _request_id(headers: Mapping[str, str]) -> str:
    """The client's id in X-Request-Id, or a new one."""
    return headers.get("x-request-id", "")[:REQUEST_ID_CHARACTERS_MAX] or secrets.token_hex(12)
