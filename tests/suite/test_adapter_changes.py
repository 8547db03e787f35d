"""LoRA adapters that operators load and unload while a deployment of processes runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from headrace.inference.v1 import adapter_service_pb2, adapter_service_pb2_grpc, inference_pb2
from headrace_cli.client import list_members
from headrace_common.access.roles import TOKEN_KEY, Role
from headrace_common.access.tokens import create_token, load_local_key
from headrace_common.errors import InvalidRequest
from headrace_common.registry.adapters import Adapter
from tests.ports import free_port
from tests.suite.deployment import Outcome, Suite, greedy, prompt_of, suite
from tests.waiting import until

COUNT = 6
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


def token_of(role: Role) -> str:
    return create_token(load_local_key(), role, "", 60)


@asynccontextmanager
async def changing(
    folder: Path, **topology: Any
) -> AsyncIterator[tuple[Suite, httpx.AsyncClient, Path]]:
    """A deployment, the operator's HTTP client, and the folder that workers load adapters from."""
    adapters = folder / "adapters"
    for name in ("poet", "coder"):
        write_adapter(adapters / name, name)
    page, listen = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    settings = [
        ("router", "status_listen", page),
        ("router", "http_listen", listen),
        *((role, "adapter_folders", str(adapters)) for role in ("prefill", "decode", "worker")),
    ]
    async with (
        suite(folder, settings=tuple(settings), **topology) as it,
        httpx.AsyncClient(
            base_url=f"http://{page}", headers={TOKEN_KEY: token_of(Role.OPERATOR)}, timeout=30
        ) as client,
    ):
        yield it, client, adapters


def write_adapter(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(text)


async def load(
    client: httpx.AsyncClient, name: str, path: Path, **fields: object
) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **fields}
    return await client.post(LOAD, json=body)


async def announced(it: Suite, name: str) -> dict[str, str]:
    """The digest of an adapter by worker, as the registry has it."""
    return {
        member.worker_id: adapter.digest
        for member in await list_members(it.deployment.registry)
        for adapter in member.adapters
        if adapter.name == name
    }


async def ask(it: Suite, seed: int, adapter: Adapter) -> Outcome:
    """A right answer."""
    prompt = prompt_of(90, seed)
    request = greedy(prompt, COUNT, REMOTE, "")
    request.model = adapter.name
    outcome = await it.ask(request)
    assert outcome.token_ids == it.model.expected_tokens(prompt, COUNT, adapter=adapter)
    return outcome


async def wait_served(it: Suite, adapter: Adapter, counts: tuple[int, int]) -> None:
    """Waits until the router has the change, with these numbers of prefill and decode workers."""

    async def answered() -> bool:
        models = (await it.operator.listing()).models
        found = [
            (one.prefill_worker_count, one.decode_worker_count) for one in models if one.parent
        ]
        if found != [counts]:
            return False
        try:
            await ask(it, 0, adapter)
        except (InvalidRequest, AssertionError):
            return False
        return True

    await until(answered)


async def test_an_adapter_is_loaded_replaced_and_unloaded_without_a_restart(tmp_path: Path) -> None:
    async with changing(tmp_path, prefill_count=2, decode_count=1, worker_count=1) as (
        it,
        client,
        folder,
    ):
        await only_the_role_operator_changes_adapters(client)
        with pytest.raises(InvalidRequest, match="'poet' is not served"):
            await ask(it, 0, Adapter("poet", ""))
        answer = await load(client, "poet", folder / "poet")
        assert (answer.status_code, answer.text) == (
            200,
            "Success: LoRA adapter 'poet' added successfully.",
        )
        found = await announced(it, "poet")
        assert set(found) == {"prefill-0", "prefill-1", "decode-0", "worker-0"}
        (digest,) = set(found.values())
        first = Adapter("poet", digest)
        await wait_served(it, first, (3, 2))
        timings = [(await ask(it, seed, first)).last.timing for seed in range(1, 5)]
        # Prompts go to workers that have it.
        assert all(timing.prefill_worker_id for timing in timings)
        # Again is an error, in place is none.
        again = await load(client, "poet", folder / "coder")
        assert again.status_code == 400
        assert "has already been loaded" in again.json()["error"]["message"]
        assert await announced(it, "poet") == found
        request = greedy(prompt_of(40, 9), 400, REMOTE, "")
        request.model = "poet"
        (running,) = await it.begun([request])
        # gRPC has the same.
        stub = adapter_service_pb2_grpc.AdapterServiceStub(it.internal_channel)
        in_place = adapter_service_pb2.LoadAdapterRequest(
            lora_name="poet", lora_path=str(folder / "coder"), load_inplace=True
        )
        assert list((await stub.LoadAdapter(in_place, timeout=20)).worker_ids) == sorted(found)
        (second,) = {Adapter("poet", one) for one in (await announced(it, "poet")).values()}
        assert second != first
        # A worker that starts later has it too.
        await it.add("decode-1", "decode-0")
        assert (await announced(it, "poet"))["decode-1"] == second.digest
        await wait_served(it, second, (3, 3))
        for seed in range(4):
            await ask(it, seed, second)
        answer = await client.post(UNLOAD, json={"lora_name": "poet"})
        assert (answer.status_code, answer.text) == (
            200,
            "Success: LoRA adapter 'poet' removed successfully.",
        )
        assert await announced(it, "poet") == {}

        async def unknown() -> bool:
            try:
                await ask(it, 0, second)
            except InvalidRequest as error:
                return "'poet' is not served" in error.detail
            return False

        await until(unknown)
        # The request that named the first one has kept it.
        tokens = (await running).token_ids
        assert tokens == it.model.expected_tokens(prompt_of(40, 9), 400, adapter=first)
        answer = await client.post(UNLOAD, json={"lora_name": "poet"})
        assert answer.status_code == 404
        assert "The lora adapter 'poet' cannot be found." in answer.json()["error"]["message"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.UnloadAdapter(
                adapter_service_pb2.UnloadAdapterRequest(lora_name="poet"), timeout=20
            )
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def only_the_role_operator_changes_adapters(client: httpx.AsyncClient) -> None:
    body = {"lora_name": "poet", "lora_path": "/x"}
    for path in (LOAD, UNLOAD):
        for token in ("", "x"):
            answer = await client.post(path, json=body, headers={TOKEN_KEY: token})
            assert answer.status_code == 401
        for role in Role:
            if role is not Role.OPERATOR:
                headers = {TOKEN_KEY: token_of(role)}
                answer = await client.post(path, json=body, headers=headers)
                assert answer.status_code == 403, role
        assert (await client.get(path)).status_code == 405
        assert (await client.post(path, content=b"{}")).status_code == 415
        assert (await client.post(path, json={})).status_code == 400
