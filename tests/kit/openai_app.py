"""The HTTP API in this process: real parsing, validation and formatting, over a runner that answers at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from opentelemetry import trace

from headrace.inference.v1 import inference_pb2, keep_pb2, sampling_pb2
from headrace_common.callers.bounds import CallerBounds
from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError
from headrace_common.http.exchange import HttpExchange
from headrace_frontend.answers import request_id_of
from headrace_frontend.conversations import ConversationStore
from headrace_frontend.openai.answers import ModelParsers
from headrace_frontend.openai.app import MetricsPage, OpenAiApp
from headrace_frontend.openai.block_apis.stored import StoredObjects
from headrace_frontend.openai.image_fetch import ImageFetcher
from headrace_frontend.openai.stored_apis.background import NoConnection
from headrace_frontend.promises import no_promise
from headrace_frontend.request.computations import Computation, Result, TextThreads
from headrace_frontend.request.preparation import RequestPreparer
from headrace_frontend.request.response_stream import Outlet, ResponseWriter
from headrace_frontend.request.size import RequestSizeCheck
from headrace_frontend.request.validation import PreparedRequest
from headrace_frontend.running.runner import RequestCounter
from headrace_frontend.store import Store
from headrace_frontend.tenants import Tenants
from headrace_text.codec import TextCodec
from headrace_text.load import ByteCodec

CONTEXT = 512
ANSWER = "Hi"
FINGERPRINT = "fp_1"


class Workers:
    """One worker of the model "sim"."""

    def max_model_len(self) -> Mapping[str, int]:
        return {"sim": CONTEXT}

    def adapters(self) -> Mapping[str, Any]:
        return {}

    async def wait_for_worker(self, model: str, deadline: Deadline) -> bool:
        return False


class NoThreads(TextThreads):
    """Virtual time does not wait for threads."""

    async def run(
        self, tenant: str, kind: Computation, units: int, work: Callable[[], Result]
    ) -> Result:
        return work()


class Runner:
    """Answers each request with `texts`, a message for each. `prepared` has the requests in their order."""

    def __init__(self, preparer: RequestPreparer) -> None:
        self._preparer = preparer
        self.counter = RequestCounter()
        self.texts: Sequence[str] = (ANSWER,)
        self.last = inference_pb2.GenerateResponse(finish_reason=sampling_pb2.FINISH_REASON_STOP)
        """Joins the last message of each answer."""
        self.wait_s = 0.0
        """Before the first text."""
        self.error: HeadraceError | None = None
        """Raised after the first text."""
        self.ended = 0
        """Requests that have been answered."""
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.prepared: list[PreparedRequest] = []
        self.timeouts_s: list[float] = []
        self.contexts: list[trace.SpanContext] = []

    async def run(
        self,
        request: inference_pb2.GenerateRequest,
        tenant: str,
        deadline: Deadline,
        write: ResponseWriter,
        outlet: Outlet | None = None,
        on_lowered: Callable[[int], None] | None = None,
    ) -> None:
        self.contexts.append(trace.get_current_span().get_span_context())
        prepared = await self._preparer.prepare(
            request, request_id_of(request), deadline, tenant, on_lowered=on_lowered
        )
        self.requests.append(request)
        self.prepared.append(prepared)
        self.timeouts_s.append(round(deadline.remaining_s()))
        await asyncio.sleep(self.wait_s)
        for choice in range(request.n):
            if request.sampling.HasField("prompt_logprobs"):
                await write(_prompt_message(prepared, choice))
            for number, text in enumerate(self.texts, 1):
                message = inference_pb2.GenerateResponse(
                    text=text, token_ids=text.encode(), choice=choice
                )
                if request.sampling.HasField("logprobs"):
                    message.logprobs.extend(sampling_pb2.TokenLogprobs() for _ in text.encode())
                if number == len(self.texts):
                    self._finish(message, request, prepared)
                await write(message)
                if self.error is not None:
                    # The event before it has been sent.
                    await asyncio.sleep(1.0)
                    raise self.error
        self.ended += 1

    def _finish(
        self,
        message: inference_pb2.GenerateResponse,
        request: inference_pb2.GenerateRequest,
        prepared: PreparedRequest,
    ) -> None:
        message.MergeFrom(self.last)
        if request.include_latency:
            message.timing.latency.first_token.total_us = 1
        message.usage.prompt_tokens = len(prepared.token_ids)
        message.usage.completion_tokens = len("".join(self.texts).encode())
        if request.HasField("keep"):
            message.usage.kept.MergeFrom(
                keep_pb2.Kept(id="known", tokens=96, tier="host", duration=request.keep)
            )

    @contextlib.asynccontextmanager
    async def admitted(self, tenant: str, deadline: Deadline) -> AsyncIterator[None]:
        yield

    def reject_when_draining(self) -> None:
        pass


def _prompt_message(prepared: PreparedRequest, choice: int) -> inference_pb2.GenerateResponse:
    entries = [sampling_pb2.TokenLogprobs(logprob=-1.0) for _ in prepared.token_ids[1:]]
    return inference_pb2.GenerateResponse(
        prompt_token_ids=prepared.token_ids, prompt_logprobs=entries, choice=choice
    )


@dataclass(frozen=True, slots=True)
class Reply:
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    """The requests that it answers."""
    prepared: list[PreparedRequest] = field(default_factory=list)
    """The same, with every default."""
    timeouts_s: list[float] = field(default_factory=list)
    """The time until the deadline of each."""

    @property
    def json(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def named_events(self) -> list[dict[str, Any]]:
        """Those of a streamed answer in which each event has its type as its name."""
        events: list[dict[str, Any]] = []
        for part in self.body.decode().removesuffix("\n\n").split("\n\n"):
            name, content = part.split("\ndata: ")
            events.append(json.loads(content))
            assert name == f"event: {events[-1]['type']}"
        return events

    @property
    def events(self) -> list[dict[str, Any]]:
        """Those of a streamed answer, without the last one, which is no JSON."""
        lines = [line.removeprefix(b"data: ") for line in self.body.split(b"\n\n") if line]
        assert lines[-1] == b"[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    @property
    def error(self) -> dict[str, Any]:
        """The error that it is."""
        found: dict[str, Any] = self.json["error"]
        return found


class Request(NoConnection):
    """A request. Its body arrives once a handler reads it; endless, again and again. Headers may have underscores.

    It is the connection of its exchange too.
    """

    PARTS_MAX = 32
    caller = "unknown"

    def __init__(
        self,
        *body: bytes,
        path: str = "/v1/completions",
        method: str = "POST",
        query: str = "",
        endless: bool = False,
        every_s: float = 0.0,
        **headers: str,
    ) -> None:
        """Without a body, none arrives. Each part of an endless one arrives after `every_s`."""
        self._body, self._endless, self._every_s = body, endless, every_s
        self.received, self.sent = 0, b""
        named = {"content-type": "application/json"}
        named |= {name.replace("_", "-"): value for name, value in headers.items()}
        self.exchange = HttpExchange(
            self, method, path, named, chunks=False, keeps_alive=True, query=query
        )

    def count_input(self) -> None:
        if self._body and self.received < self.PARTS_MAX:
            asyncio.get_running_loop().call_later(self._every_s, self._receive)

    def _receive(self) -> None:
        if not self.sent:
            self.received += 1
            self.exchange.add_body(self._body[0])
            more = self.count_input if self._endless else self.exchange.end_body
            more()

    def write(self, data: bytes) -> None:
        self.sent += data

    def end_response(self, data: bytes, *, keeps_alive: bool) -> None:
        self.sent += data

    def reply(self) -> Reply:
        """The response."""
        head, _, body = self.sent.partition(b"\r\n\r\n")
        line, *lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        return Reply(int(line.split()[1]), headers, body)


class LocalApp:
    """The API of one model, "sim", which answers with `texts`. `reasoning` and `tool_calls` name its parsers."""

    def __init__(
        self,
        *,
        rejects_unknown_fields: bool = False,
        reasoning: str = "qwen3",
        tool_calls: str = "hermes",
        texts: Sequence[str] = (ANSWER,),
        codec: TextCodec | None = None,
        image_hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
        callers: CallerBounds | None = None,
        tenants: Tenants | None = None,
        metrics: MetricsPage | None = None,
        body_bytes_max: int = 2**20,
        context: int = CONTEXT,
        store_bytes: int = 2**20,
    ) -> None:
        codecs: dict[str, TextCodec] = {"sim": codec or ByteCodec()}
        preparer = RequestPreparer(codecs, Workers(), lambda tenant: "")
        preparer.threads = NoThreads()
        self.runner = Runner(preparer)
        self.runner.texts = texts
        store = Store(store_bytes, 60.0)
        conversations = ConversationStore(store)
        parts: Any = SimpleNamespace(
            codecs=codecs,
            parsers={"sim": ModelParsers(tool_calls, reasoning)},
            models=Mock(system_fingerprint=lambda choice: FINGERPRINT),
            tenants=tenants or Tenants(None),
            runner=self.runner,
            preparer=preparer,
            size=RequestSizeCheck(lambda: {"sim": context}),
            callers=callers or CallerBounds(1_024, check_s=0.05),
            conversations=conversations,
            objects=StoredObjects(store, conversations),
            keep=self._keep,
            images=ImageFetcher(image_hosts),
            origins=origins,
            stream_ping_s=10.0,
            rejects_unknown_fields=rejects_unknown_fields,
            deadline_s=60.0,
            body_bytes_max=body_bytes_max,
        )
        page = metrics or MetricsPage(Tenants(None), str, "")
        self._app = OpenAiApp(parts, page)

    async def _keep(
        self, tenant: str, request: inference_pb2.KeepRequest, deadline: Deadline
    ) -> keep_pb2.Kept:
        """One promise, "known"."""
        if request.id != "known":
            raise no_promise()
        if not request.duration.seconds:
            return keep_pb2.Kept(reason="it was ended")
        return keep_pb2.Kept(id="known", tokens=96, tier="host", duration=request.duration)

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        """The response to a body, a JSON value or bytes. Underscores in `headers` stand for hyphens."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given: dict[str, Any] = {"path": path, **headers}
        request, runner = Request(data, **given), self.runner
        before = len(runner.requests)
        await self.status(request)
        return replace(
            request.reply(),
            requests=runner.requests[before:],
            prepared=runner.prepared[before:],
            timeouts_s=runner.timeouts_s[before:],
        )

    async def status(self, request: Request) -> int:
        """The status of the response to a request."""
        await self._app(request.exchange)
        return request.reply().status

    async def chat(self, **fields: Any) -> Reply:
        """The response to a chat."""
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.post("/v1/chat/completions", body)

    async def complete(self, **fields: Any) -> Reply:
        """The response to a completion."""
        return await self.post("/v1/completions", {"prompt": "hi", **fields})
