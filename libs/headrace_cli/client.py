"""The RPCs of the services that the command line calls, and the wait for a deployment that is starting."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from contextvars import ContextVar
from typing import Annotated, Final, TypeVar

import grpc.aio

import headrace_client
from headrace.inference.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    load_pb2,
    load_pb2_grpc,
    trace_pb2,
    trace_pb2_grpc,
)
from headrace.planner.v1 import planner_pb2
from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_cli.output import notice_console, option
from headrace_cli.state import nothing_serves, read_state
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.deadlines import Deadline
from headrace_common.durations import timestamp_from_unix_ns
from headrace_common.errors import (
    ConfigError,
    DeadlineExceeded,
    HeadraceError,
    NoDecodeWorker,
    NotFound,
    WorkerGone,
)
from headrace_common.ports import split_host_port
from headrace_common.registry.duties import all_members
from headrace_common.reloading import read_text
from headrace_common.rpc.channel import open_channel
from headrace_planner.observation import WorkerCounts

_T = TypeVar("_T")

WAIT_S: Final = 10.0
_POLL_S: Final = 0.1
# To an address that neither accepts nor refuses. The call itself reports it.
_CONNECT_S: Final = 1.0
_waits_until: ContextVar[Deadline | None] = ContextVar("waits_until", default=None)


def _begin_wait(seconds: float) -> float:
    _waits_until.set(Deadline.after(seconds) if seconds else None)
    return seconds


Wait = Annotated[
    float,
    option(
        "Time that a deployment which is starting has until it can answer; 0 fails at once.",
        "--wait",
        metavar="SECONDS",
        min=0,
        callback=_begin_wait,
    ),
]
"""An option of every command that calls a service. It bounds all waits of the command together."""


async def wait_until_started(endpoint: str) -> None:
    """Returns when `endpoint` does not refuse connections. Raises WorkerGone when the command has waited in vain.

    A command without the option Wait does not wait.
    """

    async def connect() -> None:
        if await asyncio.to_thread(_refuses, endpoint):
            raise nothing_serves(endpoint)

    await once_possible(connect, WorkerGone, f"{endpoint} refuses connections")


async def once_possible(
    attempt: Callable[[], Awaitable[_T]], missing: type[HeadraceError], state: str = ""
) -> _T:
    """What `attempt` returns. It is repeated after an error `missing`, for as long as the command may wait.

    The notice of the wait names `state`, or else the error.
    """
    deadline = _waits_until.get()
    has_noted = False
    while True:
        try:
            return await attempt()
        except missing as error:
            if deadline is None or deadline.expired:
                raise
            if not has_noted:
                has_noted = True
                notice_console().print(
                    f"headrace: {state or error.detail}; waiting up to {deadline.remaining_s():.0f} s for it to start",
                    markup=False,
                )
        await asyncio.sleep(min(_POLL_S, deadline.remaining_s()))


def _refuses(endpoint: str) -> bool:
    host, port = split_host_port(endpoint)
    try:
        socket.create_connection((host.strip("[]"), port), _CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


CALL_TIMEOUT_S = 5.0
TRACE_POLL_S = 0.1
API_KEY_VARIABLE = "HEADRACE_API_KEY"
API_KEY_FILE_VARIABLE = "HEADRACE_API_KEY_FILE"
# The remedy follows from the message: headrace_cli.output.
_HINT = ""


def rpc_errors(what: str) -> AbstractContextManager[None]:
    """Converts a failed RPC to a HeadraceError, with a remedy when `what` cannot be reached."""
    return headrace_client.rpc_errors(what, _HINT)


def call_channel(endpoint: str) -> grpc.aio.Channel:
    """Opens a channel to a service, as an operator. The environment names certificates and token."""
    return open_channel(endpoint, Credentials.from_environment(Role.OPERATOR))


@asynccontextmanager
async def started_channel(endpoint: str) -> AsyncIterator[grpc.aio.Channel]:
    """As call_channel, to a service that may be starting."""
    await wait_until_started(endpoint)
    async with call_channel(endpoint) as channel:
        yield channel


def read_api_key() -> str:
    """The key in the environment, or in the file that it names, for routers that require one. Raises ConfigError."""
    key, path = os.environ.get(API_KEY_VARIABLE, ""), os.environ.get(API_KEY_FILE_VARIABLE, "")
    if key and path:
        raise ConfigError(
            f"{API_KEY_VARIABLE} and {API_KEY_FILE_VARIABLE} are both set: unset one of them"
        )
    if not path:
        return key.strip()
    words = read_text(API_KEY_FILE_VARIABLE, path).split()
    if len(words) != 1:
        raise ConfigError(
            f"{API_KEY_FILE_VARIABLE} names {path}, which has {len(words)} words: name a file with one API key and "
            "nothing else, such as the output of `headrace keys create`"
        )
    return words[0]


class RouterClient:
    """Calls one router: its client listener, or its internal one, which alone explains and has traces."""

    def __init__(self, endpoint: str, channel: grpc.aio.Channel, api_key: str = "") -> None:
        self.endpoint = endpoint
        self._client = headrace_client.Client(channel, api_key=api_key, hint=_HINT, name=endpoint)
        self._inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self._load = load_pb2_grpc.LoadServiceStub(channel)
        self._traces = trace_pb2_grpc.TraceServiceStub(channel)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()

    async def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Streams the answer. Retries when the router rejects the request with a retry delay.

        Waits for the first decode worker as `once_possible` does.
        """

        async def begin() -> tuple[
            AsyncIterator[inference_pb2.GenerateResponse], inference_pb2.GenerateResponse | None
        ]:
            responses = self._client.stream(request, timeout_s)
            return responses, await anext(responses, None)

        responses, first = await once_possible(begin, NoDecodeWorker)
        if first is not None:
            yield first
        async for response in responses:
            yield response

    async def listing(self) -> inference_pb2.ListModelsResponse:
        """The models served, the addresses of the registry and of the status page, and the prefix key's fingerprint."""
        with rpc_errors(f"the router on {self.endpoint}"):
            return await self._inference.ListModels(
                inference_pb2.ListModelsRequest(), timeout=CALL_TIMEOUT_S, metadata=self._metadata
            )

    async def explain(self, request: inference_pb2.GenerateRequest) -> inference_pb2.RouteResponse:
        """Where the prompt would be routed now, with all candidates."""
        return await once_possible(
            lambda: self._client.route(request, CALL_TIMEOUT_S), NoDecodeWorker
        )

    async def trace(self, trace_id: str, wait_s: float) -> trace_pb2.Trace:
        """The trace, after a wait of up to `wait_s` for its last spans. Raises NotFound."""
        deadline = Deadline.after(wait_s)
        found: trace_pb2.Trace | None = None
        while True:
            try:
                with rpc_errors(f"the router on {self.endpoint}"):
                    response = await self._traces.GetTrace(
                        trace_pb2.GetTraceRequest(id=trace_id), timeout=CALL_TIMEOUT_S
                    )
                found = response.trace
            except NotFound:
                if deadline.expired:
                    raise
            if found is not None and (found.complete or deadline.expired):
                return found
            await asyncio.sleep(TRACE_POLL_S)

    async def load(self, seconds: float) -> AsyncIterator[load_pb2.RecordLoadResponse]:
        """Records of the requests that arrive and end within so many seconds."""
        try:
            with rpc_errors(f"the router on {self.endpoint}"):
                async for record in self._load.RecordLoad(
                    load_pb2.RecordLoadRequest(), timeout=seconds
                ):
                    yield record
        except DeadlineExceeded:
            return

    async def usages(self, since_unix_ns: int) -> Sequence[load_pb2.HourlyUsage]:
        """What requests have cost in the hours that end after this time."""
        request = load_pb2.GetLoadRequest(usage_since_time=timestamp_from_unix_ns(since_unix_ns))
        with rpc_errors(f"the router on {self.endpoint}"):
            return (await self._load.GetLoad(request, timeout=CALL_TIMEOUT_S)).usages

    async def traces(self, count: int) -> list[trace_pb2.Trace]:
        """The newest traces, without their spans."""
        with rpc_errors(f"the router on {self.endpoint}"):
            response = await self._traces.ListTraces(
                trace_pb2.ListTracesRequest(page_size=count), timeout=CALL_TIMEOUT_S
            )
        return list(response.traces)


