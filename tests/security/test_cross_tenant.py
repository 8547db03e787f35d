"""A tenant cannot find out by cached tokens what another one has asked, on a live deployment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_cli.client import API_KEY_FILE_VARIABLE, open_router_internally
from headrace_common.access.credentials import Credentials
from headrace_common.rpc.channel import open_channel
from tests.suite.deployment import DEADLINE_S, Suite, greedy, prompt_of, suite
from tests.waiting import until

REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
BLOCK_TOKENS = 16
ANSWER_TOKENS = 4
FIRST, SECOND = "the-key-of-the-first", "the-key-of-the-second"
WHOLE = 10 * BLOCK_TOKENS
# Prefill computes all but the last token.
PROMPT, OTHER, THIRD = (prompt_of(WHOLE + 1, seed) for seed in (1, 3, 4))
# The prompt is a prefix of it, and some tokens are missing for prefill.
LONGER = [*PROMPT, *prompt_of(BLOCK_TOKENS + 5, 2)]


@dataclass(frozen=True, slots=True)
class Tenant:
    """A client with an API key and without a role."""

    it: Suite
    router: grpc.aio.Channel
    key: str

    @property
    def stub(self) -> Any:
        return inference_pb2_grpc.InferenceServiceStub(self.router)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("x-api-key", self.key),)

    async def ask(self, prompt: Sequence[int]) -> int:
        """The tokens of the prompt that decode has cached."""
        request = greedy(prompt, ANSWER_TOKENS, REMOTE)
        call = self.stub.Generate(request, timeout=DEADLINE_S, metadata=self.metadata)
        responses = [response async for response in call]
        found = [token for response in responses for token in response.token_ids]
        assert tuple(found) == self.it.expected(prompt, ANSWER_TOKENS)
        return int(responses[-1].usage.decode_cached_tokens)


@asynccontextmanager
async def two_tenants(folder: Path, scope: str) -> AsyncIterator[tuple[Tenant, Tenant]]:
    keys = folder / "keys"
    keys.write_text(f"{FIRST} tenant-a\n{SECOND} tenant-b\n")
    settings = (
        ("router", "api_keys_file", str(keys)),
        ("router", "prefix_cache_scope", scope),
        ("prefill", "block_size", str(BLOCK_TOKENS)),
        ("decode", "block_size", str(BLOCK_TOKENS)),
    )
    async with (
        suite(folder, settings=settings) as it,
        open_channel(it.deployment.router, Credentials(role=None)) as router,
    ):
        yield Tenant(it, router, FIRST), Tenant(it, router, SECOND)


async def explained_tokens(it: Suite, prompt: Sequence[int]) -> int:
    """The cached tokens in an explanation that an operator gets with the tenant's key, as by `headrace route`."""
    async with open_router_internally(it.deployment.router_internal) as operator:
        routed = await operator.explain(greedy(prompt, ANSWER_TOKENS))
    return max(int(candidate.cached_tokens) for candidate in routed.candidates)


@pytest.mark.core
async def test_a_tenant_sees_only_its_own_hits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_tenants(tmp_path, "auto") as (first, second):
        assert await first.ask(PROMPT) == 0
        assert await first.ask(OTHER) == 0
        # The other tenant asks the same, and more than that.
        assert await second.ask(LONGER) == 0
        assert await second.ask(OTHER) == 0
        # The same requests have hits for the tenant that has asked them before.
        assert await first.ask(LONGER) == WHOLE
        assert await first.ask(OTHER) == WHOLE
        it = first.it
        # The router's index is as separate as the engines' caches.
        await first.ask(THIRD)
        key_file = tmp_path / "key"
        monkeypatch.setenv(API_KEY_FILE_VARIABLE, str(key_file))
        key_file.write_text(f"{FIRST}\n")

        async def announced() -> bool:
            return await explained_tokens(it, THIRD) == WHOLE

        await until(announced, DEADLINE_S)
        key_file.write_text(SECOND)
        assert await explained_tokens(it, THIRD) == 0


async def test_with_a_shared_cache_a_tenant_sees_the_others_hits(tmp_path: Path) -> None:
    async with two_tenants(tmp_path, "shared") as (first, second):
        assert await first.ask(PROMPT) == 0
        assert await first.ask(OTHER) == 0
        assert await second.ask(LONGER) == WHOLE
        assert await second.ask(OTHER) == WHOLE
