"""AdapterService, and the same over HTTP with vLLM's paths and bodies."""

from __future__ import annotations

from typing import Any, Final

import grpc.aio
from pydantic import BaseModel, ValidationError

from headrace.inference.v1 import adapter_service_pb2, adapter_service_pb2_grpc
from headrace_common.errors import InvalidRequest
from headrace_frontend.openai.errors import invalid_body
from headrace_router.adapters.changes import AdapterChanges, AdapterRequest

LOAD_PATH: Final = "/v1/load_lora_adapter"
UNLOAD_PATH: Final = "/v1/unload_lora_adapter"
BODY_BYTES_MAX: Final = 16_384


class AdapterServicer(adapter_service_pb2_grpc.AdapterServiceServicer):
    """Serves operators."""

    def __init__(self, changes: AdapterChanges) -> None:
        self._changes = changes

    async def LoadAdapter(
        self,
        request: adapter_service_pb2.LoadAdapterRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> adapter_service_pb2.LoadAdapterResponse:
        """See adapter_service.proto."""
        if not request.lora_path:
            raise InvalidRequest({"lora_path": "must not be empty"})
        adapter, worker_ids = await self._changes.apply(
            AdapterRequest(
                name=request.lora_name,
                path=request.lora_path,
                load_inplace=request.load_inplace,
                is_3d_lora_weight=request.is_3d_lora_weight,
                model=request.model,
            )
        )
        return adapter_service_pb2.LoadAdapterResponse(adapter=adapter, worker_ids=worker_ids)

    async def UnloadAdapter(
        self,
        request: adapter_service_pb2.UnloadAdapterRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> adapter_service_pb2.UnloadAdapterResponse:
        """See adapter_service.proto."""
        _, worker_ids = await self._changes.apply(
            AdapterRequest(name=request.lora_name, model=request.model)
        )
        return adapter_service_pb2.UnloadAdapterResponse(worker_ids=worker_ids)


class _LoadBody(BaseModel):
    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    model: str = ""


class _UnloadBody(BaseModel):
    lora_name: str
    model: str = ""


async def answer_http(changes: AdapterChanges, path: str, body: bytes) -> bytes:
    """The text with which vLLM answers. `path` is LOAD_PATH or UNLOAD_PATH. Raises as AdapterChanges.apply does."""
    try:
        if path == LOAD_PATH:
            load = _LoadBody.model_validate_json(body)
            if not load.lora_name or not load.lora_path:
                remedy = "Both 'lora_name' and 'lora_path' must be provided."
                raise InvalidRequest({"lora_path" if load.lora_name else "lora_name": remedy})
            request = AdapterRequest(
                name=load.lora_name,
                path=load.lora_path,
                load_inplace=load.load_inplace,
                is_3d_lora_weight=load.is_3d_lora_weight,
                model=load.model,
            )
            done = "added"
        else:
            unload = _UnloadBody.model_validate_json(body)
            request, done = AdapterRequest(name=unload.lora_name, model=unload.model), "removed"
            if not unload.lora_name:
                remedy = "'lora_name' needs to be provided to unload a LoRA adapter."
                raise InvalidRequest({"lora_name": remedy})
    except ValidationError as error:
        raise invalid_body(error) from error
    await changes.apply(request)
    return f"Success: LoRA adapter '{request.name}' {done} successfully.".encode()