@asynccontextmanager
async def open_router(endpoint: str) -> AsyncIterator[RouterClient]:
    """Opens a client of the router with its client listener at "host:port"."""
    api_key = read_api_key()
    async with started_channel(endpoint) as channel:
        yield RouterClient(endpoint, channel, api_key)


@asynccontextmanager
async def open_router_internally(endpoint: str) -> AsyncIterator[RouterClient]:
    """As open_router, for the internal listener."""
    api_key = read_api_key()
    async with call_channel(endpoint) as channel:
        yield RouterClient(endpoint, channel, api_key)


async def registry_of(router: str, registry: str = "") -> str:
    """`registry`, or else that of `headrace up` on this machine, or else what the router names. Raises NotFound."""
    if registry:
        return registry
    state = read_state(router)
    if state is not None:
        return state.registry
    async with open_router(router) as client:
        found = (await client.listing()).registry_endpoint
    if not found:
        raise NotFound(
            f"the router on {router} names no registry, as earlier releases: name it with --registry HOST:PORT",
            metadata={"router": router},
        )
    return found


async def list_members(registry: str) -> list[registry_pb2.Member]:
    """The registered members, by worker id."""
    async with started_channel(registry) as channel:
        with rpc_errors(f"the registry on {registry}"):
            return await all_members(registry_pb2_grpc.RegistryServiceStub(channel), CALL_TIMEOUT_S)


