"""Stored responses and conversations with OpenAI's client, on the router that has them and on another one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from headrace.decode.v1 import decode_pb2
from headrace.registry.v1 import registry_pb2
from tests.kit.router import Rig
from tests.kit.workers import Event, FakeDecode, Script, finished, reserved, tokens
from tests.ports import free_port
from tests.waiting import until

ANSWER = "Paris"
KEYS = {"key-a": "a", "key-b": "b"}


def gated(gate: asyncio.Event) -> Script:
    """Sends the first token, and the others once the gate is open."""

    async def script(
        worker: FakeDecode, request: decode_pb2.GenerateRequest
    ) -> AsyncIterator[Event]:
        yield reserved(request)
        yield tokens(ANSWER[0])
        await gate.wait()
        for letter in ANSWER[1:]:
            yield tokens(letter)
        yield finished(request)

    return script


class Deployment:
    """Two routers with one worker, which answers while its gate is open. Clients of the tenant a, or b."""

    def __init__(self, **settings: Any) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self._rigs = [
            Rig(tenants=KEYS, http_listen=f"127.0.0.1:{free_port()}", **settings) for _ in range(2)
        ]

    def client(self, router: int = 0, key: str = "key-a") -> Any:
        url = f"http://{self._rigs[router].config.http_listen}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=30)

    @property
    def cancelled(self) -> set[str]:
        return self._rigs[0].decodes[0].cancelled

    def close_parts(self) -> None:
        """As at the end of the first router."""
        self._rigs[0].router.parts.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Deployment]:
        for rig in self._rigs:
            await rig.start()
        decode = await self._rigs[0].add_decode(gated(self.gate))
        members = [decode.member]
        for number, rig in enumerate(self._rigs):
            members.append(
                registry_pb2.Member(
                    worker_id=f"router-{number}",
                    incarnation=f"{number}" * 16,
                    role=registry_pb2.Member.ROLE_ROUTER,
                    endpoint=rig.internal_endpoint,
                )
            )
        for rig in self._rigs:
            rig.router.update(members)
        await until(
            lambda: all(rig.router.workers.table("sim").reachable.any() for rig in self._rigs)
        )
        servers = [rig.http_server() for rig in self._rigs]
        for server in servers:
            server.start()
        try:
            yield self
        finally:
            self.gate.set()
            for server in servers:
                await server.stop()
            for rig in reversed(self._rigs):
                await rig.close()


@pytest.fixture
async def deployment(request: pytest.FixtureRequest) -> AsyncIterator[Deployment]:
    async with Deployment(**getattr(request, "param", {})).running() as running:
        yield running


async def respond(client: Any, given: Any = "hi", **fields: Any) -> Any:
    return await client.responses.create(model="sim", input=given, **fields)


async def polled_until(client: Any, response_id: str, status: str) -> Any:
    """The response once it has this status."""
    found = None

    async def reached() -> bool:
        nonlocal found
        found = await client.responses.retrieve(response_id)
        return bool(found.status == status)

    await until(reached, interval_s=0.02)
    return found


@pytest.mark.parametrize("router", [0, 1])
async def test_a_response_is_found_listed_and_deleted_on_every_router(
    deployment: Deployment, router: int
) -> None:
    async with deployment.client() as client, deployment.client(router) as other:
        made = await respond(client, metadata={"a": "b"})
        found = await other.responses.retrieve(made.id)
        assert found == made
        assert found.output_text == ANSWER
        items = await other.responses.input_items.list(made.id)
        assert [item.content[0].text for item in items.data] == ["hi"]
        await other.responses.delete(made.id)
        for one in (client, other):
            with pytest.raises(openai.NotFoundError, match="its router has ended; send all items"):
                await one.responses.retrieve(made.id)
            with pytest.raises(openai.NotFoundError, match="send all of its messages"):
                await respond(one, previous_response_id=made.id)


async def test_another_tenant_finds_nothing(deployment: Deployment) -> None:
    async with deployment.client() as client, deployment.client(key="key-b") as foreign:
        made = await respond(client)
        conversation = await client.conversations.create()
        item = {"type": "item_reference", "id": made.output[0].id}
        attempts = [
            foreign.responses.retrieve(made.id),
            foreign.responses.delete(made.id),
            foreign.responses.cancel(made.id),
            foreign.responses.input_items.list(made.id),
            foreign.conversations.retrieve(conversation.id),
            foreign.conversations.items.list(conversation.id),
            foreign.conversations.items.create(conversation.id, items=[]),
            foreign.conversations.delete(conversation.id),
            respond(foreign, conversation=conversation.id),
            respond(foreign, [item]),
            respond(foreign, previous_response_id=made.id),
        ]
        for attempt in attempts:
            with pytest.raises(openai.NotFoundError):
                await attempt
        assert (await client.responses.retrieve(made.id)).id == made.id


@pytest.mark.parametrize("router", [0, 1])
async def test_a_conversation_has_the_items_of_its_responses(
    deployment: Deployment, router: int
) -> None:
    async with deployment.client() as client, deployment.client(router) as other:
        first: Any = [{"role": "user", "content": "I am Ann"}]
        conversation = await client.conversations.create(items=first, metadata={"topic": "x"})
        response = await respond(other, "hello", conversation=conversation.id)
        assert response.conversation.id == conversation.id
        asked: Any = {"role": "user", "content": "hello"}
        said = [item.model_dump() for item in response.output]
        whole = await client.responses.input_tokens.count(
            model="sim", input=[*first, asked, *said, {"role": "user", "content": "now?"}]
        )
        listed = await other.conversations.items.list(conversation.id, order="asc", limit=2)
        assert [item.role async for item in listed] == ["user", "user", "assistant"]
        counted = await other.responses.input_tokens.count(
            model="sim", input="now?", conversation=conversation.id
        )
        assert counted.input_tokens == whole.input_tokens
        more: Any = [{"role": "user", "content": "more"}]
        added = await other.conversations.items.create(conversation.id, items=more)
        found = await client.conversations.items.retrieve(
            added.data[0].id, conversation_id=conversation.id
        )
        assert found == added.data[0]
        await other.conversations.items.delete(added.data[0].id, conversation_id=conversation.id)
        with pytest.raises(openai.NotFoundError):
            await client.conversations.items.retrieve(
                added.data[0].id, conversation_id=conversation.id
            )
        await other.conversations.update(conversation.id, metadata={"topic": "y"})
        assert (await client.conversations.retrieve(conversation.id)).metadata == {"topic": "y"}
        assert (await other.conversations.delete(conversation.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(conversation.id)


@pytest.mark.parametrize("router", [0, 1])
async def test_a_reference_stands_for_the_item(deployment: Deployment, router: int) -> None:
    async with deployment.client() as client, deployment.client(router) as other:
        made = await respond(client)
        asked = [{"role": "user", "content": "hi"}]
        more = [{"role": "user", "content": "and?"}]
        said = [item.model_dump() for item in made.output]
        named = [{"type": "item_reference", "id": item.id} for item in made.output]
        answers = [await respond(other, [*asked, *items, *more]) for items in (said, named)]
        counts = [answer.usage.input_tokens for answer in answers]
        assert counts[0] == counts[1]
        assert counts[0] > made.usage.input_tokens + len(ANSWER)


@pytest.mark.parametrize("router", [0, 1])
async def test_a_background_response_is_polled_and_its_stream_resumed(
    deployment: Deployment, router: int
) -> None:
    deployment.gate.clear()
    async with deployment.client() as client, deployment.client(router) as other:
        polled = await respond(client, background=True)
        assert (polled.status, polled.background) == ("queued", True)
        stream = await respond(client, background=True, stream=True)
        seen = []
        async for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        response_id = seen[0].response.id
        assert (await other.responses.retrieve(response_id)).status == "in_progress"
        resuming = await other.responses.retrieve(
            response_id, stream=True, starting_after=seen[-1].sequence_number
        )
        deployment.gate.set()
        seen += [event async for event in resuming]
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        texts = [event.delta for event in seen if event.type == "response.output_text.delta"]
        assert "".join(texts) == ANSWER
        assert seen[-1].response == await other.responses.retrieve(response_id)
        again = await other.responses.retrieve(response_id, stream=True)
        assert [event async for event in again] == seen

        found = await polled_until(other, polled.id, "incomplete")
        assert found.output_text == ANSWER
        with pytest.raises(openai.BadRequestError, match="background and stream"):
            await other.responses.retrieve(polled.id, stream=True)
        following = await respond(other, previous_response_id=polled.id)
        assert following.previous_response_id == polled.id


@pytest.mark.parametrize("router", [0, 1])
async def test_a_cancelled_or_deleted_background_response_stops(
    deployment: Deployment, router: int
) -> None:
    deployment.gate.clear()
    async with deployment.client() as client, deployment.client(router) as other:
        made = [await respond(client, background=True) for _ in range(2)]
        for one in made:
            await polled_until(other, one.id, "in_progress")
        assert (await other.responses.cancel(made[0].id)).status == "cancelled"
        await other.responses.delete(made[1].id)
        await until(lambda: len(deployment.cancelled) == 2)
        assert (await other.responses.cancel(made[0].id)).status == "cancelled"
        deployment.gate.set()
        plain = await respond(client)
        with pytest.raises(openai.BadRequestError, match="background: true"):
            await other.responses.cancel(plain.id)


@pytest.mark.parametrize("background", [False, True])
async def test_a_response_that_is_deleted_while_it_runs_is_not_continued(
    deployment: Deployment, background: bool
) -> None:
    deployment.gate.clear()
    async with deployment.client() as client:
        stream = await respond(client, stream=True, background=background)
        response_id = (await anext(stream)).response.id
        await client.responses.delete(response_id)
        deployment.gate.set()
        with contextlib.suppress(openai.APIError):
            async for _ in stream:
                pass
        with pytest.raises(openai.NotFoundError, match="send all of its messages"):
            await respond(client, previous_response_id=response_id)


async def test_a_background_response_ends_with_its_router(deployment: Deployment) -> None:
    deployment.gate.clear()
    async with deployment.client() as client:
        made = await respond(client, background=True)
        await polled_until(client, made.id, "in_progress")
        deployment.close_parts()
        await until(lambda: len(deployment.cancelled) == 1)


async def test_a_background_response_that_fails_says_why(deployment: Deployment) -> None:
    async with deployment.client() as client:
        made = await respond(client, "x" * 2_000, background=True)
        found = await polled_until(client, made.id, "failed")
        assert "context" in found.error.message


@pytest.mark.parametrize("deployment", [{"conversations_mib": 0}], indirect=True)
async def test_without_a_store_nothing_runs_in_the_background(deployment: Deployment) -> None:
    async with deployment.client() as client:
        with pytest.raises(openai.BadRequestError, match="conversations_mib"):
            await respond(client, background=True)
        with pytest.raises(openai.BadRequestError, match="conversations_mib"):
            await client.conversations.create()
        assert not (await respond(client)).store
