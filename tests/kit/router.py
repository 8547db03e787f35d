"""A router on a real port, between fake workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import grpc.aio
import httpx
import pytest

from headrace.decode.v1 import decode_pb2_grpc
from headrace.inference.v1 import (
    adapter_pb2,
    first_token_pb2,
    inference_pb2,
    inference_pb2_grpc,
    trace_pb2,
)
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_common.errors import HeadraceError
from headrace_common.http.bounds import HttpBounds
from headrace_common.http.server import HttpServer
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_common.telemetry import schema
from headrace_common.telemetry.setup import Telemetry, init_telemetry
from headrace_kv.layout import WorkerRef
from headrace_router.app import Router
from headrace_router.config import RouterConfig
from headrace_text.codec import TextCodec
from headrace_text.load import ByteCodec
from tests.channels import operator_channel
from tests.kit.openai_app import Request
from tests.kit.workers import Behaviour, FakeDecode, FakePrefill, Handoff, ReadTokens, Script
from tests.router_key import RouterKey
from tests.waiting import until

PREFIX_KEY = 1


class Rig:
    """A router on a real port, with one model, "sim". Tests add workers."""

    def __init__(
        self,
        *,
        tenants: Mapping[str, str] | None = None,
        codec: TextCodec | None = None,
        **settings: Any,
    ) -> None:
        """`tenants` has the tenant of each API key. Without it, no key is needed."""
        self._folder = TemporaryDirectory()
        if tenants:
            keys = Path(self._folder.name, "keys")
            keys.write_text("".join(f"{key} {tenant}\n" for key, tenant in tenants.items()))
            settings["api_keys_file"] = str(keys)
        self.config = RouterConfig(
            model=("sim",),
            **{
                "worker_wait_s": 0.2,
                "insecure": True,
                "traces_sampler": "parentbased_always_on",
                **settings,
            },
        )
        self.codec = codec or ByteCodec()
        self.handoff = Handoff()
        self.read_tokens = ReadTokens()
        self._counting = mock.patch.object(
            decode_pb2_grpc, "DecodeServiceStub", self.read_tokens.stub
        )
        self.policy = registry_pb2.Policy(first_token=first_token_pb2.FIRST_TOKEN_POLICY_DECODE)
        """The run-time policy, which tests change."""
        self.router_key = RouterKey()
        self.decodes: list[FakeDecode] = []
        self.prefills: list[FakePrefill] = []

    async def start(self) -> Rig:
        self._counting.start()
        self.telemetry: Telemetry = init_telemetry("router", "router-0", self.config)
        self.router = Router(
            self.config,
            {"sim": self.codec},
            self.telemetry,
            lambda: self.policy,
            lambda: PREFIX_KEY,
            self.router_key.key,
        )
        self._server = self.router.services.new_server(self.config)
        self.internal_endpoint = await self._server.start()
        self.endpoint = self._server.client_endpoint
        self.channel = open_channel(self.endpoint)
        self.internal_channel = operator_channel(self.internal_endpoint)
        self.stub: Any = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.operator_stub: Any = inference_pb2_grpc.InferenceServiceStub(self.internal_channel)
        return self

    async def add_decode(
        self, script: Script, hashing: worker_pb2.KvHashing | None = None
    ) -> FakeDecode:
        name = f"d{len(self.decodes)}"
        # A router calls no other RPC.
        worker = FakeDecode(name, self.handoff, script, self.read_tokens)  # type: ignore[abstract]
        await worker.start()
        worker.hashing = hashing
        self.decodes.append(worker)
        self.refresh()

        def reported() -> bool:
            table = self.router.workers.table("sim")
            ref = WorkerRef(worker.member.worker_id, worker.member.incarnation)
            return bool((table.reachable & table.flags({ref})).any())

        await until(reported)
        return worker

    async def add_decodes(self, *scripts: Script) -> list[FakeDecode]:
        """Adds decode workers that report increasing loads: placement prefers the first of them."""
        workers = [await self.add_decode(script) for script in scripts]
        for load, worker in enumerate(workers):
            worker.running_requests = load
        await self.loads_known()
        return workers

    async def loads_known(self) -> None:
        """Waits until the router has the current load of every decode worker."""
        loads = {worker.member.worker_id: worker.running_requests for worker in self.decodes}

        def known() -> bool:
            table = self.router.workers.table("sim")
            rows = zip(table.workers, table.requests, table.reachable, strict=True)
            return loads == {
                worker.ref.worker_id: int(requests)
                for worker, requests, reachable in rows
                if reachable
            }

        await until(known)

    def refresh(self) -> None:
        self.router.update([worker.member for worker in self.decodes])

    async def add_prefill(
        self, behaviour: Behaviour, credit: int = 4, *adapters: adapter_pb2.Adapter
    ) -> FakePrefill:
        worker = FakePrefill(f"p{len(self.prefills)}", self.handoff, behaviour, *adapters)
        await worker.start(self.internal_endpoint, credit)
        self.prefills.append(worker)
        await until(lambda: worker.worker_id in self.pulling())
        return worker

    def pulling(self) -> set[str]:
        """Ids of the prefill workers to which the queue may send tasks."""
        return {
            ref.worker_id for refs in self.router.queue.workers.pulling().values() for ref in refs
        }

    async def ask(
        self, text: str = "a prompt", timeout_s: float = 30.0, key: str = "", **fields: Any
    ) -> list[inference_pb2.GenerateResponse]:
        """Every message of the response. Raises the HeadraceError that a client library would rebuild."""
        request = inference_pb2.GenerateRequest(text=text, **fields)
        metadata = (("x-api-key", key),) if key else ()
        call = self.stub.Generate(request, timeout=timeout_s, metadata=metadata)
        try:
            return [response async for response in call]
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        finally:
            call.cancel()

    async def text(self, text: str = "a prompt", **fields: Any) -> str:
        """The text of the response."""
        return text_of(await self.ask(text, **fields))

    async def post(
        self, body: dict[str, Any], key: str = ""
    ) -> tuple[int, httpx.Headers, dict[str, Any]]:
        """Status, headers and body of a completion over HTTP."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with self.http() as client:
            answer = await client.post("/v1/completions", json=body, headers=headers)
        return answer.status_code, answer.headers, answer.json()

    def http(self, library: Any = httpx) -> Any:
        """A client of the HTTP API, without a port. `library` may be httpx2 too."""

        async def answer(request: Any) -> Any:
            fields = {"path": request.url.path, "method": request.method, **request.headers}
            asked = Request(request.content, **fields)
            await self.router.openai(asked.exchange)
            reply = asked.reply()
            return library.Response(reply.status, headers=reply.headers, content=reply.body)

        transport = library.MockTransport(answer)
        return library.AsyncClient(transport=transport, base_url="http://router")

    def http_server(self) -> HttpServer:
        """A server of the HTTP API at `http_listen`."""
        return HttpServer(
            self.router.openai,
            (config := self.config).http_listen,
            setting="http_listen",
            tls=config.listen_tls,
            bounds=HttpBounds(config.connections_max()),
        )

    async def error_of(self, **fields: Any) -> HeadraceError:
        """The error of a request that must fail."""
        with pytest.raises(HeadraceError) as caught:
            await self.ask(**fields)
        return caught.value

    async def route(self, **fields: Any) -> inference_pb2.RouteResponse:
        """The explanation of where a prompt would go, for an operator. Raises HeadraceError."""
        request = inference_pb2.GenerateRequest(**{"text": "a prompt", **fields})
        try:
            response: inference_pb2.RouteResponse = await self.operator_stub.Route(
                inference_pb2.RouteRequest(request=request), timeout=60
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        return response

    async def models(self) -> inference_pb2.ListModelsResponse:
        """The models that the router lists."""
        listed: inference_pb2.ListModelsResponse = await self.stub.ListModels(
            inference_pb2.ListModelsRequest(), timeout=5
        )
        return listed

    async def trace_of(self, name: str) -> trace_pb2.Trace:
        """The trace of a request that has ended, with all spans of the router."""
        await asyncio.to_thread(self.telemetry.force_flush)
        return self.router.traces.get(name)

    async def root_of(self, name: str) -> Mapping[str, str]:
        """The attributes of the root span of a request that has ended."""
        spans = (await self.trace_of(name)).spans
        (root,) = [span for span in spans if span.name == schema.SPAN_REQUEST]
        return root.attributes

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self.prefills))
        await self.channel.close()
        await self.internal_channel.close()
        await self._server.stop(0)
        await self.router.close()
        for worker in self.decodes:
            await asyncio.gather(*worker.background)
            await worker.kill()
        await asyncio.to_thread(self.telemetry.shutdown)
        self._counting.stop()
        self._folder.cleanup()


def with_settings(**settings: Any) -> pytest.MarkDecorator:
    """Starts the fixture `rig` with these settings."""
    return pytest.mark.parametrize("rig", [settings], indirect=True, ids=[""])


def text_of(responses: list[inference_pb2.GenerateResponse]) -> str:
    return "".join(response.text for response in responses)
