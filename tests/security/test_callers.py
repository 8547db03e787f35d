"""The bounds on one caller count gRPC and HTTP together, and another caller is served."""

from __future__ import annotations

from pathlib import Path

import grpc.aio
import openai
import pytest

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_common.errors import HeadraceError, InvalidRequest, QueueFull
from headrace_common.rpc.status import error_from_rpc
from tests.ports import free_port
from tests.suite.deployment import DEADLINE_S, Suite, suite

_KEYS = {"attacker": "the-key-of-the-attacker", "bystander": "the-key-of-the-bystander"}
_TRIES = 12


async def rejected(it: Suite) -> HeadraceError:
    """The error of an invalid request of the attacker over gRPC."""
    stub = inference_pb2_grpc.InferenceServiceStub(it.channel)
    metadata = (("x-api-key", _KEYS["attacker"]),)
    call = stub.Generate(inference_pb2.GenerateRequest(), metadata=metadata, timeout=DEADLINE_S)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return error_from_rpc(caught.value)


async def http_status(client: openai.AsyncOpenAI) -> int:
    """The status of an invalid request."""
    with pytest.raises(openai.APIStatusError) as caught:
        await client.completions.create(model="sim", prompt="", max_tokens=1)
    return caught.value.status_code


async def test_rejected_requests_of_a_tenant_are_bounded_on_both_listeners(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{key} {tenant}\n" for tenant, key in _KEYS.items()))
    listen = f"127.0.0.1:{free_port()}"
    settings = (
        ("router", "http_listen", listen),
        ("router", "api_keys_file", str(keys)),
        ("router", "max_rejected_per_s", "2"),
    )
    async with (
        suite(tmp_path, settings=settings) as it,
        openai.AsyncOpenAI(
            base_url=f"http://{listen}/v1",
            api_key=_KEYS["attacker"],
            max_retries=0,
            timeout=DEADLINE_S,
        ) as client,
    ):
        errors = [await rejected(it) for _ in range(_TRIES)]
        assert {type(error) for error in errors} == {InvalidRequest, QueueFull}
        # All refused ones have waited, so some requests are processed again.
        statuses = {await http_status(client) for _ in range(_TRIES)}
        assert statuses == {400, 429}
        bystander = client.with_options(api_key=_KEYS["bystander"])
        answer = await bystander.completions.create(model="sim", prompt="hi", max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2
