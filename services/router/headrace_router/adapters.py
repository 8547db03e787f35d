"""Loads and unloads LoRA adapters on all live workers of a model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import grpc.aio
from pydantic import BaseModel, ValidationError

from headrace.inference.v1 import adapter_pb2, adapter_service_pb2, adapter_service_pb2_grpc
from headrace.inference.v1.adapter_service_pb2 import LoadAdapterRequest
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_common.errors import (
    DeadlineExceeded,
    HeadraceError,
    InvalidRequest,
    NoDecodeWorker,
    NotFound,
    WorkerGone,
)
from headrace_common.limits import ADAPTER_CHANGE_S
from headrace_common.registry.adapters import (
    ADAPTER_NAME_CHARACTERS_MAX,
    ADAPTER_PATH_BYTES_MAX,
    adapter_from_proto,
    is_adapter_name,
)
from headrace_common.registry.duties import WORKERS
from headrace_common.rpc.status import error_from_rpc
from headrace_frontend.openai.errors import invalid_body
from headrace_kv.layout import WorkerRef
from headrace_router.workers.table import LoadTable

_LOG = logging.getLogger(__name__)
# A worker that starts meanwhile is asked too. Each round finds those of the round before.
_ROUNDS_MAX: Final = 8
_PLACED_POLLS_MAX: Final = 500
_PLACED_POLL_S: Final = 0.01
_UNDO_S: Final = 35.0
"""For a worker to register again. It has 30 s."""

ListMembers: TypeAlias = Callable[[], Awaitable[Collection[registry_pb2.Member]]]
"""Returns the members that the registry has at this moment. Raises RegistryUnavailable."""


async def no_registry() -> Collection[registry_pb2.Member]:
    """The members for a router without a registry: none."""
    return ()


@dataclass(frozen=True, slots=True)
class AdapterChanges:
    """Changes the adapters of workers, on all live workers of a model or on none."""

    list_members: ListMembers
    open_channel: Callable[[str], grpc.aio.Channel]
    models: Collection[str]
    table: Callable[[str], LoadTable]
    """The decode workers of a model, for which this router places requests."""

    async def apply(
        self, request: LoadAdapterRequest
    ) -> tuple[adapter_pb2.Adapter | None, Sequence[str]]:
        """The loaded adapter and the workers. A request without a path unloads, and has no adapter then.

        See adapter_service.proto for what this raises.
        """
        _check(request, self.models)
        model = request.model or self._only_model(request, await self.list_members())
        members = await self._workers(model)
        _check_names(request, members)
        change = worker_pb2.AdapterChange(
            name=request.lora_name,
            path=request.lora_path,
            is_3d_lora_weight=request.is_3d_lora_weight,
        )
        changes: dict[WorkerRef, _WorkerChange] = {}
        try:
            async with asyncio.timeout(ADAPTER_CHANGE_S):
                await self._change_all(model, members, change, changes)
        except TimeoutError:
            raise DeadlineExceeded(
                f"adapter {request.lora_name} was not changed within {ADAPTER_CHANGE_S:g} s",
                metadata={"lora_name": request.lora_name},
            ) from None
        finally:
            await asyncio.gather(*(one.close() for one in changes.values()))
        names = sorted(ref.worker_id for ref in changes)
        what = f"loaded from {request.lora_path}" if request.lora_path else "unloaded"
        _LOG.info("adapter %s of %s: %s on %s", request.lora_name, model, what, ", ".join(names))
        changed = next(iter(changes.values())).adapter
        wanted = None if changed is None else adapter_from_proto(changed)
        # The registry's news may arrive here after the answers of the workers.
        for _ in range(_PLACED_POLLS_MAX):
            if self.table(model).adapters.get(request.lora_name) == wanted:
                break
            await asyncio.sleep(_PLACED_POLL_S)
        return changed, names

    async def _change_all(
        self,
        model: str,
        members: Sequence[registry_pb2.Member],
        change: worker_pb2.AdapterChange,
        changes: dict[WorkerRef, _WorkerChange],
    ) -> None:
        """Adds each worker to `changes` before it is asked."""
        for _ in range(_ROUNDS_MAX):
            new = {
                ref: _WorkerChange(member, self.open_channel(member.endpoint), change)
                for member in members
                if (ref := WorkerRef(member.worker_id, member.incarnation)) not in changes
            }
            if not new:
                break
            changes.update(new)
            await _on_all(new.values(), _WorkerChange.prepare)
            _check_equal(changes)
            await _on_all(new.values(), _WorkerChange.announce)
            members = await self._workers(model)
        await _on_all(changes.values(), _WorkerChange.keep)

    async def _workers(self, model: str) -> Sequence[registry_pb2.Member]:
        members = await self.list_members()
        found = [one for one in members if one.role in WORKERS and one.model == model]
        if not found:
            raise NoDecodeWorker(
                f"no live worker serves {model}; start one", metadata={"model": model}
            )
        return found

    def _only_model(
        self, request: LoadAdapterRequest, members: Collection[registry_pb2.Member]
    ) -> str:
        """The model where the request names none. Raises InvalidRequest or NotFound."""
        models = set(self.models)
        if not request.lora_path:
            models = {
                member.model
                for member in members
                if any(adapter.name == request.lora_name for adapter in member.adapters)
            }
            if not models:
                raise _unknown(request.lora_name)
        if len(models) > 1:
            listed = ", ".join(sorted(models))
            raise InvalidRequest({"model": f"must be set, as several are served: {listed}"})
        return models.pop()


class _WorkerChange:
    """The change on one worker. `close` undoes it unless `keep` has returned."""

    def __init__(
        self,
        member: registry_pb2.Member,
        channel: grpc.aio.Channel,
        change: worker_pb2.AdapterChange,
    ) -> None:
        self.worker_id = member.worker_id
        self.adapter: adapter_pb2.Adapter | None = None
        """What the worker has loaded; None before `prepare`, and after unloading."""
        self._channel = channel
        self._change = worker_pb2.AdapterChange(incarnation=member.incarnation)
        self._change.MergeFrom(change)
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self._call: Any = stub.ChangeAdapter(timeout=ADAPTER_CHANGE_S)

    async def close(self) -> None:
        """Returns when the worker has undone what it does not keep, or cannot be reached."""
        with suppress(TimeoutError, asyncio.InvalidStateError, grpc.aio.UsageError):
            async with asyncio.timeout(_UNDO_S):
                await self._call.done_writing()
                await self._call.code()
        self._call.cancel()
        await self._channel.close()

    async def prepare(self) -> None:
        """Returns when the adapter is loaded."""
        answer = await self._step(worker_pb2.ChangeAdapterRequest(change=self._change))
        self.adapter = answer.adapter if answer.HasField("adapter") else None

    async def announce(self) -> None:
        """Returns when the registry has the change."""
        announce = worker_pb2.ChangeAdapterRequest.Announce()
        await self._step(worker_pb2.ChangeAdapterRequest(announce=announce))

    async def keep(self) -> None:
        """Makes the change last."""
        keep = worker_pb2.ChangeAdapterRequest.Keep()
        await self._step(worker_pb2.ChangeAdapterRequest(keep=keep), ends=True)

    async def _step(
        self, request: worker_pb2.ChangeAdapterRequest, *, ends: bool = False
    ) -> worker_pb2.ChangeAdapterResponse:
        """The worker's answer; an empty one to a step that ends the stream. Raises errors that name the worker."""
        try:
            # The answer of a call that has ended is its error.
            with suppress(asyncio.InvalidStateError, grpc.aio.UsageError):
                await self._call.write(request)
            answer = await self._call.read()
        except grpc.aio.AioRpcError as rpc_error:
            raise _named(error_from_rpc(rpc_error), self.worker_id) from rpc_error
        if isinstance(answer, worker_pb2.ChangeAdapterResponse):
            return answer
        if ends and await self._call.code() is grpc.StatusCode.OK:
            return worker_pb2.ChangeAdapterResponse()
        raise _named(WorkerGone("the stream has ended early"), self.worker_id)


