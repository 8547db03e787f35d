"""Our connector in stock vLLM servers, without our services."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.ports import free_port
from tests.vllm.pair import prompt_of
from tests.vllm.stock import (
    BLOCK_TOKENS,
    MODEL,
    Reply,
    Server,
    Wanted,
    call,
    complete,
    completion,
    connector,
    pairing,
    serving,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(480),
    pytest.mark.skipif(not MODEL.is_dir(), reason="the model is not there: make model"),
]

QUICK = {
    "lease_ttl_s": 1.0,
    "quarantine_s": 2.0,
    "transfer_timeout_s": 20.0,
    "kv_hold_timeout_s": 3.0,
}
LAYER_COUNT = 4
TOKEN_BYTES = 2 * 4 * 32 * 4
LENGTHS = (2, 33, 300, 700)


def payload_bytes(tokens: int) -> int:
    """Bytes of the whole blocks that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS * TOKEN_BYTES * LAYER_COUNT


def with_host_tier(headrace: dict[str, Any]) -> dict[str, Any]:
    """Joins the connector with vLLM's host offloading."""
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 64 * 2**20,
            "spec_name": "HostOffloadingSpec",
            "spec_module_path": "tests.vllm.host_offload",
        },
    }
    policy = headrace.pop("kv_load_failure_policy")
    return {
        "kv_connector": "HeadraceOffloadingConnector",
        "kv_connector_module_path": "headrace_engine.vllm.offload_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"connectors": [headrace, offloading]},
    }


@dataclass(frozen=True, slots=True)
class Stock:
    """Two servers, a proxy, and the answers of a server without a connector."""

    first: Server
    second: Server
    proxy_port: int
    plain: dict[tuple[int, ...], list[int]]

    def expected(self, prompt: list[int]) -> list[int]:
        return self.plain[tuple(prompt)]

    async def through_proxy(self, prompt: list[int]) -> Reply:
        return await complete(self.proxy_port, prompt)

    async def at_once(self, prompt: list[int], source: Server, target: Server) -> Reply:
        """Both requests, as the proxy sends them."""
        sends, fetches = params_of(source)
        _, reply = await asyncio.gather(
            source.generate(prompt, sends, 1), target.generate(prompt, fetches)
        )
        return reply

    async def one_by_one(self, prompt: list[int], source: Server, target: Server) -> Reply:
        """One request after the other, as proxies for vLLM's NixlConnector send them."""
        computed = await source.generate(prompt, {"do_remote_decode": True}, 1)
        return await target.generate(prompt, computed.transfer)

    async def forget(self) -> None:
        await self.first.forget()
        await self.second.forget()