async def read_policy(registry: str) -> registry_pb2.GetPolicyResponse:
    """The policy in force and its revision."""
    async with started_channel(registry) as channel:
        return await policy_by(registry_pb2_grpc.RegistryServiceStub(channel), registry)


async def policy_by(
    stub: registry_pb2_grpc.RegistryServiceAsyncStub, registry: str
) -> registry_pb2.GetPolicyResponse:
    """As read_policy, over an open channel."""
    with rpc_errors(f"the registry on {registry}"):
        return await stub.GetPolicy(registry_pb2.GetPolicyRequest(), timeout=CALL_TIMEOUT_S)


async def worker_status(
    endpoint: str, credentials: Credentials | None = None
) -> worker_pb2.WatchStatusResponse:
    """The state of a worker, by `credentials` or those of `call_channel`. Raises WorkerGone when it sends none."""
    channel = call_channel(endpoint) if credentials is None else open_channel(endpoint, credentials)
    async with channel:
        with rpc_errors(f"the worker on {endpoint}"):
            call = worker_pb2_grpc.WorkerServiceStub(channel).WatchStatus(
                worker_pb2.WatchStatusRequest(), timeout=CALL_TIMEOUT_S
            )
            async for status in call:
                call.cancel()
                return status
    raise WorkerGone(f"the worker on {endpoint} sent no status")


async def reset_prefix_cache(endpoint: str, timeout_s: float) -> None:
    """Empties a worker's prefix cache, as soon as no request uses it."""
    async with call_channel(endpoint) as channel:
        with rpc_errors(f"the worker on {endpoint}"):
            await worker_pb2_grpc.WorkerServiceStub(channel).ResetPrefixCache(
                worker_pb2.ResetPrefixCacheRequest(), timeout=timeout_s
            )


def counts_from_proto(counts: planner_pb2.WorkerCounts) -> WorkerCounts:
    """Numbers of workers."""
    return WorkerCounts(counts.prefill, counts.decode, counts.both)