async def _on_all(
    changes: Collection[_WorkerChange], step: Callable[[_WorkerChange], Awaitable[None]]
) -> None:
    """Takes a step on all workers at once. Raises the first error, after all have ended."""
    results = await asyncio.gather(*map(step, changes), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _named(error: HeadraceError, worker_id: str) -> HeadraceError:
    """The same error, which names the worker."""
    metadata = {**error.metadata, "worker_id": worker_id}
    if isinstance(error, InvalidRequest):
        return InvalidRequest(
            {
                _FIELDS.get(field, field): f"worker {worker_id}: {remedy}"
                for field, remedy in error.violations.items()
            }
        )
    return type(error)(f"worker {worker_id}: {error.detail}", metadata=metadata)


_FIELDS: Final[Mapping[str, str]] = {"name": "lora_name", "path": "lora_path"}
"""What the operator calls the fields of AdapterChange."""


def _check(request: LoadAdapterRequest, models: Collection[str]) -> None:
    """Raises InvalidRequest."""
    violations = {}
    if not is_adapter_name(request.lora_name):
        violations["lora_name"] = (
            f"give 1 to {ADAPTER_NAME_CHARACTERS_MAX} visible ASCII characters"
        )
    if len(request.lora_path.encode()) > ADAPTER_PATH_BYTES_MAX:
        violations["lora_path"] = f"give at most {ADAPTER_PATH_BYTES_MAX} bytes"
    if request.lora_path and request.lora_name in models:
        violations["lora_name"] = (
            f"The lora adapter '{request.lora_name}' conflicts with a served base model."
        )
    if request.model and request.model not in models:
        violations["model"] = f"is not served; use one of: {', '.join(sorted(models))}"
    if violations:
        raise InvalidRequest(violations)


def _check_names(request: LoadAdapterRequest, members: Sequence[registry_pb2.Member]) -> None:
    """Raises NotFound or InvalidRequest, with vLLM's words."""
    known = any(adapter.name == request.lora_name for one in members for adapter in one.adapters)
    if not request.lora_path and not known:
        raise _unknown(request.lora_name)
    if request.lora_path and known and not request.load_inplace:
        raise InvalidRequest(
            {
                "lora_name": f"The lora adapter '{request.lora_name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True."
            }
        )


def _check_equal(changes: Mapping[WorkerRef, _WorkerChange]) -> None:
    """Raises InvalidRequest when workers have read different adapters."""
    digests = {
        one.worker_id: "" if one.adapter is None else one.adapter.digest for one in changes.values()
    }
    if len(set(digests.values())) > 1:
        first, *others = sorted(digests)
        other = next(name for name in others if digests[name] != digests[first])
        raise InvalidRequest(
            {"lora_path": f"has another adapter on worker {other} than on {first}: copy it again"}
        )


def _unknown(name: str) -> NotFound:
    return NotFound(f"The lora adapter '{name}' cannot be found.", metadata={"lora_name": name})


LOAD_PATH: Final = "/v1/load_lora_adapter"
UNLOAD_PATH: Final = "/v1/unload_lora_adapter"
BODY_BYTES_MAX: Final = 16_384


class AdapterServicer(adapter_service_pb2_grpc.AdapterServiceServicer):
    """Serves operators."""

    def __init__(self, changes: AdapterChanges) -> None:
        self._changes = changes

    async def LoadAdapter(
        self,
        request: LoadAdapterRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> adapter_service_pb2.LoadAdapterResponse:
        """See adapter_service.proto."""
        if not request.lora_path:
            raise InvalidRequest({"lora_path": "must not be empty"})
        adapter, worker_ids = await self._changes.apply(request)
        return adapter_service_pb2.LoadAdapterResponse(adapter=adapter, worker_ids=worker_ids)

    async def UnloadAdapter(
        self,
        request: adapter_service_pb2.UnloadAdapterRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> adapter_service_pb2.UnloadAdapterResponse:
        """See adapter_service.proto."""
        _, worker_ids = await self._changes.apply(
            LoadAdapterRequest(lora_name=request.lora_name, model=request.model)
        )
        return adapter_service_pb2.UnloadAdapterResponse(worker_ids=worker_ids)


class _UnloadBody(BaseModel):
    lora_name: str
    model: str = ""


class _LoadBody(_UnloadBody):
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


async def answer_http(changes: AdapterChanges, path: str, content: bytes) -> bytes:
    """The text with which vLLM answers. `path` is LOAD_PATH or UNLOAD_PATH. Raises as AdapterChanges.apply does."""
    try:
        if path == LOAD_PATH:
            body: _UnloadBody = _LoadBody.model_validate_json(content)
            needed, done = "Both 'lora_name' and 'lora_path' must be provided.", "added"
        else:
            body = _UnloadBody.model_validate_json(content)
            needed, done = "'lora_name' needs to be provided to unload a LoRA adapter.", "removed"
    except ValidationError as error:
        raise invalid_body(error) from error
    request = LoadAdapterRequest(**body.model_dump())
    if not request.lora_name or (path == LOAD_PATH and not request.lora_path):
        raise InvalidRequest({"lora_path" if request.lora_name else "lora_name": needed})
    await changes.apply(request)
    return f"Success: LoRA adapter '{request.lora_name}' {done} successfully.".encode()
