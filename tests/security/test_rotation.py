"""Certificates and API keys are replaced while a deployment answers. No request fails."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_cli.up.supervisor import Child
from headrace_common.access.credentials import TlsFiles
from headrace_common.rpc.channel import open_channel
from tests.suite.certificates import Authority, presented_serial, serial_in
from tests.suite.deployment import default_model, greedy, prompt_of
from tests.suite.secured import deployed, joined
from tests.waiting import until

ANSWER_TOKENS = 6
STREAMS = 2
OLD, NEW = "the-old-key", "the-new-key"


async def answer(channel: grpc.aio.Channel, key: str, seed: int) -> None:
    """Raises AioRpcError when the request fails."""
    prompt = prompt_of(40, seed)
    request = greedy(prompt, ANSWER_TOKENS, inference_pb2.PREFILL_PLACEMENT_REMOTE)
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    call = stub.Generate(request, timeout=20, metadata=(("x-api-key", key),))
    tokens = [token async for response in call for token in response.token_ids]
    assert tuple(tokens) == default_model().expected_tokens(prompt, ANSWER_TOKENS)


class Load:
    """Requests without a pause, on a channel that stays open and on one for each request."""

    def __init__(self, endpoint: str, identity: TlsFiles) -> None:
        self.key = OLD
        self.answers = 0
        self._endpoint = endpoint
        self._identity = identity
        self._seeds: Iterator[int] = itertools.count()

    async def _ask_on_one_channel(self) -> None:
        async with open_channel(self._endpoint, self._identity) as channel:
            while True:
                await self._ask(channel)

    async def _ask_on_new_channels(self) -> None:
        while True:
            async with open_channel(self._endpoint, self._identity) as channel:
                await self._ask(channel)

    async def _ask(self, channel: grpc.aio.Channel) -> None:
        await answer(channel, self.key, next(self._seeds))
        self.answers += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Fails at the end when a request has failed."""
        loops = (self._ask_on_one_channel, self._ask_on_new_channels)
        tasks = [asyncio.create_task(loop()) for loop in loops for _ in range(STREAMS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            failures = [end for end in ends if not isinstance(end, asyncio.CancelledError)]
            assert failures == []

    async def answer_more(self) -> None:
        """Waits until requests that began after this call were answered."""
        wanted = self.answers + 4 * STREAMS
        await until(lambda: self.answers >= wanted, 20, "more answers")


async def rotate_certificates(
    children: dict[str, Child], authority: Authority, client: TlsFiles
) -> None:
    """Replaces every certificate, and waits until every service presents its new one."""
    authority.sign("client")
    for service, child in children.items():
        files = authority.sign(service, service)

        async def presented(child: Child = child, files: TlsFiles = files) -> bool:
            endpoints = filter(None, (child.endpoint, child.client_endpoint))
            serials = {await presented_serial(endpoint, client) for endpoint in endpoints}
            return serials == {serial_in(files)}

        await until(presented, 10, f"the new certificate of the {service}", 0.05)


def accepts(channel: grpc.aio.Channel, key: str) -> Callable[[], Awaitable[bool]]:
    """Whether the router knows a key."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)

    async def accepted() -> bool:
        request = greedy(prompt_of(8, 0), 1)
        try:
            async for _ in stub.Generate(request, timeout=20, metadata=(("x-api-key", key),)):
                pass
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                raise
            return False
        return True

    return accepted


async def test_certificates_and_keys_are_replaced_and_no_request_fails(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    keys = tmp_path / "keys"
    keys.write_text(f"{OLD} tenant\n")
    client = authority.sign("client")
    more = (("router", "api_keys_file", str(keys)),)
    async with (
        deployed(tmp_path, authority, more) as children,
        open_channel(children["router"].client_endpoint, client) as channel,
    ):
        await joined(channel, OLD)
        load = Load(children["router"].client_endpoint, client)
        async with load.running():
            await load.answer_more()
            for _ in range(2):
                await rotate_certificates(children, authority, client)
                await load.answer_more()
            await rotate_keys(children["router"], keys, channel, load)


async def rotate_keys(router: Child, keys: Path, channel: grpc.aio.Channel, load: Load) -> None:
    old, new = accepts(channel, OLD), accepts(channel, NEW)

    def replace(text: str) -> None:
        draft = keys.with_suffix(".draft")
        draft.write_text(text)
        draft.replace(keys)

    def logged() -> bool:
        return "the old content stays in force" in router.spec.log_file.read_text()

    replace(f"{OLD} tenant\n{NEW} tenant\n")
    await until(new, 10, "the new key", 0.05)
    load.key = NEW
    await load.answer_more()
    replace(f"{NEW} tenant\n")

    async def refused() -> bool:
        return not await old()

    await until(refused, 10, "the refusal of the old key", 0.05)
    replace(f"{NEW}\n")
    await until(logged, 10, "the error")
    await load.answer_more()
    assert NEW not in router.spec.log_file.read_text()