def params_of(source: Server, **more: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """kv_transfer_params of the two requests."""
    common = {"transfer_id": uuid.uuid4().hex, **more}
    place = {"remote_host": "127.0.0.1", "remote_port": source.pair_port}
    return {"do_remote_decode": True} | common, {"do_remote_prefill": True} | common | place


PROMPTS = [prompt_of(length, seed) for length in LENGTHS for seed in (1, 2, 3)]
HOST_PROMPT = prompt_of(321, 4)
KILL_PROMPTS = [prompt_of(900, 5), prompt_of(500, 6)]
ODD_PROMPTS = [prompt_of(200, seed) for seed in range(10, 20)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stock(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stock]:
    folder = tmp_path_factory.mktemp("stock")
    plain: dict[tuple[int, ...], list[int]] = {}
    async with serving(folder, Wanted("plain")) as (server,):
        for prompt in [*PROMPTS, HOST_PROMPT, *KILL_PROMPTS, *ODD_PROMPTS]:
            plain[tuple(prompt)] = (await server.generate(prompt)).token_ids
    ports = (free_port(), free_port())
    configs = (
        connector("kv_both", ports[0], **QUICK),
        with_host_tier(connector("kv_both", ports[1], **QUICK)),
    )
    wanted = (
        Wanted("first", configs[0], ports[0], ahead=True),
        Wanted("second", configs[1], ports[1], ahead=True),
    )
    async with (
        serving(folder, *wanted) as (first, second),
        pairing(folder, first, second) as proxy_port,
    ):
        yield Stock(first, second, proxy_port, plain)


@pytest.mark.parametrize("length", LENGTHS)
async def test_answers_through_the_proxy_are_those_of_a_plain_server(
    stock: Stock, length: int
) -> None:
    prompt = prompt_of(length, 1)
    reply = await stock.through_proxy(prompt)
    assert reply.token_ids == stock.expected(prompt)
    assert reply.transfer["transferred_tokens"] == length - 1
    assert reply.transfer["payload_bytes"] == payload_bytes(length - 1)
    await stock.first.idle()
    await stock.second.idle()


@pytest.mark.parametrize("length", LENGTHS)
async def test_either_server_sends_to_the_other(stock: Stock, length: int) -> None:
    prompts = [prompt_of(length, 2), prompt_of(length, 3)]
    there, back = await asyncio.gather(
        stock.at_once(prompts[0], stock.first, stock.second),
        stock.at_once(prompts[1], stock.second, stock.first),
    )
    for prompt, reply in zip(prompts, (there, back), strict=True):
        assert reply.token_ids == stock.expected(prompt)
        assert reply.transfer["transferred_tokens"] == length - 1


async def test_a_prompt_can_be_fetched_after_it_was_computed(stock: Stock) -> None:
    for source, target, prompt in (
        (stock.first, stock.second, ODD_PROMPTS[0]),
        (stock.second, stock.first, ODD_PROMPTS[1]),
    ):
        reply = await stock.one_by_one(prompt, source, target)
        assert reply.token_ids == stock.expected(prompt)
        assert reply.transfer["transferred_tokens"] == len(prompt) - 1
        await source.idle()


async def test_a_held_prompt_that_is_not_fetched_is_freed(stock: Stock) -> None:
    prompt = ODD_PROMPTS[2]
    held = (await stock.first.generate(prompt, {"do_remote_decode": True}, 1)).transfer
    assert await stock.first.metric("kv_cache_usage_perc") > 0
    await stock.first.idle(timeout_s=QUICK["kv_hold_timeout_s"] + 10)
    late = await stock.second.generate(prompt, held)
    assert late.token_ids == stock.expected(prompt)
    assert late.transfer["transferred_tokens"] == 0


async def test_hits_on_the_device_and_on_the_host_are_not_transferred_again(stock: Stock) -> None:
    prompt = HOST_PROMPT
    whole = BLOCK_TOKENS * (len(prompt) // BLOCK_TOKENS)
    first = await stock.through_proxy(prompt)
    assert first.transfer["transferred_tokens"] == len(prompt) - 1
    again = await stock.through_proxy(prompt)
    assert again.transfer["transferred_tokens"] == len(prompt) - 1 - whole
    assert again.transfer["payload_bytes"] == payload_bytes(len(prompt) - 1 - whole)
    await stock.forget()
    hits = await stock.second.metric("external_prefix_cache_hits_total")
    from_host = await stock.through_proxy(prompt)
    assert from_host.transfer["transferred_tokens"] == 0
    assert from_host.transfer["payload_bytes"] == 0
    assert await stock.second.metric("external_prefix_cache_hits_total") == hits + whole
    for reply in (first, again, from_host):
        assert reply.token_ids == stock.expected(prompt)


async def test_what_follows_a_hit_on_the_host_is_transferred(stock: Stock) -> None:
    prompt, cached = ODD_PROMPTS[5], 3 * BLOCK_TOKENS
    await stock.second.generate(prompt[: cached + 1])
    await stock.forget()
    reply = await stock.through_proxy(prompt)
    assert reply.token_ids == stock.expected(prompt)
    assert reply.transfer["transferred_tokens"] == len(prompt) - 1 - cached


async def test_wrong_parameters_do_not_end_the_engine(stock: Stock) -> None:
    prompt = ODD_PROMPTS[6]
    _, good = params_of(stock.first)
    wrong: list[dict[str, Any]] = [
        good | {"remote_port": "no"},
        good | {"remote_port": 70_000},
        good | {"transfer_id": ["x"]},
        good | {"transfer_id": "x" * 5000},
        good | {"do_remote_decode": True},
        good | {"deadline_unix_s": "soon"},
        good | {"deadline_unix_s": 0},
        {"do_remote_prefill": True},
        {"do_remote_decode": True, "transfer_id": 7},
        {"headrace": {"surprise": 1}},
    ]
    for params in wrong:
        reply = await stock.second.generate(prompt, params)
        assert reply.token_ids == stock.expected(prompt), params
    body = completion(prompt, None, 8) | {"vllm_xargs": {"headrace_generated": [10**9]}}
    assert (await call(stock.second.port, "POST", "/v1/completions", body))[0] == 200
    # A port without a server.
    reply = await stock.second.generate(prompt, params_of(stock.first)[1] | {"remote_port": 9})
    assert reply.token_ids == stock.expected(prompt)


async def test_ranks_that_report_wrong_ids_end_no_engine(stock: Stock) -> None:
    """They do so in each step of every test here."""
    reply = await stock.through_proxy(ODD_PROMPTS[7])
    assert reply.token_ids == stock.expected(ODD_PROMPTS[7])
    for server in (stock.first, stock.second):
        assert "the end of transfers that vLLM does not await" in server.log.read_text()


async def test_a_closed_connection_frees_all_blocks(stock: Stock) -> None:
    for delay_s in (0.0, 0.02, 0.1):
        request = asyncio.create_task(
            call(
                stock.proxy_port,
                "POST",
                "/v1/completions",
                completion(prompt_of(900, int(1000 * delay_s) + 30), None, 100),
            )
        )
        await asyncio.sleep(delay_s)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await stock.first.idle()
    await stock.second.idle()


async def test_several_prompts_at_once_and_other_paths_go_to_decode(stock: Stock) -> None:
    prompts = [ODD_PROMPTS[8], ODD_PROMPTS[9]]
    body = completion([], None, 8) | {"prompt": prompts}
    status, _ = await call(stock.proxy_port, "POST", "/v1/completions", body)
    assert status == 200
    status, models = await call(stock.proxy_port, "GET", "/v1/models")
    assert (status, b"tiny" in models) == (200, True)
    status, said = await call(stock.proxy_port, "POST", "/v1/completions", {"model": "tiny"})
    assert status == 400
    assert b"error" in said


async def test_answers_survive_a_killed_prefill_server(stock: Stock) -> None:
    """The last test: the first server is gone afterwards."""
    await stock.forget()
    sends, fetches = params_of(stock.first)
    sending = asyncio.create_task(stock.first.generate(KILL_PROMPTS[0], sends, 1))
    direct = asyncio.create_task(stock.second.generate(KILL_PROMPTS[0], fetches))
    await asyncio.sleep(0.08)
    stock.first.kill(signal.SIGSTOP)
    proxied = asyncio.create_task(stock.through_proxy(KILL_PROMPTS[1]))
    await asyncio.sleep(0.3)
    start_s = time.monotonic()
    stock.first.kill()
    assert (await proxied).token_ids == stock.expected(KILL_PROMPTS[1])
    assert (await direct).token_ids == stock.expected(KILL_PROMPTS[0])
    assert time.monotonic() - start_s < 15
    await asyncio.gather(sending, return_exceptions=True)
    await stock.second.idle()
    reply = await stock.through_proxy(ODD_PROMPTS[0])
    assert reply.token_ids == stock.expected(ODD_PROMPTS[0])
