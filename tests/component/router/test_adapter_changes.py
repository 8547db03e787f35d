"""A change of adapters reaches all workers, also those that start meanwhile, or lasts on none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.inference.v1 import adapter_pb2
from headrace.inference.v1.adapter_service_pb2 import LoadAdapterRequest
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_common.config import ServiceConfig
from headrace_common.errors import InvalidRequest, NoDecodeWorker, NotFound, RegistryUnavailable
from headrace_common.registry.adapters import Adapter
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.server import GrpcServer
from headrace_router.adapters import AdapterChanges

POET = LoadAdapterRequest(lora_name="poet", lora_path="/adapters/poet")
ROLES = registry_pb2.Member


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Records the steps of changes. `fails_at` names the step that it refuses."""

    def __init__(self, name: str, digest: str = "aa", fails_at: str = "") -> None:
        self.name = name
        self.steps: list[str] = []
        self.digest = digest
        self.fails_at = fails_at
        self.member = registry_pb2.Member(
            worker_id=name, incarnation="1", role=ROLES.ROLE_DECODE, model="m"
        )

    async def ChangeAdapter(
        self, request_iterator: AsyncIterator[worker_pb2.ChangeAdapterRequest], context: Any
    ) -> AsyncIterator[worker_pb2.ChangeAdapterResponse]:
        async for request in request_iterator:
            step = request.WhichOneof("step")
            assert step is not None
            self.steps.append(step)
            if step == self.fails_at:
                raise RegistryUnavailable("it is down")
            if step == "keep":
                return
            adapter = adapter_pb2.Adapter(name="poet", digest=self.digest)
            yield worker_pb2.ChangeAdapterResponse(adapter=adapter)
        self.steps.append("end")


@asynccontextmanager
async def changes_of(
    *workers: FakeWorker,
    listed: Callable[[int], Sequence[FakeWorker]] | None = None,
    placed: Callable[[], Mapping[str, Adapter]] = lambda: {"poet": Adapter("poet", "aa")},
) -> AsyncIterator[AdapterChanges]:
    """`listed` returns the workers that the registry has at the call of that number, else all."""
    calls = 0

    async def list_members() -> Sequence[registry_pb2.Member]:
        nonlocal calls
        calls += 1
        return [one.member for one in (workers if listed is None else listed(calls))]

    async with AsyncExitStack() as held:
        for worker in workers:
            server = GrpcServer(ServiceConfig(insecure=True), ("headrace.worker.v1.WorkerService",))
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server.server)
            worker.member.endpoint = await server.start()
            held.push_async_callback(server.stop, None)

        def table(model: str) -> Any:
            return SimpleNamespace(adapters=placed())

        yield AdapterChanges(list_members, open_channel, ("m", "other"), table)


def new_worker(name: str, **fields: str) -> FakeWorker:
    return FakeWorker(name, **fields)  # type: ignore[abstract]


async def test_a_worker_that_starts_meanwhile_is_asked_too() -> None:
    first, second = new_worker("first"), new_worker("second")
    request = LoadAdapterRequest(lora_name="poet", lora_path="/adapters/poet", model="m")
    async with changes_of(
        first, second, listed=lambda call: (first,) if call < 2 else (first, second)
    ) as changes:
        adapter, names = await changes.apply(request)
    assert adapter == adapter_pb2.Adapter(name="poet", digest="aa")
    assert names == ["first", "second"]
    assert first.steps == second.steps == ["change", "announce", "keep"]


async def test_the_answer_waits_until_this_router_places_requests_for_the_adapter() -> None:
    worker, asked = new_worker("first"), 0

    def placed() -> Mapping[str, Adapter]:
        nonlocal asked
        asked += 1
        return {"poet": Adapter("poet", "aa" if asked > 3 else "before")}

    request = LoadAdapterRequest(lora_name="poet", lora_path="/adapters/poet", model="m")
    async with changes_of(worker, placed=placed) as changes:
        await changes.apply(request)
    assert asked == 4


@pytest.mark.parametrize(
    ("fields", "message", "steps"),
    [
        ({"fails_at": "change"}, "worker second: it is down", ["change", "end"]),
        ({"fails_at": "announce"}, "worker second: it is down", ["change", "announce", "end"]),
        ({"digest": "bb"}, "another adapter on worker second than on first", ["change", "end"]),
    ],
)
async def test_what_fails_on_one_worker_lasts_on_none(
    fields: dict[str, str], message: str, steps: list[str]
) -> None:
    first, second = new_worker("first"), new_worker("second", **fields)
    request = LoadAdapterRequest(lora_name="poet", lora_path="/adapters/poet", model="m")
    async with changes_of(first, second) as changes:
        with pytest.raises((RegistryUnavailable, InvalidRequest), match=message) as caught:
            await changes.apply(request)
        assert "second" in str(caught.value.metadata)
    assert first.steps == steps


async def test_wrong_requests_reach_no_worker() -> None:
    worker = new_worker("first")
    async with changes_of(worker) as changes:
        for request, error, text in (
            (POET, InvalidRequest, "several are served: m, other"),
            (LoadAdapterRequest(lora_name="poet"), NotFound, "'poet' cannot be found"),
            (LoadAdapterRequest(lora_name="poet", model="m"), NotFound, "'poet' cannot be found"),
            (
                LoadAdapterRequest(lora_name="a b", lora_path="/x", model="m"),
                InvalidRequest,
                "lora_name",
            ),
            (
                LoadAdapterRequest(lora_name="m", lora_path="/x", model="m"),
                InvalidRequest,
                "served base model",
            ),
            (
                LoadAdapterRequest(lora_name="poet", lora_path="/" + 4096 * "x", model="m"),
                InvalidRequest,
                "lora_path",
            ),
            (
                LoadAdapterRequest(lora_name="poet", lora_path="/x", model="none"),
                InvalidRequest,
                "m, other",
            ),
            (
                LoadAdapterRequest(lora_name="poet", lora_path="/x", model="other"),
                NoDecodeWorker,
                "other",
            ),
        ):
            with pytest.raises(error, match=text):
                await changes.apply(request)
    assert worker.steps == []
